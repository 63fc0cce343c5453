"""Sampling through the running stack: a seed has one text, whoever drafts; penalties are upstream's; stops end it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from slipstream.rpc.calls import open_channel
from slipstream.speculation.protocol import FinishReason
from slipstream.stack.local import Stack
from tests.support.clips import sample_clip
from tests.support.gateway_client import Captioned, caption, until
from tests.support.reference import Reference
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 48
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}
COUNTED: dict[str, Any] = {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.3, "seed": 7}


async def run(gateway: grpc.aio.Channel, world: World, clip: int = 0, **options: Any) -> Captioned:
    asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False} | options
    return await caption(gateway, world.clips[clip], **asked)


@pytest.mark.parametrize("sampling", [SAMPLING, COUNTED], ids=str)
async def test_a_seed_has_one_text_whatever_the_draft_does(
    gateway: grpc.aio.Channel, world: World, sampling: dict[str, Any]
) -> None:
    plain = await run(gateway, world, method="autoregressive", **sampling)
    for options in (
        {"max_window": 1, "pruner": "none"},
        {"max_window": 3, "pruner": "random", "alpha": 0.5},
        {"max_window": 9, "pruner": "uv", "policy": "fixed"},
        {"max_window": 16, "pruner": "uniform", "alpha": 1.0, "positions": "compact"},
    ):
        assert (await run(gateway, world, **sampling, **options)).token_ids == plain.token_ids
    other = await run(gateway, world, method="autoregressive", **sampling | {"seed": 8})
    assert other.token_ids != plain.token_ids


async def test_rejection_sends_proposals_and_accepts_some(gateway: grpc.aio.Channel, world: World) -> None:
    options: dict[str, Any] = {"sampling_rule": "rejection", "temperature": 1.5, "pruner": "none", "policy": "fixed"}
    captioned = await until(
        lambda one: one.summary.speculation.windows, lambda: run(gateway, world, max_new_tokens=96, **options)
    )
    speculation = captioned.summary.speculation
    assert captioned.summary.num_tokens == 96 or captioned.summary.finish_reason == FinishReason.STOP
    assert speculation.drafts_lost == 0
    assert speculation.windows > 0 < speculation.judged


@pytest.mark.parametrize("method", ["autoregressive", "slipstream"])
async def test_the_repetition_penalty_is_that_of_transformers(
    gateway: grpc.aio.Channel, world: World, method: str
) -> None:
    captioned = await run(gateway, world, method=method, repetition_penalty=1.3)
    video = sample_clip(world.clips[0], NUM_FRAMES)
    expected = world.reference.answer(video, PROMPT, NUM_TOKENS, repetition_penalty=1.3)
    assert captioned.token_ids == expected != world.answer(0, NUM_TOKENS)


class CountPenalties(LogitsProcessor):
    """As OpenAI's protocol has them, of what follows a prompt."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = presence, frequency
        self._num_prompt: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._num_prompt is None:
            self._num_prompt = input_ids.shape[1]
        counts = torch.bincount(input_ids[0, self._num_prompt :], minlength=scores.shape[1])
        return scores - self._frequency * counts - self._presence * (counts > 0)


@pytest.mark.parametrize("method", ["autoregressive", "slipstream", "slipstream_tree"])
async def test_penalties_by_counts_are_those_of_openais_protocol(
    gateway: grpc.aio.Channel, world: World, method: str
) -> None:
    captioned = await run(gateway, world, method=method, presence_penalty=0.4, frequency_penalty=0.7)
    penalties = LogitsProcessorList([CountPenalties(0.4, 0.7)])
    video = sample_clip(world.clips[0], NUM_FRAMES)
    expected = world.reference.answer(video, PROMPT, NUM_TOKENS, logits_processor=penalties)
    assert captioned.token_ids == expected != world.answer(0, NUM_TOKENS)


@pytest.mark.parametrize("method", ["autoregressive", "slipstream", "slipstream_tree"])
async def test_the_least_length_is_that_of_transformers(gateway: grpc.aio.Channel, world: World, method: str) -> None:
    """Of the clip whose answer ends by itself."""
    captioned = await run(gateway, world, clip=2, method=method, min_new_tokens=NUM_TOKENS - 2)
    video = sample_clip(world.clips[2], NUM_FRAMES)
    expected = world.reference.answer(video, PROMPT, NUM_TOKENS, min_new_tokens=NUM_TOKENS - 2)
    assert captioned.token_ids == expected
    assert len(expected) > NUM_TOKENS - 2 > len(world.answer(2, NUM_TOKENS))


async def test_a_checkpoints_own_sampling_can_be_taken(world: World, tmp_path: Path) -> None:
    target = shutil.copytree(world.pair.target, tmp_path / "target")
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.3}))
    options = replace(world.stack_options("--generation-config", "model"), target_model=target)
    async with Stack(options) as stack, open_channel(stack.gateway_address) as gateway:
        captioned = await run(gateway, world)
        plain = await run(gateway, world, repetition_penalty=1.0)
    reference = Reference(target)
    assert captioned.token_ids == reference.answer(sample_clip(world.clips[0], NUM_FRAMES), PROMPT, NUM_TOKENS)
    assert plain.token_ids == world.answer(0, NUM_TOKENS) != captioned.token_ids


@pytest.mark.parametrize("method", ["autoregressive", "slipstream"])
async def test_the_text_ends_before_a_stop_string(gateway: grpc.aio.Channel, world: World, method: str) -> None:
    whole = (await run(gateway, world, method="autoregressive")).text
    stop = whole[len(whole) // 2 :][:3]
    captioned = await run(gateway, world, method=method, stop=[stop, "never said \x00"], policy="fixed")
    summary = captioned.summary
    assert captioned.text == summary.text == whole[: whole.index(stop)]
    assert summary.finish_reason == FinishReason.STOP
    assert summary.stop_string == stop
    assert summary.num_tokens == len(captioned.token_ids)
    assert captioned.token_ids == world.answer(0, summary.num_tokens)
