"""Methods are compositions: their parts can be changed one by one, and those that do not go together are refused."""

from typing import Any

import pytest

from slipstream.engine.local_drafter import LocalDrafter, find_local_drafter
from slipstream.errors import InvalidRequest
from slipstream.pruning import get_pruner
from slipstream.pruning.lossy import make_schedule
from slipstream.rpc.v1 import target_pb2
from slipstream.session_messages import PrefillStage
from slipstream.speculation.methods import (
    ATTENTION_PRUNERS,
    LOSSY_METHODS,
    METHODS,
    PRUNERS,
    Drafter,
    GuidanceKind,
    Lossy,
    Method,
    Shape,
    get_method,
)
from slipstream.speculation.pacing import get_policy


@pytest.mark.parametrize("name", PRUNERS)
def test_every_pruner_s_code_is_where_its_table_says(name: str) -> None:
    pruner = get_pruner(name)
    assert pruner.name == name
    assert callable(pruner.keep)
    assert (name in ATTENTION_PRUNERS) == (pruner.score is not None and pruner.score.is_attention)


def test_the_tables_are_those_of_the_wire_and_of_the_gateway() -> None:
    def on_the_wire(enum: Any, prefix: str) -> set[str]:
        return {name.removeprefix(prefix).lower() for name, _ in enum.items()} - {"unspecified"}

    assert on_the_wire(target_pb2.GuidanceKind, "GUIDANCE_KIND_") == set(GuidanceKind)
    assert on_the_wire(target_pb2.Stage, "STAGE_") == set(PrefillStage)


def test_every_lossy_baseline_drops_somewhere() -> None:
    for method in LOSSY_METHODS:
        stages = make_schedule(Lossy(method, 0.5), num_video=100, num_layers=32).stages
        assert stages and all(0 <= stage.after_layer < 32 for stage in stages)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_part_of_a_method_exists(method: Method) -> None:
    assert get_method(method.name) is method
    assert method.pruner in PRUNERS
    get_policy(method.policy, method.gamma)
    assert method.changed(None, None, None, None, None) == method
    assert (method.drafter is Drafter.SELF) == (bool(method.local_drafter) and not method.is_hybrid)
    if method.local_drafter:
        assert LocalDrafter in find_local_drafter(method.name).__mro__


def test_an_unknown_method_lists_those_there_are() -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"slipstream, slipstream_siblings, slipstream_branches, .*parallelvlm, specvlm, sd, sd_tree, onsd, std",
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
        ("slipstream", (None, "fixed", "tree", None, None), "shape 'tree': .* in turns"),
        ("specvlm", (None, "fixed", None, None, None), "policy 'fixed': .* in turns"),
        ("hints", (None, None, None, True, None), "gate True: .* in turns"),
        ("sd", (None, None, "siblings", None, None), "shape 'siblings': .* while the target judges"),
        ("slipstream_tree", (None, "fixed", None, None, None), "policy 'fixed': .* while the target judges"),
    ],
)
def test_parts_that_do_not_go_together(name: str, changes: tuple[Any, ...], complaint: str) -> None:
    """The complaint begins with one that was given: over HTTP that is the field that is named."""
    with pytest.raises(InvalidRequest, match=complaint):
        get_method(name).changed(*changes)
