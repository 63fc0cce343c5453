"""The schedules of the lossy baselines: what they keep on average, where, and by whose rating."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.pruning.lossy import Schedule, make_schedule, text_raters
from slipstream.speculation.methods import LOSSY_METHODS, Lossy

METHODS = st.sampled_from(LOSSY_METHODS)


def schedule(method: str, keep: float, num_video: int = 1000, num_layers: int = 32) -> Schedule:
    return make_schedule(Lossy(method, keep).check(), num_video=num_video, num_layers=num_layers)


def mean_kept(made: Schedule, num_video: int, num_layers: int) -> float:
    """Video tokens of a layer, on average."""
    layers = (0, *(stage.after_layer for stage in made.stages), num_layers)
    kept = (num_video, *(stage.num_keep for stage in made.stages))
    spans = [last - first for first, last in pairwise(layers)]
    return sum(span * num_kept for span, num_kept in zip(spans, kept, strict=True)) / num_layers


@given(METHODS, st.floats(0.001, 1.0), st.integers(1, 30_000), st.integers(1, 96))
def test_the_layers_keep_what_was_asked_for_on_average(method: str, keep: float, num_video: int, layers: int) -> None:
    if method != "dycoke" and keep < 1 / layers:
        with pytest.raises(InvalidRequest, match="lossy_keep"):
            schedule(method, keep, num_video, layers)
        return
    made = schedule(method, keep, num_video, layers)
    assert abs(mean_kept(made, num_video, layers) - keep * num_video) <= 1
    places = [stage.after_layer for stage in made.stages]
    kept = [num_video, *(stage.num_keep for stage in made.stages)]
    assert places == sorted(set(places)) and all(0 <= place < layers for place in places)
    assert kept == sorted(kept, reverse=True) and kept[-1] >= 0


@pytest.mark.parametrize(
    ("method", "places"),
    [("fastv", [2]), ("pyramiddrop", [8, 16, 24]), ("sparsevlm", [2, 6, 15]), ("dycoke", [0])],
)
def test_where_they_drop(method: str, places: list[int]) -> None:
    made = schedule(method, 0.5)
    assert [stage.after_layer for stage in made.stages] == places
    kept = [1000, *(stage.num_keep for stage in made.stages)]
    ratios = [after / before for before, after in pairwise(kept)]
    assert ratios == pytest.approx([ratios[0]] * len(places), abs=0.01)


def test_the_parameters_of_the_originals() -> None:
    """FastV with K = 2 and R = 50% keeps 17/32; PyramidDrop with lambda 0.5 (1 + 1/2 + 1/4 + 1/8) / 4."""
    assert schedule("fastv", 17 / 32).stages[0].num_keep == 500
    assert [stage.num_keep for stage in schedule("pyramiddrop", 15 / 32).stages] == [500, 250, 125]


def test_a_share_below_the_first_layers_moves_the_stages_to_the_front() -> None:
    assert [stage.after_layer for stage in schedule("pyramiddrop", 0.1).stages] == [3, 11, 19]
    assert [stage.after_layer for stage in schedule("fastv", 0.1, num_layers=12).stages] == [1]
    with pytest.raises(InvalidRequest, match=r"fastv.* 12 layers.* 0\.083"):
        schedule("fastv", 0.05, num_layers=12)


@pytest.mark.parametrize("method", LOSSY_METHODS)
def test_keeping_all_drops_nowhere(method: str) -> None:
    made = schedule(method, 1.0)
    assert made.stages == ()


def test_raters_are_the_text_that_the_video_is_like() -> None:
    video = torch.tensor([[4.0, 0.0, 0.0], [0.0, 3.0, 0.0]]).repeat(1500, 1)
    text = torch.tensor([[0.0, 0.0, 9.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [-1.0, -1.0, 0.0]])
    assert text_raters(video, text) == [1, 2]
    assert text_raters(video, text[:1]) == [0]
    relevance = (video @ text.T).softmax(dim=1).mean(dim=0)
    assert text_raters(video, text) == (relevance >= relevance.mean()).nonzero().flatten().tolist()
