"""Group commit: calls that come while one is under way go together in the next, so that as many as come at once share
one round trip and one sync of the disk (DeWitt et al., "Implementation Techniques for Main Memory Database Systems",
1984, section 5.2)."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from slipstream.archive.queue import DamagedRecord, QueueUnavailable

GROUP_CALLS, GROUP_BYTES = 100, 1 << 20
"""Of one group, at most; it ends with the call that makes it so many bytes."""
AskT = TypeVar("AskT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class _Call(Generic[AskT, AnswerT]):
    asked: AskT
    num_bytes: int
    answer: asyncio.Future[AnswerT]


class GroupCommit(Generic[AskT, AnswerT]):
    """Calls of one kind, each safe to repeat: one group is under way at a time."""

    def __init__(self, send: Callable[[Sequence[AskT]], Awaitable[Sequence[AnswerT]]]) -> None:
        """`send` makes a group's calls and answers each, in order."""
        self._send = send
        self._waiting: deque[_Call[AskT, AnswerT]] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def call(self, asked: AskT, num_bytes: int) -> AnswerT:
        """The answer. Who is cancelled does not know whether its call was made. Raises what `send` does."""
        call = _Call[AskT, AnswerT](asked, num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all())
        return await call.answer

    async def close(self) -> None:
        """Whoever still waits is cancelled."""
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._make(self._next_group())
        finally:
            self._sender = None
            for call in self._waiting:
                call.answer.cancel()
            self._waiting.clear()

    def _next_group(self) -> list[_Call[AskT, AnswerT]]:
        group: list[_Call[AskT, AnswerT]] = []
        num_bytes = 0
        while self._waiting and len(group) < GROUP_CALLS and num_bytes < GROUP_BYTES:
            group.append(self._waiting.popleft())
            num_bytes += group[-1].num_bytes
        return group

    async def _make(self, group: Sequence[_Call[AskT, AnswerT]]) -> None:
        try:
            for call, answer in zip(group, await self._send([call.asked for call in group]), strict=True):
                if not call.answer.done():
                    call.answer.set_result(answer)
        except DamagedRecord as error:
            if len(group) == 1:
                _fail(group, error)
            else:  # one of them cannot be carried out, and its neighbours can
                for call in group:
                    await self._make([call])
        except QueueUnavailable as error:  # nobody waits for longer than one call takes
            _fail((*group, *self._waiting), error)
            self._waiting.clear()
        except Exception as error:
            _fail(group, error)
        except BaseException:
            for call in group:
                call.answer.cancel()
            raise


def _fail(calls: Sequence[_Call[AskT, AnswerT]], error: Exception) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_exception(error)
