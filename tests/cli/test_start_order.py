"""Target and draft of one GPU start one after the other, so that neither takes the other's memory."""

import os
import signal
from dataclasses import replace

import pytest

from slipstream.stack.local import Stack, StackOptions
from slipstream.stack.process import ServiceProcess
from slipstream.stack.start_order import start_groups
from tests.cli.test_stack import options

__all__ = ["options"]
NAMES = ["target", "draft", "reader", "gateway", "front"]
TOGETHER = [["target", "draft", "reader"], ["gateway", "front"]]
APART = [["target", "reader"], ["draft"], ["gateway", "front"]]


@pytest.mark.parametrize(
    ("where", "groups"),
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
def test_who_starts_together(where: dict[str, str], groups: list[list[str]]) -> None:
    made = StackOptions(**where)  # type: ignore[arg-type]
    assert start_groups(NAMES, made.devices_of("target"), made.devices_of("draft")) == groups


def test_without_a_draft_there_is_nobody_to_wait_for() -> None:
    assert start_groups(["target", "gateway"], ["cuda:0"], ["cuda:0"]) == [["target"], ["gateway"]]


async def test_a_draft_on_the_targets_gpu_is_started_again_behind_it(
    options: StackOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends one client of MPS ends the other, too, and the draft would take memory that the target needs."""
    seen: list[tuple[str, str]] = []
    start, wait_serving = ServiceProcess.start, ServiceProcess.wait_serving

    async def started(process: ServiceProcess) -> None:
        seen.append(("starts", process.name))
        await start(process)

    async def served(process: ServiceProcess, timeout_s: float) -> None:
        await wait_serving(process, timeout_s)
        seen.append(("serves", process.name))

    monkeypatch.setattr(ServiceProcess, "start", started)
    monkeypatch.setattr(ServiceProcess, "wait_serving", served)
    async with Stack(replace(options, device="cuda:0")) as stack:
        for _ in range(2):
            assert seen.index(("serves", "target")) < seen.index(("starts", "draft"))
            seen.clear()
            starts = stack.processes["draft"].starts
            for name in ("draft", "target"):
                os.kill(stack.processes[name].pid, signal.SIGKILL)
            await stack.wait_started("draft", starts + 1)
