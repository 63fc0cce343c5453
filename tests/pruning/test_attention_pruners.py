"""SpecVLM's two stages and its parts, on scores whose right answer can be seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.pruning import Guidance, VideoTokens, get_pruner, prune
from slipstream.pruning.guided import TOP_P, TOP_P_SHARE
from slipstream.pruning.unguided import evenly


def kept(name: str, scores: torch.Tensor, alpha: float) -> list[int]:
    return prune(get_pruner(name), VideoTokens(len(scores)), alpha, guidance=Guidance(scores=scores)).tolist()


@pytest.mark.parametrize("name", ["attention", "attention_variation", "uv_cosine"])
def test_single_scores_keep_the_best(name: str) -> None:
    assert kept(name, torch.tensor([0.1, 0.5, 0.2, 0.4]), 0.5) == [1, 3]


def test_one_token_with_all_attention_leaves_the_rest_to_even_spacing() -> None:
    scores = torch.zeros(40)
    scores[17] = 1.0
    rest = [place for place in range(40) if place != 17]
    spread = [rest[index] for index in evenly(39, 7).tolist()]
    assert kept("specvlm", scores, 0.8) == sorted([17, *spread])


@given(st.lists(st.integers(1, 1000).map(float), min_size=4, max_size=200), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_stage_one_is_the_shortest_list_that_reaches_its_share(values: list[float], alpha: float) -> None:
    scores = torch.tensor(values)
    keep = set(kept("specvlm", scores, alpha))
    ranked = scores.argsort(descending=True, stable=True).tolist()
    reached, stage_one = 0.0, []
    for place in ranked:
        if reached >= TOP_P * sum(scores.tolist()) * (1 - 1e-5):  # rounding may go either way at the very limit
            break
        stage_one.append(place)
        reached += float(scores[place])
    assert set(stage_one[: int(len(keep) * TOP_P_SHARE)]) <= keep


def test_states_say_nothing_of_attention() -> None:
    states = (torch.zeros(4, 2), torch.zeros(4, 2))
    guidance = Guidance(video_states=states, text_sums=(torch.zeros(2), torch.zeros(2)))
    with pytest.raises(InvalidRequest, match="attention"):
        prune(get_pruner("attention"), VideoTokens(4), 0.5, guidance=guidance)
