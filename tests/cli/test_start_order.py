"""Target and draft of one GPU start one after the other, so that neither takes the other's memory."""

import pytest

from slipstream.stack.local import StackOptions
from slipstream.stack.start_order import start_groups

NAMES = ["target", "draft", "reader", "gateway", "front"]
TOGETHER = [["target", "draft", "reader"], ["gateway", "front"]]
APART = [["target", "reader"], ["draft"], ["gateway", "front"]]


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, TOGETHER),
        ({"device": "cuda:0"}, APART),
        ({"device": "cuda", "draft_device": "cuda:0"}, APART),
        ({"device": "cuda:0", "draft_device": "cuda:1"}, TOGETHER),
        ({"device": "cuda:0", "draft_device": "cpu"}, TOGETHER),
        ({"target_gpus": "0, 1", "draft_device": "cuda:1"}, APART),
        ({"target_gpus": "0,1"}, APART),
        ({"target_gpus": "0,1", "draft_device": "cuda:2"}, TOGETHER),
    ],
)
def test_who_starts_together(options: dict[str, str], groups: list[list[str]]) -> None:
    made = StackOptions(**options)  # type: ignore[arg-type]
    assert start_groups(NAMES, made.devices_of("target"), made.devices_of("draft")) == groups


def test_without_a_draft_there_is_nobody_to_wait_for() -> None:
    assert start_groups(["target", "gateway"], ["cuda:0"], ["cuda:0"]) == [["target"], ["gateway"]]
