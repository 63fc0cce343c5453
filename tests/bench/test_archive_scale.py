"""The check of the archive at scale can fail."""

from typing import Any

import pytest

from bench.archive_placement import is_wrong
from bench.archive_scale import PARTS
from bench.archive_spill import rate_facts
from bench.film_kills import EDGE_BLOCKS, needed_bytes, unpaired
from slipstream.objects.cached_reader import BLOCK_BYTES, READ_AHEAD_BLOCKS
from slipstream.speculation.placement import Advice

BOUNDED = {name: part for name, part in PARTS.items() if part.zeros or part.at_most}
TIMES = {"largest_time_error_s": 0.125, "frame_step_s": 0.125}
RANGES = {"fetched_bytes": 80, "needed_bytes": 80}
RATES = {"jobs_per_s": 2000.0, "rate_asked": 2000.0}
COPIES: dict[str, Any] = {"recall": 0.95, "precision": 0.99, "search": {"recall": 0.95, "precision": 0.99}}


def sound(name: str) -> dict[str, Any]:
    part = PARTS[name]
    return dict.fromkeys(part.zeros, 0) | dict(part.at_most) | TIMES | RANGES | RATES


@pytest.mark.parametrize("name", BOUNDED)
def test_figures_within_their_bounds_pass(name: str) -> None:
    assert PARTS[name].passes(sound(name))


@pytest.mark.parametrize(
    ("name", "figure"), [(name, figure) for name, part in BOUNDED.items() for figure in (*part.zeros, *part.at_most)]
)
def test_one_above_its_bound_fails_and_so_does_one_that_is_missing(name: str, figure: str) -> None:
    report = sound(name)
    assert not PARTS[name].passes(report | {figure: report[figure] * 1.01 + 0.01})
    del report[figure]
    with pytest.raises(KeyError, match=figure):
        PARTS[name].passes(report)


def test_a_segment_that_is_out_of_time_fails() -> None:
    assert not PARTS["film"].passes(sound("film") | {"largest_time_error_s": 0.126})


def test_a_shot_that_is_missed_invented_or_moved_is_counted() -> None:
    scenes_s = [4.0, 14.0, 24.0]
    assert unpaired([4.0, 14.125, 24.0], scenes_s, 0.125) == 0
    assert unpaired([4.0, 24.0], scenes_s, 0.125) == 1
    assert unpaired([4.0, 9.0, 14.0, 24.0], scenes_s, 0.125) == 1
    assert unpaired([4.0, 14.25, 24.0], scenes_s, 0.125) == 2


@pytest.mark.parametrize("fetched", [0, 81])
def test_a_film_of_which_too_much_is_fetched_or_nothing_from_the_bucket_fails(fetched: int) -> None:
    assert not PARTS["film-bucket"].passes(sound("film-bucket") | {"fetched_bytes": fetched})


def test_a_gateway_needs_the_segments_that_are_missing_and_the_index() -> None:
    film = bytes(600_000) + (1_000).to_bytes(4, "big") + b"moov" + bytes(992)
    edges = EDGE_BLOCKS * BLOCK_BYTES + 1_000
    assert needed_bytes(film, [], 6, 0) == 0
    assert needed_bytes(film, [6], 6, 0) == len(film) + edges
    assert needed_bytes(film, [6, 3, 1], 6, 0) == len(film) + len(film) // 2 + len(film) // 6 + 3 * edges
    assert needed_bytes(film, [6], 6, 2) - needed_bytes(film, [6], 6, 0) == 2 * READ_AHEAD_BLOCKS * BLOCK_BYTES


def test_a_rate_that_is_missed_fails_and_says_whether_the_machine_had_other_work() -> None:
    assert not PARTS["spill"].passes(sound("spill") | {"jobs_per_s": 1999.0})
    said = [
        rate_facts({"jobs_per_s": rate, "others_cores": others}, 2000.0, 1.5)
        for rate, others in ((2000.0, 1.0), (1999.0, 1.0), (1999.0, 0.1))
    ]
    assert [one.get("rate_missed", "") for one in said] == [
        "",
        "other processes took 1.00 cores meanwhile",
        "on an idle machine",
    ]
    assert [one["reaches_rate_asked"] for one in said] == [True, False, False]


@pytest.mark.parametrize(
    ("advice", "times", "wrong"),
    [
        (Advice.DRAFT, 1.8, False),
        (Advice.DRAFT, 0.95, False),
        (Advice.DRAFT, 0.8, True),
        (Advice.EITHER, 0.8, True),
        (Advice.EITHER, 1.8, False),
        (Advice.PLAIN, 1.2, True),
        (Advice.PLAIN, 1.05, False),
    ],
)
def test_advice_is_wrong_where_the_other_placement_was_clearly_faster(
    advice: Advice, times: float, wrong: bool
) -> None:
    assert is_wrong(advice, times) is wrong


def test_copies_that_are_told_from_others_pass() -> None:
    assert PARTS["duplicates"].passes(COPIES)


@pytest.mark.parametrize(
    "wrong", [{"recall": 0.94}, {"precision": 0.98}, {"search": {"recall": 0.9, "precision": 1.0}}]
)
def test_copies_that_are_missed_or_mistaken_fail(wrong: dict[str, Any]) -> None:
    assert not PARTS["duplicates"].passes(COPIES | wrong)
