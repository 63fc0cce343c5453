"""Every family through the whole stack: captions are those of plain transformers, whatever the draft was shown."""

import asyncio
import io
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import av
import grpc
import numpy as np
import pytest
import pytest_asyncio

from slipstream.errors import InvalidRequest
from slipstream.pruning import PRUNERS
from slipstream.rpc.calls import open_channel
from slipstream.session_messages import Chat
from slipstream.stack.local import Stack
from slipstream.video.messages import SampledVideo
from tests.support import tiny_checkpoint, tiny_families, tiny_glm4v, tiny_mistral3, tiny_qwen3_5
from tests.support.clips import sample_clip
from tests.support.gateway_client import Captioned, caption, until
from tests.support.media import ClipSpec, even_times_ms, make_clip
from tests.support.processes import check_logs
from tests.support.tiny_pair import WriteCheckpoint
from tests.support.variants import one_in, some
from tests.support.world import PROMPT, World, make_endless_world

pytestmark = pytest.mark.asyncio(loop_scope="session")

FAMILIES: dict[str, WriteCheckpoint] = {
    "glm4v": tiny_glm4v.write_tiny_glm4v,
    "glm4v, GLM-4.6V-Flash": partial(tiny_glm4v.write_tiny_glm4v, processor="Glm46VProcessor"),
    "glm4v_moe": partial(tiny_glm4v.write_tiny_glm4v, model_type="glm4v_moe"),
    "internvl": tiny_families.write_tiny_internvl,
    "llava_interleave": tiny_families.write_tiny_llava_interleave,
    "llava_next_video": tiny_families.write_tiny_llava_next_video,
    "mistral3": partial(tiny_mistral3.write_tiny_mistral3, text="ministral3"),
    "qwen2_5_vl": tiny_checkpoint.write_tiny_qwen,
    "qwen2_vl": tiny_checkpoint.write_tiny_qwen2,
    "qwen3_5": tiny_qwen3_5.write_tiny_qwen3_5,
    "qwen3_5_moe": partial(tiny_qwen3_5.write_tiny_qwen3_5, num_experts=4),
    "qwen3_vl": tiny_families.write_tiny_qwen3,
    "qwen3_vl_moe": partial(tiny_families.write_tiny_qwen3, num_experts=4),
    "smolvlm": tiny_families.write_tiny_smolvlm,
    "video_llama_3": tiny_families.write_tiny_video_llama_3,
}
ALIKE = {"glm4v, GLM-4.6V-Flash", "qwen2_vl"}
"""To others but for what the engine's tests show, too."""
NUM_FRAMES = 9
"""An odd number: where two frames share their tokens, the last one is alone."""
NUM_TOKENS = 24
ALPHA = 0.7
EXTRA_LAYERS = 5


@pytest.fixture(scope="module", params=some(FAMILIES, keep=FAMILIES.keys() - ALIKE))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_endless_world(
        tmp_path_factory.mktemp(request.param), FAMILIES[request.param], extra_layers=EXTRA_LAYERS
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def channel(family: World) -> AsyncIterator[grpc.aio.Channel]:
    async with Stack(family.stack_options()) as running, open_channel(running.gateway_address) as opened:
        yield opened
        check_logs(running)


async def check(channel: grpc.aio.Channel, family: World, clip: int = 0, **options: Any) -> Captioned:
    """Captions the clip and compares ids and text with the reference."""
    asked: dict[str, Any] = {"num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS} | options
    captioned = await caption(channel, family.clips[clip], prompt=PROMPT, **asked)
    expected = family.answer(clip, asked["max_new_tokens"], num_frames=asked["num_frames"])
    assert captioned.token_ids == expected
    assert captioned.text == captioned.summary.text == family.reference.text(expected)
    assert captioned.summary.speculation.drafts_lost == 0
    return captioned


async def drafted(channel: grpc.aio.Channel, family: World, clip: int, **options: Any) -> Captioned:
    """The same of a caption in which the draft was heard."""
    return await until(lambda one: one.summary.speculation.judged > 0, lambda: check(channel, family, clip, **options))


async def test_the_likeliest_are_written_as_in_a_text(channel: grpc.aio.Channel, family: World) -> None:
    """Where a tokenizer begins no text with a space, only the first of them lack it."""
    asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 4}
    first, *others = (await caption(channel, family.clips[0], logprobs=True, top_logprobs=20, **asked)).tokens
    text = family.reference.text
    assert [one.piece for one in first.top_logprobs] == [text([one.token_id]) for one in first.top_logprobs]
    for one in [one for token in others for one in token.top_logprobs]:
        assert text([one.token_id]) + one.piece == text([one.token_id] * 2)


@one_in(3, "family")
async def test_plain_decoding_of_several_videos_at_once(channel: grpc.aio.Channel, family: World) -> None:
    asked = {"method": "autoregressive", "max_new_tokens": 64}
    for captioned in await asyncio.gather(*(check(channel, family, clip, **asked) for clip in range(3))):
        assert captioned.summary.speculation.windows == 0


@pytest.mark.parametrize("pruner", PRUNERS)
@one_in(6, "family", "pruner")
async def test_a_draft_that_sees_less(channel: grpc.aio.Channel, family: World, pruner: str) -> None:
    """Both kinds of positions, of two videos at once."""
    asked: dict[str, Any] = {"pruner": pruner, "alpha": ALPHA, "gate": False}
    for captioned in await asyncio.gather(
        *(drafted(channel, family, clip, positions=kind, **asked) for clip, kind in enumerate(("original", "compact")))
    ):
        speculation, num_tokens = captioned.summary.speculation, captioned.summary.video.video_tokens
        assert speculation.judged > 0
        if pruner == "none":
            assert speculation.kept_tokens == num_tokens
        else:
            assert speculation.kept_tokens <= num_tokens * (1 - ALPHA) + num_tokens / NUM_FRAMES


async def test_a_draft_that_sees_all_is_often_right(channel: grpc.aio.Channel, family: World) -> None:
    """It would not be, were it shown other pictures, times or positions than the target."""
    captioned = await until(  # of a draft that came late a few words say little
        lambda one: one.summary.speculation.judged > 32,
        lambda: check(channel, family, 1, pruner="none", gate=False, max_new_tokens=64),
    )
    speculation = captioned.summary.speculation
    assert speculation.accepted > speculation.judged / 2


@one_in(3, "family")
async def test_a_conversation_goes_on_from_the_videos_prefill(channel: grpc.aio.Channel, family: World) -> None:
    said: dict[str, Any] = {"system": "Answer briefly.", "turns": (PROMPT, "A red square moves.")}
    expected = family.reference.answer(
        sample_clip(family.clips[0], NUM_FRAMES), Chat("And what is blue?", **said), NUM_TOKENS
    )
    assert expected != family.answer(0, NUM_TOKENS, num_frames=NUM_FRAMES)
    asked: dict[str, Any] = {"num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False}
    first = await caption(channel, family.clips[0], prompt=PROMPT, system=said["system"], **asked)
    then = await caption(channel, family.clips[0], prompt="And what is blue?", **said, **asked)
    assert then.token_ids == expected
    assert then.summary.video.reused_tokens >= first.summary.video.video_tokens


@pytest.mark.parametrize("guidance", ["scores", "hidden_states"])
@one_in(2, "family", "guidance")
async def test_guidance(channel: grpc.aio.Channel, family: World, guidance: str) -> None:
    """The draft of a short caption on a busy machine may come too late to have asked for it."""
    captioned = await until(
        lambda one: one.summary.speculation.guidance_bytes > 0,
        lambda: check(channel, family, 2, guidance=guidance, alpha=ALPHA, gate=False),
    )
    assert captioned.summary.speculation.guidance_bytes > 0


@pytest.mark.parametrize("num_frames", [1, 2, 24])
@one_in(3, "family", "num_frames")
async def test_numbers_of_frames(channel: grpc.aio.Channel, family: World, num_frames: int) -> None:
    await check(channel, family, num_frames=num_frames)


@one_in(2, "family")
async def test_a_large_video_that_is_decoded_elsewhere(channel: grpc.aio.Channel, family: World) -> None:
    """Its frames are resized once, at the gateway, to what upstream's processor makes of them."""
    clip = make_clip(ClipSpec(even_times_ms(NUM_FRAMES, 250), width=426, height=238))
    with av.open(io.BytesIO(clip)) as opened:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)])
    times_s = tuple(0.25 * index for index in range(NUM_FRAMES))
    video = SampledVideo(frames, times_s, 0.25 * NUM_FRAMES, 426, 238, "h264", rotation=0, warnings=())
    captioned = await caption(channel, clip, prompt=PROMPT, num_frames=NUM_FRAMES, max_new_tokens=NUM_TOKENS)
    assert captioned.token_ids == family.reference.answer(video, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("method", ["parallelvlm", "specvlm", "sd_tree", "onsd", "std"])
@pytest.mark.long
async def test_other_methods(channel: grpc.aio.Channel, family: World, method: str) -> None:
    if method == "std" and "qwen3_5" in family.folder.name:
        with pytest.raises(InvalidRequest, match="have linear attention, which pays none to single tokens"):
            await check(channel, family, 1, method=method)
        return
    captioned = await drafted(channel, family, 1, method=method)
    assert captioned.summary.speculation.judged > 0
