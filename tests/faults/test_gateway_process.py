"""The gateway's process killed in the middle of captions: a client goes on with what it has, at the same address."""

import os
import signal
from typing import Any

import grpc
import pytest

import slipstream
from slipstream import Caption, CommittedText, StageChange
from slipstream.rpc.v1 import gateway_pb2
from tests.faults.conftest import FragileStack
from tests.support.gateway_client import MOST_TRIES, options_message, refusal, send, upload_messages
from tests.support.variants import some
from tests.support.world import NUM_FRAMES, PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 160
ASKED: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False}
KINDS: dict[str, dict[str, Any]] = {
    "slipstream": {},
    "autoregressive": {"method": "autoregressive"},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
}


async def lose(fragile: FragileStack, *names: str, **options: Any) -> tuple[list[CommittedText], Caption, list[str]]:
    """The text, the caption and the stages of a caption in the middle of which these processes are killed. It may be
    all said before this process hears of the middle: then once more."""
    for _ in range(MOST_TRIES):
        texts, caption, stages = await _strike(fragile, *names, **options)
        if caption.timings.resumptions:
            break
        await fragile.all_serving()
    return texts, caption, stages


async def _strike(fragile: FragileStack, *names: str, **options: Any) -> tuple[list[CommittedText], Caption, list[str]]:
    texts: list[CommittedText] = []
    stages: list[str] = []
    killed = False
    async with slipstream.connect_async(fragile.stack.gateway_address) as captioner:
        stream = captioner.events(fragile.world.clips[0], **ASKED | options)
        async for event in stream:
            if isinstance(event, StageChange):
                stages.append(event.stage)
            if isinstance(event, CommittedText):
                texts.append(event)
            if sum(len(text.tokens) for text in texts) >= 20 and not killed:
                killed = True
                for name in names:
                    os.kill(fragile.process(name).pid, signal.SIGKILL)
    return texts, stream.caption, stages


@pytest.mark.parametrize("kind", some(KINDS, keep=("sampled",)))
async def test_killed_during_a_caption(fragile: FragileStack, kind: str) -> None:
    undisturbed = await fragile.caption(**ASKED | KINDS[kind])
    texts, caption, stages = await lose(fragile, "gateway", **KINDS[kind])
    assert [token.token_id for text in texts for token in text.tokens] == undisturbed.token_ids
    assert caption.text == undisturbed.summary.text == "".join(map(str, texts))
    assert caption.finish_reason is undisturbed.summary.finish_reason
    assert caption.num_tokens == undisturbed.summary.num_tokens == len(caption.tokens)
    assert caption.timings.resumptions == 1
    assert [stage for stage in stages if stage.startswith("resume")] == ["resume", "resumed"]


async def test_everything_killed_at_once(fragile: FragileStack) -> None:
    undisturbed = await fragile.caption(**ASKED)
    _, caption, _ = await lose(fragile, "gateway", "target", "draft")
    assert [token.token_id for token in caption.tokens] == undisturbed.token_ids
    assert caption.text == undisturbed.summary.text


# -- what a caller says that it has -----------------------------------------------------------------------------------


def asking(fragile: FragileStack, after: list[int], **options: Any) -> list[gateway_pb2.CaptionRequest]:
    first = options_message(**ASKED | {"max_new_tokens": 40} | options)
    first.resume_after.extend(after)
    return [first, *upload_messages(fragile.world.clips[0])]


@pytest.mark.parametrize("num_tokens", [1, 39, 40])
async def test_only_what_follows_is_sent(fragile: FragileStack, num_tokens: int) -> None:
    whole = await send(fragile.gateway, asking(fragile, []))
    rest = await send(fragile.gateway, asking(fragile, whole.token_ids[:num_tokens]))
    assert rest.token_ids == whole.token_ids[num_tokens:]
    assert [token.piece for token in rest.tokens] == [token.piece for token in whole.tokens[num_tokens:]]
    assert rest.summary.text == whole.summary.text and rest.summary.num_tokens == 40
    assert rest.summary.finish_reason is whole.summary.finish_reason
    (resumed,) = (stage for stage in rest.stages if stage.stage == "resumed")
    assert resumed.done == num_tokens


async def test_what_would_not_go_on_is_refused(fragile: FragileStack) -> None:
    whole = (await send(fragile.gateway, asking(fragile, []))).token_ids
    other = [*whole[:10], whole[10] + 1]
    code, complaint = await refusal(fragile.gateway, asking(fragile, other))
    assert code is grpc.StatusCode.ABORTED and "token 11 would be another one now" in complaint
    code, complaint = await refusal(fragile.gateway, asking(fragile, [*whole, 1]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "resume_after has 41 tokens" in complaint
    code, complaint = await refusal(fragile.gateway, asking(fragile, [whole[0], 2**32 - 1]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "outside the vocabulary" in complaint
    options = {"temperature": 1.0, "sampling_rule": "rejection"}
    code, complaint = await refusal(fragile.gateway, asking(fragile, [1], **options))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "cannot be resumed" in complaint
