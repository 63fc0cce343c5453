"""The parts of a job that is run now: which there are, and each new one kept as soon as it is made.

A gateway that is killed, frozen or cut off loses what it was at. Whoever has the job next makes the parts that are
missing, and no other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from slipstream.archive.parts import PartsState, PutAnswer
from slipstream.archive.queue import JobQueue, Lease, QueueUnavailable
from slipstream.archive.worker import RetryLater
from slipstream.errors import LimitExceeded
from slipstream.logs import get_logger

STORE_AWAY_S = 0.5
NO_PARTS = PartsState(0, "", ())
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True)
class PartNames:
    """What a job and its parts are called."""

    whole: str
    part: str
    cure: str
    """What to do about a job whose parts take too much room."""
    counted: str = ""
    """What all parts together are a number of, where that is no number of `part`."""


class PartKeeper:
    """One lease on a job of many parts. While the store is away every call waits: what was made is not made again for
    that. Each raises `RetryLater` when the lease is lost."""

    def __init__(self, queue: JobQueue, lease: Lease, names: PartNames, progress: Callable[[str], None]) -> None:
        self.state = NO_PARTS
        """As of the last call."""
        self._queue = queue
        self._lease = lease
        self._names = names
        self._progress = progress

    async def open(self, key: str, total: int = 0, layout: str = "") -> None:
        """Finds what there is of parts that were made as `key` says, see `parts_key`; `total` and `layout` are all of
        the job, once they are known."""
        state = await _there(lambda: self._queue.open_parts(self._lease, key, total, layout))
        if state is None:
            raise _lost()
        self.state = state
        if state.done and not total:
            get_logger().info(f"{self._names.whole}.resumed", parts_done=len(state.done), parts_total=state.total)

    async def keep(self, number: int, named: int, data: bytes, tallies: Mapping[str, float]) -> None:
        """Keeps the part of this number, which its owner knows as `named`. Raises `LimitExceeded` when the job's parts
        take too much room."""
        answer = await _there(lambda: self._queue.put_part(self._lease, number, data, tallies))
        if answer is PutAnswer.LOST:
            raise _lost()
        names = self._names
        if answer is PutAnswer.FULL:
            raise LimitExceeded(
                f"{names.part} {named}: the {names.part}s of this {names.whole} take more than the"
                f" {self._queue.policy.parts.max_job_bytes} bytes that a job may keep; {names.cure}"
            )
        self.state = replace(self.state, done=(*self.state.done, number))
        self._progress(f"{names.counted or names.part} {len(self.state.done)}/{self.state.total}")
        get_logger().info("part.kept", part=number, answer=answer, num_bytes=len(data), **{names.part: named})

    async def find_note(self, name: str) -> bytes | None:
        """The note of this name, of whatever run of the job; empty where it was damaged."""
        return await _there(lambda: self._queue.find_note(self._lease, name))

    async def keep_note(self, name: str, data: bytes) -> None:
        """Keeps a note, where there is room for it: without it work is done again, and no more."""
        try:
            answer = await _there(lambda: self._queue.put_note(self._lease, name, data))
        except LimitExceeded:
            answer = PutAnswer.FULL
        if answer is PutAnswer.LOST:
            raise _lost()
        get_logger().info("note.kept", answer=answer, num_bytes=len(data))


async def _there(call: Callable[[], Awaitable[AnswerT]]) -> AnswerT:
    """The store's answer, once it is there to give one."""
    while True:
        try:
            return await call()
        except QueueUnavailable:
            await asyncio.sleep(STORE_AWAY_S)


def _lost() -> RetryLater:
    """What the run ends with; the queue will refuse it and tell the worker."""
    return RetryLater("the lease is lost", counted=False)
