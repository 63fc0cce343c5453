"""Which points the sweeps have, what their rows say, and how a run keeps within its time."""

import os
from typing import Any

from bench.budget import MARGIN, Budget
from bench.methods import ENGINE_PLAIN, SLIPSTREAM, Place
from bench.samples import Sample
from bench.sweeps import Measured, Point, sweep_points, sweep_rows
from bench.usage import cpu_s, forget_peak, peak_bytes
from slipstream.speculation.methods import PRUNERS

FRAMES, MOST_FRAMES = 128, 250


def sample(point: Point, rate: float) -> Sample:
    figures = {"video_tokens": 49.0 * point.num_frames, "mean_accepted_length": 7.0}
    return Sample(point.method, "clip", (1, 2), rate, first_token_s=1.0, figures=figures)


def coordinates(name: str) -> list[dict[str, Any]]:
    return [point.coordinate for point in sweep_points(FRAMES, MOST_FRAMES) if point.sweep == name]


def test_every_number_of_frames_has_plain_decoding_once() -> None:
    points = [point for point in sweep_points(FRAMES, MOST_FRAMES) if point.sweep == "video_tokens"]
    plain = [point.num_frames for point in points if point.method == ENGINE_PLAIN]
    assert len(set(plain)) == len(plain)
    assert set(plain) == {point.num_frames for point in points}
    assert (min(plain), max(plain)) == (10, 243)


def test_no_point_has_more_frames_than_the_model_takes() -> None:
    assert max(point.num_frames for point in sweep_points(FRAMES, 150)) == 150


def test_all_pruners_and_all_alphas_are_swept() -> None:
    assert [where["pruner"] for where in coordinates("pruner")] == list(PRUNERS)
    assert {where["alpha"] for where in coordinates("alpha")} == {0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0}


def test_c_varies_by_draft_and_by_clock() -> None:
    places = {point.place for point in sweep_points(FRAMES, MOST_FRAMES) if point.sweep == "c"}
    assert places == {Place.PAIR, Place.SAME, Place.SLOW_DRAFT, Place.SLOWER_DRAFT}


def test_options_of_a_point_are_its_own() -> None:
    point = next(p for p in sweep_points(FRAMES, MOST_FRAMES) if p.coordinate == {"alpha": 0.25})
    assert (point.options.alpha, point.options.method, point.options.gate) == (0.25, SLIPSTREAM, False)
    assert point.label == "slipstream at alpha 0.25"


def test_speedups_are_over_plain_decoding_of_as_many_frames() -> None:
    points = [p for p in sweep_points(FRAMES, MOST_FRAMES) if p.sweep == "video_tokens"]
    rates = {ENGINE_PLAIN: 40.0}
    rows = sweep_rows([Measured(p, sample(p, rates.get(p.method, 100.0))) for p in points])["video_tokens"]
    assert {row["speedup"] for row in rows if row["method"] == SLIPSTREAM} == {2.5}
    assert {row["speedup"] for row in rows if row["method"] == ENGINE_PLAIN} == {1.0}
    assert all(row["video_tokens"] == 49 * row["frames"] for row in rows)
    lonely = [Measured(p, sample(p, 100.0)) for p in points if p.method == SLIPSTREAM]
    assert {row["speedup"] for row in sweep_rows(lonely)["video_tokens"]} == {None}


def test_a_budget_allows_what_ends_in_time_and_leaves_what_is_reserved() -> None:
    now = [100.0]
    budget = Budget(60.0, clock=lambda: now[0])
    assert budget.allows(60.0 / MARGIN)
    now[0] = 130.0
    assert budget.spent_s == 30.0
    assert budget.allows(20.0)
    assert not budget.allows(20.0, reserved_s=10.0)


def test_the_use_of_a_process_is_read() -> None:
    pid = os.getpid()
    before_s = cpu_s(pid)
    sum(range(3_000_000))
    assert cpu_s(pid) >= before_s
    forget_peak(pid)
    assert peak_bytes(pid) > 1_000_000
