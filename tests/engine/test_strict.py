"""Strict steps: one shape for every pass, whatever the window, and the same answer as without."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.attention import MatmulKernel
from slipstream.engine.kernels import get_kernel
from slipstream.errors import ModelNotUsable
from tests.engine.conftest import Pair, random_frames
from tests.support.tiny_families import write_tiny_qwen3
from tests.support.tiny_glm4v import write_tiny_glm4v

WIDTH = 5


@pytest.fixture(params=["matmul", "sdpa"])
def strict(request: pytest.FixtureRequest, pair: Pair) -> VideoLM:
    return load_model(str(pair.path), attention=request.param, strict_width=WIDTH)


def prefill(model: VideoLM) -> tuple[DecodeState, torch.Tensor]:
    frames = random_frames(6, 0)
    return model.start_prefill(model.plan_prompt("?", len(frames)), model.encode_frames(frames)).finish()


def windows(token_ids: list[int], length: int) -> Iterator[list[int]]:
    for first in range(0, len(token_ids), length):
        yield token_ids[first : first + length]


@pytest.mark.parametrize("length", [1, 2, WIDTH])
def test_logits_are_those_of_a_plain_step(pair: Pair, strict: VideoLM, length: int) -> None:
    token_ids = [5 + 7 * index % 200 for index in range(80)]
    (state, _), (plain, _) = prefill(strict), prefill(pair.ours)
    for window in windows(token_ids, length):
        (logits,) = strict.step([(state, window)])
        (expected,) = pair.ours.step([(plain, window)])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert state.num_tokens == plain.num_tokens


MIXTURES = {
    "glm4v_moe": partial(write_tiny_glm4v, model_type="glm4v_moe", hidden=384),
    "qwen3_vl_moe": partial(write_tiny_qwen3, num_experts=8, hidden=384),
}
"""Wide enough that a product rounds by its rows."""


@pytest.mark.parametrize("family", MIXTURES)
def test_bits_of_mixtures_of_experts_do_not_depend_on_the_window(tmp_path: Path, family: str) -> None:
    model = load_model(str(MIXTURES[family](tmp_path / "model", seed=1)), strict_width=WIDTH)
    frames, token_ids = random_frames(4, 0), [5 + 7 * index % 200 for index in range(20)]
    plan, found = model.plan_prompt("?", 4, frame_size=frames.shape[1:3]), []
    for length in (1, 2, WIDTH):
        state, _ = model.start_prefill(plan, model.encode_frames(frames)).finish()
        found.append(torch.cat([model.step([(state, window)])[0] for window in windows(token_ids, length)]))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_rejected_rows_leave_no_trace(strict: VideoLM) -> None:
    (state, _), (undisturbed, _) = prefill(strict), prefill(strict)
    strict.step([(state, [9, 8, 7, 6])])
    state.rollback(undisturbed.num_tokens)
    torch.testing.assert_close(strict.step([(state, [3, 4])]), strict.step([(undisturbed, [3, 4])]))


def test_every_step_has_the_same_shape(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = load_model(str(pair.path), attention="matmul", strict_width=WIDTH)
    state, _ = prefill(strict)
    shapes: set[tuple[int, int]] = set()
    attend = MatmulKernel.attend

    def spy(self: MatmulKernel, query: torch.Tensor, keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        shapes.add((query.shape[1], keys.shape[1]))
        return attend(self, query, keys, *rest)

    monkeypatch.setattr(MatmulKernel, "attend", spy)
    other, _ = prefill(strict)
    for length in (1, 3, 2, WIDTH, 4):
        strict.step([(state, [3] * length), (other, [4])])
    assert {rows for rows, _ in shapes} == {WIDTH}
    assert all(columns % 64 == 0 for _, columns in shapes)


def test_an_answer_stays_within_the_memory_counted_for_it(strict: VideoLM) -> None:
    frames, num_new = random_frames(6, 0), 40
    plan = strict.plan_prompt("?", len(frames))
    num_new += -(plan.num_tokens + num_new) % 64  # fills its granules
    prefill = strict.start_prefill(plan, strict.encode_frames(frames), headroom=num_new)
    state, _ = prefill.finish()
    for _ in range(num_new):
        strict.step([(state, [3])])
    assert state.kv_bytes == strict.kv_bytes(plan.num_tokens + num_new)


def test_flash_attention_has_no_masked_ends() -> None:
    with pytest.raises(ModelNotUsable, match="no strict width; use 'auto'"):
        get_kernel("flash", torch.device("cpu"), torch.bfloat16, masked_ends=True)
