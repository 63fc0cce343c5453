"""A caption that runs alone has windows of a fixed width where that is cheap, and then the same bits in all of them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engine import VideoLM, load_model
from slipstream.engine.startup import try_static_steps
from slipstream.engine.static import steps
from slipstream.engine.static.pool import Extent
from slipstream.engine.static.step import StaticStep
from slipstream.engine.static.widths import MOST_COST, WidthTimes, choose_width
from slipstream.engine.static.windows import StepShape
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import Pair
from tests.engine.static.test_static_steps import close, prefill

TREE = TokenTree((5, 6, 7), (-1, -1, 0))


@pytest.mark.parametrize(
    ("fixed_s", "width"),
    [
        ({16: 1.0, 32: 1.0}, 32),
        ({16: 1.05, 32: 1.06}, 16),
        ({16: 1.051, 32: 1.2}, 0),
        ({16: 1.3, 32: 1.0}, 32),
        ({16: 0.9}, 16),
        ({}, 0),
    ],
)
def test_the_widest_that_is_cheap_is_chosen(fixed_s: dict[int, float], width: int) -> None:
    assert choose_width(WidthTimes(1.0, fixed_s)) == width


times = st.floats(1e-6, 10.0)


@given(times, st.dictionaries(st.sampled_from((8, 16, 32)), times))
def test_what_is_chosen_is_cheap_and_nothing_wider_is(fastest_s: float, fixed_s: dict[int, float]) -> None:
    width = choose_width(WidthTimes(fastest_s, fixed_s))
    assert width == 0 or fixed_s[width] <= MOST_COST * fastest_s
    assert all(seconds > MOST_COST * fastest_s for other, seconds in fixed_s.items() if other > width)


def fixed_model(pair: Pair, monkeypatch: pytest.MonkeyPatch, cost: float = 1.0, **options: Any) -> VideoLM:
    """Whose passes seem to take a second, and those of 16 rows `cost` times that; of 32 rows twice as much."""
    seconds = {1: 1.0, 16: cost, 32: 2 * cost}
    monkeypatch.setattr(steps, "_step_s", lambda step, extent, num_rows: seconds[num_rows])
    model = load_model(str(pair.path), **options)
    try_static_steps(model, model.runner.kv_bytes_per_token * 5000, fix_widths=True)
    return model


def shapes_of(model: VideoLM) -> list[tuple[int, int]]:
    assert model.static is not None
    return sorted((shape.num_sessions, shape.num_rows) for shape in model.static._steps if shape.capacity == 4096)


def test_a_window_has_the_same_bits_however_many_rows_are_real(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fixed_model(pair, monkeypatch)
    assert model.static is not None and model.static.fixed_widths == {4096: 16, 8192: 16}
    token_ids = [5 + 7 * index % 200 for index in range(16)]
    state = prefill(model)
    num_before = state.num_tokens
    (whole,) = model.step([(state, token_ids)])
    for num_real in range(1, 16):
        state.rollback(num_before)
        (part,) = model.step([(state, token_ids[:num_real])])
        assert torch.equal(part, whole[:num_real]) and state.num_tokens == num_before + num_real


@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_token_has_the_same_bits_alone_and_in_a_window(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    model = fixed_model(pair, monkeypatch)
    token_ids = [5 + 7 * index % 200 for index in range(96)]
    rows = []
    for width in (16, length):
        state = prefill(model)
        firsts = range(0, len(token_ids), width)
        rows.append(torch.cat([model.step([(state, token_ids[at : at + width])])[0] for at in firsts]))
    assert torch.equal(*rows)


def test_only_steps_of_the_width_are_recorded_for_chains(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fixed_model(pair, monkeypatch)
    before = shapes_of(model)
    assert {(1, 16), (1, 32)} <= {*before}
    for length in (1, 3, 7, 16, 17):
        model.step([(prefill(model), [5] * length)])
    assert shapes_of(model) == before


def test_what_does_not_fit_the_width_takes_other_steps(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fixed_model(pair, monkeypatch)
    for window in (TREE, [5] * 20):
        state, other = prefill(model), prefill(pair.ours)
        close(model.step([(state, window)])[0], pair.ours.step([(other, window)])[0])
    states, others = [prefill(model), prefill(model, 2)], [prefill(pair.ours), prefill(pair.ours, 2)]
    found = model.step([(state, [5, 6]) for state in states])
    for logits, expected in zip(found, pair.ours.step([(other, [5, 6]) for other in others]), strict=True):
        close(logits, expected)
    assert {(1, 4), (2, 2)} <= {*shapes_of(model)}
    assert model.write_ahead([(prefill(model), 5)], 3) is None, "one row of a step cannot feed the next"


def test_a_width_that_costs_more_is_not_taken(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fixed_model(pair, monkeypatch, cost=1.06)
    assert model.static is not None and set(model.static.fixed_widths.values()) == {0}
    assert (1, 8) in shapes_of(model)
    model.step([(prefill(model), [5, 6])])


def test_passes_are_timed_over_a_full_cache(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is chosen here."""
    timed: list[tuple[int, int]] = []

    def spy(step: StaticStep, extent: Extent, num_rows: int) -> float:
        timed.append((extent.length, num_rows))
        return step_s(step, extent, num_rows)

    step_s = steps._step_s
    monkeypatch.setattr(steps, "_step_s", spy)
    model = load_model(str(pair.path))
    model.open_static_steps(model.runner.kv_bytes_per_token * 1000)
    assert model.static is not None
    model.static.fix_widths()
    assert sorted(timed) == [(960, 1), (960, 16), (960, 32)]
    assert set(model.static.fixed_widths) == {4096} and model.static.pool.num_free == 1000
    state, other = prefill(model), prefill(pair.ours)
    close(model.step([(state, [5, 6])])[0], pair.ours.step([(other, [5, 6])])[0])


def test_what_has_no_room_for_a_row_leaves_the_pool_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(step: StaticStep) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StaticStep, "record", record)
    model = load_model(str(pair.path))
    model.open_static_steps(model.runner.kv_bytes_per_token * 1000)
    assert model.static is not None
    model.static.fix_widths()
    assert model.static.fixed_widths == {4096: 0} and model.static.pool.num_free == 1000


def test_nobody_records_before_all_ranks_have_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what is recorded they wait for each other."""
    model = load_model(str(pair.path))
    model.open_static_steps(model.runner.kv_bytes_per_token * 1000)
    assert model.static is not None
    recorded: list[StaticStep] = []
    monkeypatch.setattr(StaticStep, "record", recorded.append)
    monkeypatch.setattr(model.static._accord, "agree", lambda said, decide: decide([said, steps._NO_ROOM]))
    assert model.static.make(StepShape(1, 1, 4096)) is None and not recorded
