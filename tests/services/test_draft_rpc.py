"""The running draft service, spoken to directly: lines, restarts and limits, and every way to misuse it."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import draft_pb2, draft_pb2_grpc, target_pb2_grpc
from slipstream.speculation.protocol import JoinPoint
from slipstream.stack.local import Stack
from tests.services.model_sessions import (
    LONG_PROMPT,
    LONG_PROMPT_ROOM,
    Session,
    advance,
    draft_end,
    draft_start,
    open_session,
    restart,
    target_end,
    target_start,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

INVALID, OUT_OF_RANGE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE
NUM_VIDEO_TOKENS = 8


@pytest_asyncio.fixture(loop_scope="session")
async def draft(stack: Stack) -> AsyncIterator[draft_pb2_grpc.DraftStub]:
    """Its stub; afterwards the service must still be the same process, and serve."""
    process = stack.processes["draft"]
    async with open_channel(process.address) as channel:
        stub = draft_pb2_grpc.DraftStub(channel)
        yield stub
        session = await started(stub, "afterwards")
        assert len((await line(session, 8))[0]) == 8
        await session.send(draft_end())
        assert await session.read() is None
    assert process.exit_status is None and process.starts == 1


async def started(draft: draft_pb2_grpc.DraftStub, session_id: str = "s", **options: Any) -> Session:
    session = open_session(draft, session_id)
    await session.send(*draft_start(session_id, **options))
    return session


async def line(session: Session, num_tokens: int, epoch: int = 1) -> tuple[list[int], list[draft_pb2.DraftTokens]]:
    """The next tokens of the line `epoch`, and their messages; those of earlier lines are skipped."""
    token_ids: list[int] = []
    messages: list[draft_pb2.DraftTokens] = []
    while len(token_ids) < num_tokens:
        tokens = await session.read_until("tokens")
        if tokens.epoch == epoch:
            token_ids += tokens.token_ids
            messages.append(tokens)
    return token_ids, messages


# -- lines ------------------------------------------------------------------------------------------------------------


async def test_a_line_stops_at_its_limit_and_goes_on_when_told(draft: draft_pb2_grpc.DraftStub) -> None:
    session = await started(draft, join=JoinPoint(1, (), 20, 5))
    ready = await session.read_until("ready")
    assert (ready.kept_tokens, ready.video_tokens, ready.guidance_bytes) == (4, NUM_VIDEO_TOKENS, 0)
    together, messages = await line(session, 20)
    assert messages[0].position == 0
    assert all(message.pass_s > 0 for message in messages)
    await session.send(advance(1, 23))
    more, messages = await line(session, 3)
    assert len(more) == 3 and messages[0].position == 20
    await session.send(draft_end())
    assert await session.read() is None

    again = await started(draft, join=JoinPoint(1, (), 23, 1))
    assert (await line(again, 23))[0] == together + more
    await again.send(draft_end())


async def test_a_restart_equals_a_draft_that_joins_there(draft: draft_pb2_grpc.DraftStub) -> None:
    session = await started(draft, join=JoinPoint(1, (), 12, 1))
    first, _ = await line(session, 12)
    await session.send(restart(2, 5, [7, 9], 17))
    second, messages = await line(session, 10, epoch=2)
    assert messages[0].position == 7 and len(second) == 10
    await session.send(restart(3, 6, [11], 11), restart(4, 7, [13], 14))
    last, messages = await line(session, 6, epoch=4)
    assert messages[0].position == 8 and len(last) == 6
    await session.send(draft_end())

    prefixes = {2: (*first[:5], 7, 9), 4: (*first[:5], 7, 11, 13)}
    for epoch, expected in ((2, second), (4, last)):
        prefix = prefixes[epoch]
        other = await started(draft, join=JoinPoint(epoch, prefix, len(prefix) + len(expected), 1))
        assert (await line(other, len(expected), epoch))[0] == expected
        await other.send(draft_end())


async def test_an_advance_of_a_dead_line_is_ignored(draft: draft_pb2_grpc.DraftStub) -> None:
    session = await started(draft, join=JoinPoint(1, (), 4, 1))
    await line(session, 4)
    await session.send(restart(2, 4, [7], 8), advance(1, 30), advance(7, 30))
    token_ids, _ = await line(session, 3, epoch=2)
    assert len(token_ids) == 3
    await session.send(advance(2, 9))
    assert len((await line(session, 1, epoch=2))[0]) == 1
    await session.send(draft_end())


async def test_a_line_ends_quietly_at_the_end_of_the_context(draft: draft_pb2_grpc.DraftStub) -> None:
    session = await started(draft, prompt=LONG_PROMPT, join=JoinPoint(1, (), 2**32 - 1, 1))
    token_ids, _ = await line(session, LONG_PROMPT_ROOM + 1)  # the last token need not be read
    assert len(token_ids) == LONG_PROMPT_ROOM + 1
    await session.send(restart(2, 0, [7] * 10, 12))
    event = await session.read_until("tokens")
    assert (event.epoch, event.position) == (2, 10)
    await session.send(draft_end())


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("pruner", ["uv", "random", "uniform", "none"])
async def test_guidance_is_pulled_by_those_who_need_it(
    draft: draft_pb2_grpc.DraftStub, stack: Stack, pruner: str, alpha: float
) -> None:
    address = stack.processes["target"].address
    async with open_channel(address) as channel:
        session = open_session(target_pb2_grpc.TargetStub(channel), "guided")
        await session.send(*target_start("guided"))
        drafting = await started(draft, "guided", pruner=pruner, alpha=alpha, guidance_address=address, seed=2**64 - 1)
        ready = await drafting.read_until("ready")
        assert ready.kept_tokens == (NUM_VIDEO_TOKENS if alpha == 0 or pruner == "none" else 0)
        assert ready.guidance_bytes == (4 * NUM_VIDEO_TOKENS if pruner == "uv" else 0)
        await drafting.send(draft_end())
        await session.read_until("verdict")
        await session.send(target_end())


# -- misuse -----------------------------------------------------------------------------------------------------------


async def test_a_session_begins_with_start(draft: draft_pb2_grpc.DraftStub) -> None:
    for message in (restart(1, 0, [1], 2), advance(1, 2), draft_end(), draft_pb2.DraftRequest(), draft_start()[1]):
        session = open_session(draft)
        await session.send(message)
        assert await session.refusal() == (INVALID, "a session begins with `start`")


@pytest.mark.parametrize(
    ("options", "status", "complaint"),
    [
        ({"pruner": "best"}, INVALID, "unknown pruner 'best'; known: "),
        ({"alpha": 1.5}, INVALID, "between 0 and 1"),
        ({"alpha": float("nan")}, INVALID, "between 0 and 1"),
        ({"positions": "upside down"}, INVALID, "unknown positions 'upside down'"),
        ({"prompt": ""}, INVALID, "prompt is empty"),
        ({"prompt": "word " * 5000}, OUT_OF_RANGE, "context"),
        ({"join": JoinPoint(1, (3, 320), 9, 1)}, INVALID, "outside the vocabulary"),
        ({"pruner": "uv"}, grpc.StatusCode.UNAVAILABLE, "no guidance from the target"),
        ({"pruner": "uv", "guidance_address": ""}, INVALID, "pulls no guidance from that address"),
    ],
)
async def test_starts_that_cannot_work(
    draft: draft_pb2_grpc.DraftStub, options: dict[str, Any], status: grpc.StatusCode, complaint: str
) -> None:
    session = open_session(draft)
    start, *frames = draft_start(**options)
    await session.send(start)
    if status == grpc.StatusCode.UNAVAILABLE:  # all others are refused before frames are read
        await session.send(*frames)
    code, message = await session.refusal()
    assert code == status and complaint in message


async def test_guidance_of_no_kind(draft: draft_pb2_grpc.DraftStub) -> None:
    first = draft_start()[0]
    first.start.guidance = 0  # type: ignore[assignment]
    session = open_session(draft)
    await session.send(first)
    assert await session.refusal() == (INVALID, "guidance must be hidden_states or scores")


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (restart(2, 9, [1], 20), "keeps 9 tokens, but the line has 8"),
        (restart(2, 4, [], 20), "at least one token to go on from"),
        (restart(2, 4, [320], 20), "outside the vocabulary"),
        (draft_start("second")[0], "takes `restart`, `advance`, `move` or `end`"),
        (draft_pb2.DraftRequest(), "takes `restart`, `advance`, `move` or `end`"),
    ],
)
async def test_impossible_orders_end_the_session(
    draft: draft_pb2_grpc.DraftStub, message: draft_pb2.DraftRequest, complaint: str
) -> None:
    session = await started(draft)
    await line(session, 8)
    await session.send(message)
    code, details = await session.refusal()
    assert code == INVALID and complaint in details


async def test_too_many_frames(draft: draft_pb2_grpc.DraftStub) -> None:
    first = draft_start()[0]
    first.start.frames.num_frames = 100_000
    session = open_session(draft)
    await session.send(first)
    code, message = await session.refusal()
    assert code == INVALID and "frames here, not 100000" in message


async def test_a_caller_that_vanishes_after_its_frames(draft: draft_pb2_grpc.DraftStub) -> None:
    session = await started(draft)
    await session.call.done_writing()
    while await session.read() is not None:
        pass
