"""Methods are compositions: their parts can be changed one by one, and those that do not go together are refused."""

import pytest

from slipstream.errors import InvalidRequest
from slipstream.pruning import PRUNER_NAMES, get_pruner
from slipstream.speculation.methods import ATTENTION_PRUNERS, METHODS, PRUNERS, Drafter, Method, Shape, get_method
from slipstream.speculation.pacing import get_policy


def test_names_for_processes_without_torch() -> None:
    assert sorted(PRUNERS) == sorted(PRUNER_NAMES)
    scores = {name: get_pruner(name).score for name in PRUNER_NAMES}
    assert set(ATTENTION_PRUNERS) == {
        name for name, score in scores.items() if score is not None and score.is_attention
    }


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_part_of_a_method_exists(method: Method) -> None:
    assert get_method(method.name) is method
    assert method.pruner in PRUNER_NAMES
    get_policy(method.policy, method.gamma)
    assert method.changed(None, None, None, None, None) == method


def test_an_unknown_method_lists_those_there_are() -> None:
    with pytest.raises(
        InvalidRequest, match="slipstream, parallelvlm, specvlm, sd, sd_tree, onsd, std, autoregressive"
    ):
        get_method("magic")


def test_parts_can_be_changed_alone() -> None:
    chain = get_method("specvlm").changed(None, None, "chain", None, 7)
    assert (chain.pruner, chain.shape, chain.gamma) == ("specvlm", Shape.CHAIN, 7)
    assert get_method("slipstream").changed("uv", None, None, False, None).drafter is Drafter.DRAFT


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("slipstream", (None, None, "tree", None, None), "in turns"),
        ("parallelvlm", (None, None, "tree", None, None), "in turns"),
        ("sd", (None, None, "star", None, None), "chain, tree"),
    ],
)
def test_parts_that_do_not_go_together(name: str, changes: tuple[None, None, str, None, None], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        get_method(name).changed(*changes)
