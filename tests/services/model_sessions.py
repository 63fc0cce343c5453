"""Speaks to the model services directly, well or badly: the messages of one session, sent and read one by one."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from slipstream.engine.target_engine import TargetEngine
from slipstream.pruning import Guidance
from slipstream.rpc import session_codec
from slipstream.rpc.calls import open_channel, request_metadata
from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.guards import AnswerErrors
from slipstream.rpc.v1 import common_pb2, draft_pb2, target_pb2
from slipstream.session_messages import DraftStart, TargetStart
from slipstream.speculation.methods import Score
from slipstream.speculation.protocol import JoinPoint

TIMEOUT_S = 120.0
PROMPT = "Describe the video."
CAPABILITY = b"sixteen or more."
LONG_PROMPT = "?" * 4018
LONG_PROMPT_ROOM = 50
"""Tokens that the answer to it may have, with two frames and a context of 4096."""


@asynccontextmanager
async def served(servicer: Any, folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the servicer, which this process serves at a socket of the folder."""
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[AnswerErrors()])
    servicer.register(server)
    address = f"unix:{folder}/model.sock"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with open_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0)


@dataclass
class Session:
    """An open stream to a model service."""

    call: Any
    events: list[Any] = field(default_factory=list)

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self.call.write(message)

    async def read(self) -> Any:
        """The next event, or None at the end of the stream. Raises AioRpcError when it ended badly."""
        event = await self.call.read()
        if event is grpc.aio.EOF:
            return None
        self.events.append(event)
        return event

    async def read_until(self, kind: str) -> Any:
        while True:
            event = await self.read()
            assert event is not None, f"ended before {kind}"
            if event.WhichOneof("message") == kind:
                return getattr(event, kind)

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        """Status and message, once the stream has ended."""
        try:
            while await self.read() is not None:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"ended well after {len(self.events)} events")


def open_session(stub: Any, request_id: str = "direct") -> Session:
    return Session(stub.Session(timeout=TIMEOUT_S, metadata=request_metadata(request_id)))


def some_frames(num_frames: int = 2, seed: int = 0) -> session_codec.Frames:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, 24, 32, 3), dtype=np.uint8)


@dataclass
class Owner:
    """Of frames that are to be sent."""

    frames: session_codec.Frames


def target_start(
    session_id: str = "s",
    *,
    frames: session_codec.Frames | None = None,
    prompt: str = PROMPT,
    max_new_tokens: int = 16,
    with_guidance: bool = True,
) -> list[target_pb2.TargetRequest]:
    """Everything up to the last pixel."""
    frames = some_frames() if frames is None else frames
    request = TargetStart(session_id, prompt, max_new_tokens, with_guidance, guidance_capability=CAPABILITY)
    chunks = [target_pb2.TargetRequest(frames=chunk) for chunk in session_codec.frame_chunks(Owner(frames))]
    return [session_codec.target_start(request, frames), *chunks]


async def pulled(engine: TargetEngine, session_id: str, kind: str, *score: Score) -> Guidance:
    """The guidance of a session that was opened without a capability."""
    async with engine.guidance(session_id, kind, *score) as guidance:
        return guidance


def judge(window: Sequence[int] = (), num_passes: int = 1) -> target_pb2.TargetRequest:
    return target_pb2.TargetRequest(judge=target_pb2.Judge(window=window, num_passes=num_passes))


def target_end() -> target_pb2.TargetRequest:
    return target_pb2.TargetRequest(end=common_pb2.End())


def draft_start(
    session_id: str = "s", *, frames: session_codec.Frames | None = None, join: JoinPoint | None = None, **changes: Any
) -> list[draft_pb2.DraftRequest]:
    """Everything up to the last pixel, of a draft that needs no target unless told otherwise."""
    frames = some_frames() if frames is None else frames
    request: dict[str, Any] = {
        "session_id": session_id,
        "prompt": PROMPT,
        "pruner": "uniform",
        "alpha": 0.5,
        "positions": "original",
        "guidance": "scores",
        "guidance_address": "unix:/nowhere",
        "seed": 0,
        "guidance_capability": CAPABILITY,
    } | changes
    first = session_codec.draft_start(DraftStart(**request), join or JoinPoint(1, (), 8, 1), frames)
    return [first, *(draft_pb2.DraftRequest(frames=chunk) for chunk in session_codec.frame_chunks(Owner(frames)))]


def restart(epoch: int, keep: int, suffix: Sequence[int], write_until: int) -> draft_pb2.DraftRequest:
    message = draft_pb2.Restart(epoch=epoch, keep=keep, suffix=suffix, write_until=write_until, first_chunk=1)
    return draft_pb2.DraftRequest(restart=message)


def advance(epoch: int, write_until: int) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(advance=draft_pb2.Advance(epoch=epoch, write_until=write_until))


def draft_end() -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(end=common_pb2.End())
