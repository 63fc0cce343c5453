"""What is said of clips that were sampled, and of damaged ones."""

import io
from dataclasses import replace
from typing import Any

import pytest

from bench import archive_formats
from bench.archive_formats import NAMES, all_clips, fault_of, run_damaged
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from tests.support.clip_kinds import CLIPS, OLD_CLIPS
from tests.support.media import make_clip


class Given:
    """Of the command line."""

    seed, damaged_files = 1, 40


def test_wrong_frames_and_wrong_times_are_faults() -> None:
    spec = CLIPS["h264"]
    with sample_video(io.BytesIO(make_clip(spec)), 5, DecodeLimits()) as video:
        assert fault_of(video, spec, 5) == ""
        assert fault_of(video, replace(spec, times_ms=spec.times_ms[:40]), 5).startswith("frames [0, 10, 20, 30, 40]")
        slower = replace(spec, times_ms=[2 * time_ms for time_ms in spec.times_ms])
        assert fault_of(video, slower, 5).startswith("times ")


def test_all_clips_of_the_tables_are_looked_at() -> None:
    names = {(clip.tier, clip.name) for clip in all_clips()}
    assert names >= {(NAMES[0], name) for name in CLIPS}
    assert names >= {(tier, name) for tier, clips in OLD_CLIPS.items() for name in clips}


@pytest.mark.parametrize(
    ("found", "figures"),
    [
        ({"passed": True, "files": 40, "outcomes": {"frames": 30, "UnreadableVideo": 10}}, (0, 0, 0, 0)),
        ({"passed": False}, (1, 40, 0, 0)),
        ({"passed": True, "files": 39, "outcomes": {"UnreadableVideo, crashed": 2}}, (0, 1, 2, 0)),
        ({"passed": True, "files": 40, "outcomes": {"LimitExceeded, longer than": 3}}, (0, 0, 0, 3)),
    ],
)
async def test_crashes_hangs_and_files_that_were_not_tried_are_counted(
    found: dict[str, Any], figures: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_damage(name: str, seed: int, examples: int) -> dict[str, Any]:
        assert (name, seed, examples) == ("old-files", 1, 40)
        return found

    monkeypatch.setattr(archive_formats, "run_damage", run_damage)
    said = await run_damaged(Given())  # type: ignore[arg-type]
    assert tuple(said[name] for name in ("failed", "files_missing", "crashed", "hung")) == figures
