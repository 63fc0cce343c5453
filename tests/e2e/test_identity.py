"""The captions of the running stack against plain transformers on the same checkpoint, token by token, in fp32."""

from functools import partial
from typing import Any

import grpc
import pytest

from slipstream.speculation.protocol import FinishReason
from tests.support.gateway_client import Captioned, caption, has_draft, until
from tests.support.variants import one_in
from tests.support.world import NUM_FRAMES, PROMPT, STOP_AFTER, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_VIDEO_TOKENS = 48
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


async def check(
    gateway: grpc.aio.Channel, world: World, *, clip: int = 0, num_tokens: int = 48, **options: Any
) -> Captioned:
    """Captions the clip and compares ids, text and summary with the reference."""
    asked: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": num_tokens} | options
    captioned = await caption(gateway, world.clips[clip], **asked)
    expected = world.answer(clip, num_tokens, prompt=asked["prompt"], num_frames=asked["num_frames"])
    summary = captioned.summary
    assert captioned.token_ids == expected
    assert captioned.text == summary.text == world.reference.text(expected)
    assert summary.num_tokens == len(expected)
    assert summary.finish_reason == (LENGTH if len(expected) == num_tokens else STOP)
    assert summary.speculation.drafts_lost == 0
    return captioned


@pytest.mark.parametrize("clip", range(3))
async def test_plain_decoding(gateway: grpc.aio.Channel, world: World, clip: int) -> None:
    captioned = await check(gateway, world, clip=clip, num_tokens=96, method="autoregressive")
    assert not any(token.from_draft for token in captioned.tokens)
    assert captioned.summary.speculation.windows == 0


@pytest.mark.parametrize("clip", range(3))
@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
async def test_parallel(gateway: grpc.aio.Channel, world: World, policy: str, clip: int) -> None:
    options: dict[str, Any] = {"clip": clip, "num_tokens": 96, "policy": policy, "alpha": 0.0, "gate": False}

    def was_right_and_wrong(captioned: Captioned) -> bool:
        speculation = captioned.summary.speculation
        return speculation.restarts > 0 and 0 < speculation.accepted < speculation.judged

    captioned = await until(was_right_and_wrong, lambda: check(gateway, world, **options))
    speculation = captioned.summary.speculation
    assert speculation.windows > 0 and speculation.restarts > 0
    assert 0 < speculation.accepted < speculation.judged


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("pruner", ["uv", "random", "uniform", "none"])
@one_in(4, "pruner", "alpha")
async def test_pruning_changes_what_the_draft_sees_and_not_the_text(
    gateway: grpc.aio.Channel, world: World, pruner: str, alpha: float
) -> None:
    options: dict[str, Any] = {"num_tokens": 24, "pruner": pruner, "alpha": alpha, "seed": 3, "gate": False}
    captioned = await until(has_draft, lambda: check(gateway, world, **options))
    num_kept = NUM_VIDEO_TOKENS if pruner == "none" else round(NUM_VIDEO_TOKENS * (1 - alpha))
    assert captioned.summary.speculation.kept_tokens == num_kept
    assert captioned.summary.video.video_tokens == NUM_VIDEO_TOKENS
    assert (captioned.summary.speculation.guidance_bytes > 0) == (pruner == "uv")


@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
@pytest.mark.parametrize("max_window", [1, 2, 4, 8, 16, 64])
@one_in(2, "max_window", "policy")
async def test_windows(gateway: grpc.aio.Channel, world: World, max_window: int, policy: str) -> None:
    captioned = await check(gateway, world, clip=1, max_window=max_window, policy=policy, alpha=0.1)
    windows = [cost.window for cost in captioned.summary.speculation.pass_costs]
    assert max(windows) <= max_window
    assert max(len(commit) for commit in captioned.commits) <= max_window + 1


@pytest.mark.parametrize("positions", ["original", "compact"])
async def test_both_kinds_of_guidance_keep_the_same_tokens(
    gateway: grpc.aio.Channel, world: World, positions: str
) -> None:
    kept = {}
    for guidance in ("scores", "hidden_states"):
        asked: dict[str, Any] = {"guidance": guidance, "positions": positions, "alpha": 0.7, "num_tokens": 16}
        captioned = await until(has_draft, partial(check, gateway, world, gate=False, **asked))
        kept[guidance] = captioned.summary.speculation
    assert kept["scores"].kept_digest == kept["hidden_states"].kept_digest != ""
    assert kept["scores"].guidance_bytes == 4 * NUM_VIDEO_TOKENS < kept["hidden_states"].guidance_bytes


async def test_the_seed_chooses_the_random_tokens(gateway: grpc.aio.Channel, world: World) -> None:
    options: dict[str, Any] = {"pruner": "random", "alpha": 0.5, "num_tokens": 8, "gate": False}
    runs = [await until(has_draft, partial(check, gateway, world, seed=seed, **options)) for seed in (1, 1, 2)]
    digests = [run.summary.speculation.kept_digest for run in runs]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 8, 9, 30, 31])
async def test_no_token_beyond_the_limit_leaves(gateway: grpc.aio.Channel, world: World, num_tokens: int) -> None:
    captioned = await check(gateway, world, num_tokens=num_tokens, policy="fixed", alpha=0.0)
    assert captioned.summary.finish_reason == LENGTH


@pytest.mark.parametrize("max_window", [1, 4, 16])
@pytest.mark.parametrize("policy", ["self_clocked", "fixed"])
async def test_the_text_ends_at_its_end_token_inside_a_window(
    gateway: grpc.aio.Channel, world: World, policy: str, max_window: int
) -> None:
    captioned = await check(gateway, world, clip=2, num_tokens=96, policy=policy, max_window=max_window, pruner="none")
    assert captioned.summary.finish_reason == STOP
    assert captioned.summary.num_tokens > STOP_AFTER


@pytest.mark.parametrize("num_frames", [1, 2, 24])
async def test_numbers_of_frames(gateway: grpc.aio.Channel, world: World, num_frames: int) -> None:
    await check(gateway, world, num_frames=num_frames, num_tokens=24)


@pytest.mark.parametrize("prompt", ["?", "Décris la vidéo 🎬,\nphrase par phrase :", "word " * 150])
async def test_prompts(gateway: grpc.aio.Channel, world: World, prompt: str) -> None:
    await check(gateway, world, prompt=prompt, num_tokens=24)


async def test_a_path_and_an_upload_give_the_same_text(gateway: grpc.aio.Channel, world: World) -> None:
    path = world.folder / "clip.mp4"
    path.write_bytes(world.clips[0])
    captioned = await caption(
        gateway, path=str(path), prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=24, method="autoregressive"
    )
    assert captioned.token_ids == world.answer(0, 24)
