"""The running target service, spoken to directly: verdicts at the edges of a text, and every way to misuse it."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.engine.target_engine import MAX_PULLS
from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from slipstream.stack.local import Stack
from tests.services.model_sessions import (
    CAPABILITY,
    LONG_PROMPT,
    LONG_PROMPT_ROOM,
    Session,
    judge,
    open_session,
    some_frames,
    target_end,
    target_start,
)
from tests.support.clips import sample_frames
from tests.support.world import NUM_FRAMES, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

INVALID, OUT_OF_RANGE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE
STOP, LENGTH = target_pb2.FINISH_REASON_STOP, target_pb2.FINISH_REASON_LENGTH
MAX_CONTEXT = 4096
MAX_SESSIONS = 16


@pytest_asyncio.fixture(loop_scope="session")
async def target(stack: Stack) -> AsyncIterator[target_pb2_grpc.TargetStub]:
    """Its stub; afterwards the service must still be the same process, and serve."""
    process = stack.processes["target"]
    async with open_channel(process.address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        yield stub
        session = await started(stub, "afterwards", max_new_tokens=1)
        assert (await session.read_until("verdict")).finish_reason == LENGTH
        assert await session.read() is None
    assert process.exit_status is None and process.starts == 1


async def started(target: target_pb2_grpc.TargetStub, session_id: str = "s", **options: Any) -> Session:
    session = open_session(target, session_id)
    await session.send(*target_start(session_id, **options))
    return session


def pull_of(session_id: str, capability: bytes = CAPABILITY) -> target_pb2.PullGuidanceRequest:
    kind = target_pb2.GUIDANCE_KIND_SCORES
    return target_pb2.PullGuidanceRequest(session_id=session_id, kind=kind, capability=capability)


def committed(verdict: target_pb2.Verdict, window: list[int]) -> list[int]:
    own = [verdict.own_token] if verdict.HasField("own_token") else []
    return window[: verdict.num_accepted] + own


# -- verdicts ---------------------------------------------------------------------------------------------------------


async def test_windows_are_cut_at_the_limit_of_the_text(target: target_pb2_grpc.TargetStub, world: World) -> None:
    answer, frames = world.answer(0), sample_frames(world.clips[0], NUM_FRAMES)
    for limit in (9, 10, 11, 16, 17):
        session = await started(target, frames=frames, max_new_tokens=limit)
        text = committed(await session.read_until("verdict"), [])
        await session.send(judge(answer[1:9]))
        verdict = await session.read_until("verdict")
        text += committed(verdict, answer[1:9])
        if limit > 10:
            await session.send(judge(answer[10:40]))
            verdict = await session.read_until("verdict")
            text += committed(verdict, answer[10:40])
        assert text == answer[:limit]
        assert verdict.finish_reason == LENGTH
        assert len(verdict.pieces) == len(text) - (10 if limit > 10 else 1)
        assert await session.read() is None


async def test_the_end_token_inside_a_window_ends_the_text(target: target_pb2_grpc.TargetStub, world: World) -> None:
    answer, frames = world.answer(2), sample_frames(world.clips[2], NUM_FRAMES)
    assert len(answer) < 96
    for num_before in (3, 1, 0):
        start = len(answer) - 1 - num_before
        session = await started(target, frames=frames, max_new_tokens=96)
        text = committed(await session.read_until("verdict"), [])
        await session.send(judge(answer[1 : start - 1]))
        text += committed(await session.read_until("verdict"), answer[1 : start - 1])
        assert text == answer[:start]
        window = [*answer[start:], 7, 7, 7]
        await session.send(judge(window))
        verdict = await session.read_until("verdict")
        assert text + committed(verdict, window) == answer
        assert verdict.finish_reason == STOP and not verdict.HasField("own_token")
        assert await session.read() is None


async def test_a_rejected_window_leaves_no_trace(target: target_pb2_grpc.TargetStub, world: World) -> None:
    answer, frames = world.answer(1), sample_frames(world.clips[1], NUM_FRAMES)
    session = await started(target, frames=frames, max_new_tokens=96)
    text = committed(await session.read_until("verdict"), [])
    while len(text) < 40:
        wrong = (answer[len(text)] + 1) % 300
        await session.send(judge([wrong, 5, 6]))
        verdict = await session.read_until("verdict")
        assert verdict.num_accepted == 0
        text += committed(verdict, [])
    assert text == answer[:40]
    await session.send(target_end())
    assert await session.read() is None


async def test_several_passes_answer_one_by_one(target: target_pb2_grpc.TargetStub, world: World) -> None:
    answer, frames = world.answer(0), sample_frames(world.clips[0], NUM_FRAMES)
    session = await started(target, frames=frames, max_new_tokens=20)
    text = committed(await session.read_until("verdict"), [])
    await session.send(judge(answer[1:4], num_passes=1_000_000))
    text += committed(await session.read_until("verdict"), answer[1:4])
    while (event := await session.read()) is not None:
        text += committed(event.verdict, [])
    assert text == answer[:20]


async def test_a_text_may_fill_the_context_to_the_last_token(target: target_pb2_grpc.TargetStub) -> None:
    session = await started(target, prompt=LONG_PROMPT, max_new_tokens=LONG_PROMPT_ROOM)
    prefilled = await session.read_until("prefilled")
    assert prefilled.prompt_tokens + LONG_PROMPT_ROOM == MAX_CONTEXT
    num_tokens = len(committed(await session.read_until("verdict"), []))
    while num_tokens < LONG_PROMPT_ROOM:
        await session.send(judge([5] * 64))
        num_tokens += len(committed(await session.read_until("verdict"), [5] * 64))
    assert num_tokens == LONG_PROMPT_ROOM
    assert await session.read() is None


async def test_a_caption_too_many_waits_and_is_told_so(target: target_pb2_grpc.TargetStub) -> None:
    served = [await started(target, f"served {number}") for number in range(MAX_SESSIONS)]
    for session in served:
        await session.read_until("verdict")
    late = await started(target, "late")
    progress = await late.read_until("progress")
    assert (progress.stage, progress.done, progress.total) == (target_pb2.STAGE_QUEUED, 0, 0)
    await served[0].send(target_end())
    await late.read_until("verdict")
    for session in (*served[1:], late):
        await session.send(target_end())
        assert await session.read() is None


async def test_a_second_prompt_about_the_same_video(target: target_pb2_grpc.TargetStub) -> None:
    frames = some_frames(6, seed=77)
    texts = []
    for prompt, is_known in (("Describe it.", False), ("What moves?", True), ("Describe it.", True)):
        session = await started(target, prompt, frames=frames, prompt=prompt)
        prefilled = await session.read_until("prefilled")
        assert (prefilled.reused_tokens > prefilled.video_tokens) == is_known
        await session.send(judge(num_passes=100))
        text = []
        while (event := await session.read()) is not None:
            text += committed(event.verdict, [])
        texts.append(text)
    assert texts[0] == texts[2] != texts[1]


# -- misuse -----------------------------------------------------------------------------------------------------------


async def test_a_session_begins_with_start(target: target_pb2_grpc.TargetStub) -> None:
    for message in (judge(), target_end(), target_pb2.TargetRequest(), target_start()[1]):
        session = open_session(target)
        await session.send(message)
        assert await session.refusal() == (INVALID, "a session begins with `start`")


async def test_nothing_at_all(target: target_pb2_grpc.TargetStub) -> None:
    session = open_session(target)
    await session.call.done_writing()
    assert await session.refusal() == (INVALID, "a session begins with `start`")


@pytest.mark.parametrize(
    ("options", "complaint"), [({"session_id": ""}, "needs an id"), ({"max_new_tokens": 0}, "at least one token")]
)
async def test_starts_without_sense(
    target: target_pb2_grpc.TargetStub, options: dict[str, Any], complaint: str
) -> None:
    session = open_session(target)
    await session.send(target_start(**options)[0])
    code, message = await session.refusal()
    assert code == INVALID and complaint in message


@pytest.mark.parametrize(
    ("options", "status", "complaint"),
    [
        ({"max_new_tokens": 2**31}, OUT_OF_RANGE, "context of 4096"),
        ({"prompt": " \n"}, INVALID, "prompt is empty"),
        ({"prompt": "word " * 5000}, OUT_OF_RANGE, "context"),
    ],
)
async def test_starts_that_do_not_fit(
    target: target_pb2_grpc.TargetStub, options: dict[str, Any], status: grpc.StatusCode, complaint: str
) -> None:
    session = open_session(target)
    await session.send(target_start(**options)[0])  # the refusal comes before frames are read
    code, message = await session.refusal()
    assert code == status and complaint in message


@pytest.mark.parametrize(
    ("num_frames", "width", "height", "complaint"),
    [
        (0, 32, 24, "1 to"),
        (100_000, 32, 24, "1 to"),
        (2, 0, 24, "0 x 24"),
        (2, 32, 2**32 - 1, "pixels are not accepted"),
    ],
)
async def test_impossible_frames(
    target: target_pb2_grpc.TargetStub, num_frames: int, width: int, height: int, complaint: str
) -> None:
    first = target_start()[0]
    first.start.frames.CopyFrom(common_pb2.FramesHeader(num_frames=num_frames, width=width, height=height))
    session = open_session(target)
    await session.send(first)
    code, message = await session.refusal()
    assert code == INVALID and complaint in message


async def test_more_pixels_than_fit_in_memory(target: target_pb2_grpc.TargetStub) -> None:
    first = target_start()[0]
    first.start.frames.CopyFrom(common_pb2.FramesHeader(num_frames=900, width=8192, height=8192))
    session = open_session(target)
    await session.send(first)
    code, message = await session.refusal()
    assert code == OUT_OF_RANGE and "900 frames of 8192 x 8192" in message


async def test_more_pixels_than_announced(target: target_pb2_grpc.TargetStub) -> None:
    first, chunk = target_start()
    first.start.frames.height -= 1
    session = open_session(target)
    await session.send(first, chunk)
    assert await session.refusal() == (INVALID, "the frames do not match their header")


@pytest.mark.parametrize("message", [judge(), target_start("other")[0], target_pb2.TargetRequest()])
async def test_frames_come_before_anything_else(
    target: target_pb2_grpc.TargetStub, message: target_pb2.TargetRequest
) -> None:
    session = open_session(target)
    await session.send(target_start()[0], message)
    assert await session.refusal() == (INVALID, "the frames do not match their header")


async def test_too_few_frames(target: target_pb2_grpc.TargetStub) -> None:
    session = open_session(target)
    await session.send(target_start()[0])
    await session.call.done_writing()
    assert await session.refusal() == (INVALID, "the stream ended before the last frame")


@pytest.mark.parametrize(
    "message", [judge(num_passes=0), judge(num_passes=1_000_001), target_start("second")[0], target_start()[1]]
)
async def test_after_the_prefill_come_windows_only(
    target: target_pb2_grpc.TargetStub, message: target_pb2.TargetRequest
) -> None:
    session = await started(target)
    await session.read_until("verdict")
    await session.send(message)
    code, complaint = await session.refusal()
    assert code == INVALID and ("takes `judge` or `end`" in complaint or "1 to 1000000 passes" in complaint)


async def test_token_ids_outside_the_vocabulary(target: target_pb2_grpc.TargetStub) -> None:
    for token in (320, 70_000, 2**32 - 1):
        session = await started(target)
        await session.read_until("verdict")
        await session.send(judge([5, token]))
        code, complaint = await session.refusal()
        assert code == INVALID and "outside the vocabulary" in complaint


async def test_an_id_in_use(target: target_pb2_grpc.TargetStub) -> None:
    first = await started(target, "twin")
    await first.read_until("prefilled")
    second = open_session(target, "twin")
    await second.send(target_start("twin")[0])  # frames would meet the refusal on their way
    code, complaint = await second.refusal()
    assert code == grpc.StatusCode.ALREADY_EXISTS and "'twin' is open already" in complaint
    await first.send(judge())
    assert len((await first.read_until("verdict")).pieces) == 1
    await first.send(target_end())


async def test_guidance_of_no_kind(target: target_pb2_grpc.TargetStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="hidden_states or scores") as refused:
        [chunk async for chunk in target.PullGuidance(target_pb2.PullGuidanceRequest(session_id="s"))]
    assert refused.value.code() == INVALID


@pytest.mark.parametrize("capability", [b"", b"s", CAPABILITY[:-1], CAPABILITY + b".", b"x" * 16, b"guided"])
async def test_guidance_is_not_given_to_others(target: target_pb2_grpc.TargetStub, capability: bytes) -> None:
    """Whoever knows a session's name, as from a log, gets the answer of a session that is not there."""
    session = await started(target, "guided")
    await session.read_until("verdict")
    with pytest.raises(grpc.aio.AioRpcError, match="no session 'guided' is open here") as refused:
        [chunk async for chunk in target.PullGuidance(pull_of("guided", capability))]
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert [chunk async for chunk in target.PullGuidance(pull_of("guided"))]
    await session.send(target_end())


@pytest.mark.parametrize("capability", [b"", b"too short"])
async def test_a_gateway_without_capabilities(target: target_pb2_grpc.TargetStub, capability: bytes) -> None:
    start = target_start("old")[0]
    start.start.guidance_capability = capability
    session = open_session(target, "old")
    await session.send(start)
    code, complaint = await session.refusal()
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "upgrade the gateway" in complaint


async def test_guidance_that_was_not_ordered(target: target_pb2_grpc.TargetStub) -> None:
    session = await started(target, "plain", with_guidance=False)
    await session.read_until("verdict")
    pull = pull_of("plain")
    with pytest.raises(grpc.aio.AioRpcError, match="without guidance") as refused:
        [chunk async for chunk in target.PullGuidance(pull, timeout=30)]
    assert refused.value.code() == INVALID
    await session.send(target_end())


async def test_guidance_is_given_as_often_as_asked_for(target: target_pb2_grpc.TargetStub) -> None:
    session = await started(target, "guided")
    pull = pull_of("guided")
    first = [chunk async for chunk in target.PullGuidance(pull)]
    await session.read_until("verdict")
    assert [chunk async for chunk in target.PullGuidance(pull)] == first
    assert first[0].header.video_tokens == 4 * len(some_frames())
    await session.send(target_end())


async def test_guidance_is_not_pulled_without_end(target: target_pb2_grpc.TargetStub) -> None:
    """By a draft that would keep the target from its work."""
    session = await started(target, "guided")
    for _ in range(MAX_PULLS):
        assert [chunk async for chunk in target.PullGuidance(pull_of("guided"))]
    with pytest.raises(grpc.aio.AioRpcError, match="enough for any draft") as refused:
        [chunk async for chunk in target.PullGuidance(pull_of("guided"))]
    assert refused.value.code() == OUT_OF_RANGE
    await session.read_until("verdict")
    await session.send(target_end())
