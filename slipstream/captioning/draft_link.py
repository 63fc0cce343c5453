"""Keeps one caption supplied with a draft: finds it, joins it, listens to it, and starts over when it is lost.

Nothing that happens here can end the caption or change its text.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import grpc
import numpy as np

from slipstream.captioning.peers import Peers
from slipstream.errors import DraftFault, SlipstreamError
from slipstream.logs import get_logger
from slipstream.rpc import codec
from slipstream.rpc.channels import as_slipstream_error, request_metadata
from slipstream.rpc.v1 import common_pb2, draft_pb2
from slipstream.speculation.actions import AdvanceLine, JoinPoint, RestartLine

# -- proposals --------------------------------------------------------------------------------------------------------

# What a draft's tokens were drawn from, kept until the window that judges them leaves (rule "rejection").

SUM_TOLERANCE = 1e-3


class Proposals:
    """The proposals of the current line by absolute output position.

    Where they are required, each is checked here: what the target could not judge must not reach it, as a draft may
    cost a caption speed only.
    """

    def __init__(self, *, required: bool, vocab_size: int) -> None:
        self._required = required
        self._vocab_size = vocab_size
        self._by_position: dict[int, common_pb2.Proposal] = {}

    def check(self, message: draft_pb2.DraftTokens) -> None:
        """Raises `DraftFault` for proposals that do not fit their tokens."""
        tokens, proposals = message.token_ids, message.proposals
        if len(proposals) != len(tokens) and (proposals or self._required):
            raise DraftFault(f"the draft sent {len(tokens)} tokens with {len(proposals)} proposals")
        if self._required:
            for token, proposal in zip(tokens, proposals, strict=True):
                self._check(token, proposal)

    def remember(self, message: draft_pb2.DraftTokens) -> None:
        """These tokens, which were checked, are the line's next."""
        if self._required:
            self._by_position.update(enumerate(message.proposals, message.position))

    def forget(self) -> None:
        """The line ended."""
        self._by_position.clear()

    def take(self, position: int, window: Sequence[int]) -> list[common_pb2.Proposal]:
        """Those of a window that begins at `position`; empty where none are required. What lies before is forgotten."""
        if not self._required:
            return []
        end = position + len(window)
        taken = [self._by_position[index] for index in range(position, end)]
        self._by_position = {index: proposal for index, proposal in self._by_position.items() if index >= end}
        return taken

    def _check(self, token: int, proposal: common_pb2.Proposal) -> None:
        token_ids = np.array(proposal.token_ids, dtype=np.int64)
        probabilities = np.array(proposal.probabilities, dtype=np.float64)
        if len(token_ids) != len(probabilities):
            raise DraftFault(f"a proposal has {len(token_ids)} tokens and {len(probabilities)} probabilities")
        if token not in token_ids:
            raise DraftFault("the draft wrote a token that its own proposal does not have")
        if token_ids.max() >= self._vocab_size or len(np.unique(token_ids)) != len(token_ids):
            raise DraftFault("a proposal names a token twice, or one outside the vocabulary")
        # Written so that NaN fails, too.
        if not (np.all(probabilities > 0) and abs(probabilities.sum() - 1) <= SUM_TOLERANCE):
            raise DraftFault("the probabilities of a proposal are not positive numbers that add up to 1")


# -- draft link -------------------------------------------------------------------------------------------------------

FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.1, 5.0


class DraftListener(Protocol):
    """What the caption does with what the draft says. None of these may block."""

    def draft_joining(self) -> JoinPoint: ...

    def draft_ready(self, num_known: int, ready: draft_pb2.DraftReady) -> None: ...

    def draft_wrote(self, tokens: draft_pb2.DraftTokens) -> None: ...

    def draft_lost(self, reason: str) -> None: ...

    def draft_missing(self, reason: str) -> None: ...

    @property
    def draft_owes(self) -> bool: ...


class DraftLink:
    """The draft's side of one caption. `run` it as a task; cancel it when the caption has ended."""

    def __init__(
        self,
        peers: Peers,
        make_request: Callable[[], Awaitable[codec.DraftRequest]],
        frames: codec.Frames,
        listener: DraftListener,
        *,
        silence_s: float,
        timeout_s: float,
    ) -> None:
        self._peers = peers
        self._make_request = make_request
        self._frames = frames
        self._listener = listener
        self._silence_s = silence_s
        self._timeout_s = timeout_s
        self._outbox: asyncio.Queue[draft_pb2.DraftRequest | None] = asyncio.Queue()

    def send(self, action: RestartLine | AdvanceLine) -> None:
        """Tells the draft about its line."""
        if isinstance(action, RestartLine):
            self._outbox.put_nowait(codec.restart_message(action))
        else:
            self._outbox.put_nowait(codec.advance_message(action))

    async def run(self) -> None:
        """Draft after draft, until cancelled. Whatever goes wrong here costs speed only."""
        back_off_s = FIRST_BACK_OFF_S
        while True:
            reason = await self._find()
            if reason is None:
                reason = await self._take_part()
                self._listener.draft_lost(reason)
            elif back_off_s == FIRST_BACK_OFF_S:
                self._listener.draft_missing(reason)
            get_logger().warning("draft.lost", reason=reason, retry_s=back_off_s)
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, MAX_BACK_OFF_S)

    async def _find(self) -> str | None:
        """Why there is no draft that fits the target now, or None."""
        try:
            await self._peers.find_draft()
        except SlipstreamError as error:
            return str(error)
        return None

    async def _take_part(self) -> str:
        """Writes with the draft until it is lost; returns why."""
        assert self._peers.draft is not None
        self._outbox = asyncio.Queue()
        request = await self._make_request()
        join = self._listener.draft_joining()
        call = self._peers.draft.stub.Session(
            self._messages(request, join), timeout=self._timeout_s, metadata=request_metadata(request.session_id)
        )
        try:
            async for event in self._events(call):
                self._on_event(event, join)
        except grpc.aio.AioRpcError as error:
            return str(as_slipstream_error(error, "draft"))
        except SlipstreamError as error:
            return str(error)
        except Exception:
            get_logger().exception("draft.failed")
            return "internal error; the gateway's log has the details"
        finally:
            call.cancel()
            self._outbox.put_nowait(None)  # grpc would wait for messages of a call that the draft has ended
        return "the draft ended the session"

    def _on_event(self, event: draft_pb2.DraftEvent, join: JoinPoint) -> None:
        kind = event.WhichOneof("message")
        if kind == "ready":
            self._listener.draft_ready(len(join.committed), event.ready)
        elif kind == "tokens":
            self._listener.draft_wrote(event.tokens)
        else:
            raise DraftFault("the draft sent an empty message")

    async def _messages(self, request: codec.DraftRequest, join: JoinPoint) -> AsyncIterator[draft_pb2.DraftRequest]:
        yield codec.draft_start(request, join, self._frames)
        for chunk in codec.frame_chunks(self._frames):
            yield draft_pb2.DraftRequest(frames=chunk)
        outbox = self._outbox
        while (message := await outbox.get()) is not None:
            yield message

    async def _events(self, call: grpc.aio.StreamStreamCall) -> AsyncIterator[draft_pb2.DraftEvent]:
        """The draft's events. Raises `DraftFault` when it owes tokens and nothing has come for `silence_s`.

        A pending read must not be cancelled, as that would cancel the call; so it is waited for with a limit.
        """
        while True:
            reading = asyncio.ensure_future(call.read())
            try:
                while not (await asyncio.wait({reading}, timeout=self._silence_s))[0]:
                    if self._listener.draft_owes:
                        raise DraftFault(f"the draft was silent for {self._silence_s:g} s")
                event = reading.result()
            finally:
                if not reading.done():
                    reading.cancel()
                    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                        await reading
            if event is grpc.aio.EOF:
                return
            assert isinstance(event, draft_pb2.DraftEvent)
            yield event
