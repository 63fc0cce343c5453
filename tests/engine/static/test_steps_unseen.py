"""A static step looks at nothing that it computes, so that a GPU can record it, and asks little of it beside that.

The meta device stands in for a GPU: its tensors have shapes and types alone, so whoever reads one fails, and so does
who mixes them with tensors that stayed on the CPU.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu.random_model import GEOMETRIES, RandomModel, tiny
from slipstream.engine.attention import SdpaKernel
from slipstream.engine.fused_layers import FusedLayers
from slipstream.engine.static.glue import torch_glue
from slipstream.engine.static.pool import Extent, KVPool
from slipstream.engine.static.step import MAX_AHEAD, Entry, Recorder, StaticStep, StepParts
from slipstream.engine.static.windows import (
    JoinedWindows,
    MakeWindows,
    StepShape,
    WholeWindows,
    past_by_copy,
    past_by_varlen,
    torchs_varlen,
)

META = torch.device("meta")
CAPACITY, AXES, PAST = 4096, 3, 100
WAYS: Mapping[str, MakeWindows] = {
    "whole": WholeWindows,
    "copy": lambda pool, places: JoinedWindows(pool, places, past_by_copy),
    "varlen": lambda pool, places: JoinedWindows(pool, places, partial(past_by_varlen, torchs_varlen)),
}
VIEWS = ("view", "slice", "select", "unflatten", "unbind", "split", "detach", "alias")


class Replays(Recorder):
    """Records by counting what is asked of it again."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.count = 0

    def record(self, compute: Callable[[], None], *_: Any) -> Callable[[], Any]:
        compute()
        return self._replay

    def _replay(self) -> None:
        self.count += 1


class Parts:
    """Of a model of 16 bits, with two sessions in its pool."""

    def __init__(self) -> None:
        model = RandomModel.make(tiny(GEOMETRIES["Qwen2.5-VL-7B"]), META, torch.bfloat16)
        self.runner = model.runner(SdpaKernel())
        like, head_dim = self.runner.decoder.layers[0].self_attn.k_proj.weight, 8  # type: ignore[union-attr]
        self.pool = KVPool(self.runner.num_layers, 3 * CAPACITY, 2, head_dim, like)  # type: ignore[arg-type]
        taken = [self.pool.take(size, self) for size in (500, 900)]
        self.extents: list[Extent] = [extent for extent in taken if extent is not None]
        self.replays = Replays()

    def step(self, way: str, layers: str, sessions: int, rows: int) -> StaticStep:
        runner = self.runner
        run_layers = runner.run_through if layers == "upstream" else FusedLayers(runner.decoder, torch_glue)
        logits = torch.empty(128, runner.lm_head.weight.shape[0], device=META)  # type: ignore[union-attr, index]
        around = runner.decoder.embed_tokens, run_layers, runner.lm_head
        parts = StepParts(*around, self.pool, WAYS[way], AXES, logits, self.replays)
        step = StaticStep(parts, StepShape(sessions, rows, CAPACITY))
        step.record()
        return step

    def entries(self, sessions: int, rows: int) -> list[Entry]:
        return [Entry(each, PAST, [1] * rows, range(PAST, PAST + rows)) for each in self.extents[:sessions]]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Parts()


class Calls(TorchDispatchMode):
    """What torch is asked to do, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if not name.startswith(VIEWS):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", ["upstream", "fused"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sessions", "rows"), [(1, 1), (1, 16), (2, 4)])
def test_what_is_recorded_reads_nothing(parts: Parts, way: str, layers: str, sessions: int, rows: int) -> None:
    step = parts.step(way, layers, sessions, rows)
    found = step.run(parts.entries(sessions, rows))
    assert [(each.logits.device, each.logits.dtype, len(each.logits)) for each in found] == [
        (META, torch.float32, rows)
    ] * sessions


@pytest.mark.parametrize("sessions", [1, 2])
def test_beside_the_replay_there_are_copies_alone(parts: Parts, sessions: int) -> None:
    """One to the device with all that differs, and of each session's logits and choices: no kernel is launched."""
    step, before = parts.step("varlen", "fused", sessions, 8), parts.replays.count
    with Calls() as calls:
        step.run(parts.entries(sessions, 8))
    assert parts.replays.count == before + 1
    assert sorted(calls.names) == sorted(["copy_", *["clone"] * 2 * sessions])


def test_tokens_ahead_are_read_once(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before = parts.step("varlen", "fused", 1, 1), parts.replays.count
    read: list[tuple[int, ...]] = []

    def tolist(tensor: Tensor) -> list[list[int]]:
        read.append(tuple(tensor.shape))
        return [[7] * tensor.shape[1]] * tensor.shape[0]

    monkeypatch.setattr(Tensor, "tolist", tolist)
    with Calls() as calls:
        written = step.write_ahead(parts.entries(1, 1), MAX_AHEAD, None)
    assert written == [[7] * MAX_AHEAD] and read == [(1, MAX_AHEAD)]
    assert parts.replays.count == before + MAX_AHEAD and calls.names == ["copy_"]
