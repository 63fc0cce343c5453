"""Old formats: the right frames at the tier that takes them, and a refusal that names that tier below it."""

import io
import re
from pathlib import Path

import av
import pytest

from slipstream.errors import UnreadableVideo
from slipstream.video.decode import sample_video
from slipstream.video.formats import CODECS, CONTAINERS, TIERS, refused
from slipstream.video.messages import DecodeLimits, SampledVideo
from tests.support.clip_kinds import DOUBTFUL_KEYS, OLD_CLIPS
from tests.support.media import ClipSpec, even_times_ms, expected_indices, make_clip, read_index

ROOT = Path(__file__).resolve().parents[2]
NAMES = list(TIERS)
OPEN_OTHERS = ("hls", "dash", "concat", "image2", "lavfi", "rtsp", "sdp", "rtp", "vobsub", "webm_dash_manifest", "imf")


def sample(data: bytes, num_frames: int, tier: str) -> SampledVideo:
    return sample_video(io.BytesIO(data), num_frames, DecodeLimits(formats=tier))


def check_frames(data: bytes, spec: ClipSpec, num_frames: int, tier: str) -> None:
    video = sample(data, num_frames, tier)
    expected = expected_indices(spec.times_ms, num_frames)
    assert [read_index(frame) for frame in video.frames] == expected
    assert video.timestamps_s == pytest.approx([spec.times_ms[index] / 1000 for index in expected], abs=2e-3)


@pytest.mark.parametrize(("tier", "name"), [(tier, name) for tier in OLD_CLIPS for name in OLD_CLIPS[tier]])
def test_old_formats_give_exactly_the_expected_frames(tier: str, name: str) -> None:
    spec = OLD_CLIPS[tier][name]
    data = make_clip(spec)
    for num_frames in (1, 5):
        check_frames(data, spec, num_frames, tier)
    assert sample(data, 5, NAMES[-1]).timestamps_s == sample(data, 5, tier).timestamps_s
    below = NAMES[NAMES.index(tier) - 1]
    with pytest.raises(UnreadableVideo, match=f"is not served at --formats {below}; --formats {tier} takes it"):
        sample(data, 1, below)


def test_theora_in_ogg() -> None:
    """PyAV cannot write it: `ffmpeg -i INDEX_PICTURES -c:v libtheora -q:v 5 -g 6` has."""
    data = (Path(__file__).parent / "data" / "theora.ogv").read_bytes()
    check_frames(data, ClipSpec(even_times_ms(12)), 5, "archive")
    with pytest.raises(UnreadableVideo, match="container 'ogg' is not served at --formats modern"):
        sample(data, 1, "modern")


def test_packets_that_are_wrongly_called_keys_are_decoded_from_the_start() -> None:
    check_frames(make_clip(DOUBTFUL_KEYS), DOUBTFUL_KEYS, 5, "modern")


def test_the_default_is_the_archives_tier() -> None:
    assert DecodeLimits().formats == "archive"


def test_what_no_tier_takes_is_told_apart_from_what_another_takes() -> None:
    with pytest.raises(UnreadableVideo, match="not recognised as one of mov"):
        sample(make_clip(ClipSpec(even_times_ms(3), container="h264")), 1, "all")
    assert str(refused("codec", "tiff", "all")).startswith("codec 'tiff' is not served; convert to h264")
    assert "--formats archive takes it" in str(refused("codec", "wmv3", "modern"))


def test_a_refusal_names_the_same_container_every_time() -> None:
    """libav's log, which names it, leaves out what it has said just before."""
    nut, asf = (make_clip(ClipSpec(even_times_ms(3), container=name, codec="mpeg4")) for name in ("nut", "asf"))
    for _ in range(3):
        for data, name in ((nut, "nut"), (nut, "nut"), (asf, "asf")):
            with pytest.raises(UnreadableVideo, match=f"container '{name}' is not served"):
                sample(data, 1, "modern")


def test_tiers_name_what_libav_has_and_each_thing_once() -> None:
    containers, codecs = CONTAINERS["all"], [codec for tier in TIERS.values() for codec in tier.codecs]
    assert len(set(containers)) == len(containers) and len(set(codecs)) == len(codecs)
    assert CONTAINERS["modern"] < CONTAINERS["archive"] < containers
    assert CODECS["modern"] < CODECS["archive"] < CODECS["all"]
    assert all(av.format.ContainerFormat(name.partition(",")[0]).is_input for name in containers)
    assert [av.Codec(name, "r").name for name in codecs] == codecs
    assert all(av.Codec(name, "r").type == "video" for name in codecs)


def test_nothing_that_opens_other_files_or_hardware_is_in_any_tier() -> None:
    """What cannot be opened from bytes alone libav marks itself; the rest of the list is known by name."""
    names = {name for container in CONTAINERS["all"] for name in container.split(",")}
    assert not names & set(OPEN_OTHERS)
    assert not any(name.endswith("_pipe") for name in names)
    hardware = ("_cuvid", "_qsv", "_amf", "_v4l2m2m", "_videotoolbox", "_vaapi")
    assert not [codec for codec in CODECS["all"] if codec.endswith(hardware)]
    assert all(not av.format.ContainerFormat(name.partition(",")[0]).no_file for name in CONTAINERS["all"])


def test_the_documents_lists_are_the_tiers() -> None:
    sections = (ROOT / "docs" / "formats.md").read_text().split("\n## ")
    for name, tier in TIERS.items():
        (section,) = (text for text in sections if text.startswith(f"{name}\n"))
        for kind, words in (("Containers", tier.containers), ("Codecs", tier.codecs)):
            listed = section.partition(f"{kind}: ")[2].partition(".\n")[0]
            assert re.findall(r"`([^`]+)`", listed) == list(words)
