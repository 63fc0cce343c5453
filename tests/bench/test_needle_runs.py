"""Figures of the pruners' comparison: from counts to M, its intervals, and one clip through a pair of models."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.common import MODELS
from bench.needles import (
    ORACLE,
    PRUNERS,
    ClipFindings,
    Pair,
    Reading,
    draw,
    keep_needles,
    resample,
    share_named,
    summarise,
)
from bench.report.pictures import save, styled
from training.needles import GRID, sample_needle_clip, write_needle_caption

FRAMES = 56


def reading(pruner: str, agrees: str, world: int = 0) -> Reading:
    return Reading(pruner, 0.9, world, tuple(letter == "y" for letter in agrees), 1.0, 0.0)


def findings(*readings: Reading) -> ClipFindings:
    return ClipFindings(readings, {}, {}, 1.0)


@pytest.mark.parametrize(("agrees", "runs"), [("yyyy", 1), ("yyny", 2), ("nyyy", 2), ("nnnn", 5)])
def test_runs_end_where_draft_and_target_differ(agrees: str, runs: int) -> None:
    assert reading("uv", agrees).counts == (agrees.count("y"), runs, 4)


def test_a_row_for_every_pruner_with_intervals_around_its_figures() -> None:
    clips = [
        findings(reading("uv", "yyyyyy" if number % 2 else "yynyyy", world), reading("random", "ynynyn", world))
        for world in (0, 1)
        for number in range(4)
    ]
    uv, other = summarise(clips)
    assert (uv["M"], other["M"]) == (round(44 / 12, 3), 0.75)
    assert uv["M_low"] < uv["M"] < uv["M_high"] and uv["M_over_random_low"] > 1
    assert other["M_low"] == other["M_high"] == 0.75 and other["M_over_random"] == 1
    assert uv["M_world_0"] == uv["M_world_1"] == round(44 / 12, 2)


def test_a_resample_has_as_many_clips_of_each_world() -> None:
    drawn = resample([0, 0, 1, 1, 1], np.random.default_rng(0), 50)
    assert drawn.shape == (50, 5)
    assert (drawn[:, :2] < 2).all() and (drawn[:, 2:] >= 2).all()


@pytest.mark.parametrize("num_keep", [10, 63, 600])
def test_the_oracle_keeps_needles_first(num_keep: int) -> None:
    clip = sample_needle_clip(2)
    places = {place for needle in clip.needles for place in needle.places}
    keep = keep_needles(clip, num_keep)
    assert len(keep) == len(keep.unique()) == num_keep and torch.equal(keep, keep.sort().values)
    assert len(places & set(keep.tolist())) == min(num_keep, len(places))


def test_a_caption_is_scored_sentence_by_sentence() -> None:
    clip = sample_needle_clip(3)
    text = write_needle_caption(clip)
    assert share_named(text, clip) == 1 and share_named("", clip) == 0
    assert share_named(text.replace(" shows up", "", 1), clip) == 1
    assert share_named(text.replace(clip.needles[0].look.shape, "cross", 1), clip) == 17 / 18


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_pair_reads_a_clip_by_every_pruner(tmp_path: Path) -> None:
    clip = sample_needle_clip(9_000_000, FRAMES)
    found = Pair(MODELS["draft"], MODELS["draft"]).read(clip, 0, (0.95,))
    assert [one.pruner for one in found.readings] == [*PRUNERS, ORACLE] == list(found.kept)
    assert {len(kept) for kept in found.kept.values()} == {round(0.05 * FRAMES * GRID * GRID)}
    assert found.readings[-1].needles_kept == 1 and len({len(one.agrees) for one in found.readings}) == 1
    assert all(0 <= rank < 1 for ranks in found.needle_ranks.values() for rank in ranks)
    with styled():
        save(draw(clip, found.kept), tmp_path / "needles.png")
    assert (tmp_path / "needles.png").stat().st_size < 100_000
