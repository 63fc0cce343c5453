"""Recorded steps of every family, of a fixed number of rows, and those for which there was no room."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.startup import try_static_steps
from slipstream.engine.static import step, steps, trials
from slipstream.sampling.sampler import largest_of
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import random_frames
from tests.engine.test_families import FAMILIES
from tests.pretended_gpu import queue
from tests.support.tiny_checkpoint import write_tiny_llava
from tests.support.variants import some

FRAMES = random_frames(4, 2)
POOL_BYTES = 2**22
TOKENS = [7, 91, 18, 203, 44, 9, 120, 63, 5, 77, 250, 31, 8, 190, 66]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llava(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "CAPACITIES", (1024,))
    monkeypatch.setattr(steps, "NUM_SESSIONS", (1,))
    monkeypatch.setattr(steps, "NUM_ROWS", (1, 4, 16))
    monkeypatch.setattr(trials, "MOST_TOKENS", {"cuda": 1024})


def loaded(folder: str, **given: Any) -> list[VideoLM]:
    """On the device, and on the CPU."""
    return [load_model(folder, device=device, dtype="float32", **given) for device in ("cuda:0", "cpu")]


def begun(model: VideoLM) -> DecodeState:
    plan = model.plan_prompt("?", len(FRAMES), frame_size=FRAMES.shape[1:3])
    return model.start_prefill(plan, model.encode_frames(FRAMES)).finish()[0]


def logits_by(model: VideoLM, sizes: Sequence[int]) -> Tensor:
    """Of all tokens, in windows of so many, each of them one replay."""
    state, found, rest = begun(model), [], list(TOKENS)
    for size in sizes:
        queue.CALLS.clear()
        found.append(model.step([(state, rest[:size])])[0])
        assert queue.CALLS["replay"] == 1
        del rest[:size]
    assert not rest
    state.close()
    return torch.cat(found).cpu()


@pytest.mark.parametrize("strict", [True, False])
def test_a_row_has_the_same_bits_in_every_window(folder: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "choose_width", lambda times: 16)
    there, here = loaded(folder, strict_width=16 if strict else 0)
    try_static_steps(there, POOL_BYTES, fix_widths=not strict)
    assert there.static is not None and (strict or there.static.fixed_widths == {1024: 16})
    together = logits_by(there, [15])
    for sizes in ([1] * 15, [4, 1, 10], [7, 8]):
        assert torch.equal(logits_by(there, sizes), together)
    torch.testing.assert_close(together, here.step([(begun(here), TOKENS)])[0], rtol=1e-4, atol=1e-4)


def test_trees_take_other_widths(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "choose_width", lambda times: 16)
    there, here = loaded(folder)
    try_static_steps(there, POOL_BYTES, fix_widths=True)
    window = TokenTree((5, 6, 7), (-1, 0, 0))
    found, right = (model.step([(begun(model), window)])[0].cpu() for model in (there, here))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


RECORDED = [family for family in FAMILIES if not family.startswith("qwen3_5")]
"""Linear attention is not."""


@pytest.mark.parametrize("family", some(RECORDED, keep=("internvl 3", "qwen3_vl_moe")))
def test_every_familys_steps(family: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path, seed=3)  # type: ignore[operator]
    there, here = loaded(str(tmp_path))
    try_static_steps(there, POOL_BYTES)
    assert there.static is not None
    state, other = begun(there), begun(here)
    for window in (TOKENS[:1], TOKENS[1:5], TokenTree((5, 6, 7), (-1, 0, 0))):
        queue.CALLS.clear()
        found = there.step([(state, window)])[0].cpu()
        assert (queue.CALLS["replay"], queue.waits()) == (1, 2), "one wait for the step, one to look at it"
        torch.testing.assert_close(found, here.step([(other, window)])[0], rtol=1e-3, atol=1e-3)
    state.close()


def test_what_has_no_room_is_recorded_later(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_room = False

    def choose(logits: Tensor) -> Tensor:
        if queue.recording() is not None and len(logits) == 4 and not has_room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return largest_of(logits)

    monkeypatch.setattr(step, "largest_of", choose)
    monkeypatch.setattr(steps, "FIRST_PATIENCE", 1)
    there, here = loaded(folder)
    try_static_steps(there, POOL_BYTES)
    assert there.static is not None and [shape.num_rows for shape in there.static.missing] == [4]
    state, other = begun(there), begun(here)
    for tokens in (TOKENS[:4], TOKENS[4:8], TOKENS[8:12]):
        found, right = (model.step([(at, tokens)])[0].cpu() for model, at in ((there, state), (here, other)))
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
        has_room = True
    assert not there.static.missing
    state.close()
