"""A film that is not on this machine, as the gateway hands it to a decoder: a socket on which ranges of it are asked.

The decoder has no network and is not trusted: it can ask for bytes of this one film and for nothing else.
"""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from slipstream.errors import LimitExceeded, ObjectUnavailable, SlipstreamError
from slipstream.logs import get_logger
from slipstream.video.boxes import HEADER_BYTES, Extent, IndexedBoxes
from slipstream.video.ranged_wire import ASKED, FAILED, GIVEN, MOST_ASKED

SLOW_SHARE = 0.5
"""Of a decoder's time: where more of it went by waiting, a decode that took too long is the store's fault."""
MOST_PASSES = 8
"""How often a decoder may be given as many bytes as the film has, whichever they are: a sound one goes through a film
four times at most, and a store asks money for each byte."""
LEAST_GIVEN, LEAST_CHARGED = 8 * 1024**2, 1024
"""Bytes that any decoder may be given, and as how many the smallest question counts."""

ReadRange = Callable[[int, int], Awaitable[bytes]]
"""The bytes from the first number to the second, which is behind the last. Raises SlipstreamError."""


@dataclass(frozen=True)
class RangedFilm:
    """A film, by ranges."""

    num_bytes: int
    read: ReadRange
    media: tuple[Extent, ...]
    """Where samples lie that an index tells all about; see `IndexedBoxes`."""
    identity: str
    """Another one when the content is another, in the place of a digest of bytes that nobody has read."""


async def media_of(num_bytes: int, read: ReadRange) -> tuple[Extent, ...]:
    """What `IndexedBoxes` finds. Raises what `read` does."""
    boxes = IndexedBoxes(num_bytes)
    while not boxes.is_done:
        boxes.add(await read(boxes.position, min(boxes.position + HEADER_BYTES, num_bytes)))
    return boxes.media


@asynccontextmanager
async def served(film: RangedFilm, limit_s: float) -> AsyncIterator[int]:
    """A descriptor to give to one decoder, which may take `limit_s` seconds.

    Raises what reading the film raised, whatever the decoder makes of it, and `ObjectUnavailable` when most of the time
    went by waiting for bytes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    answers = _Answers(film, ours)
    answering = asyncio.create_task(answers.run())
    try:
        try:
            yield theirs.fileno()
        except Exception as error:
            if answers.failure is None and isinstance(error, LimitExceeded) and answers.waited_s > limit_s * SLOW_SHARE:
                raise ObjectUnavailable(
                    f"the video's store is too slow: {answers.waited_s:.0f} s went by waiting for its bytes"
                ) from None
            if answers.failure is None:
                raise
        if answers.failure is not None:
            raise answers.failure from None
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        ours.close()
        theirs.close()


class _Answers:
    """Answers one decoder, question after question."""

    def __init__(self, film: RangedFilm, connection: socket.socket) -> None:
        self._film, self._connection = film, connection
        self._loop = asyncio.get_running_loop()
        self.failure: SlipstreamError | None = None
        self._waited_s, self._waiting_since = 0.0, 0.0
        self._bytes_left = MOST_PASSES * film.num_bytes + LEAST_GIVEN

    @property
    def waited_s(self) -> float:
        """Seconds for which bytes were awaited, until now."""
        return self._waited_s + (self._loop.time() - self._waiting_since if self._waiting_since else 0.0)

    async def run(self) -> None:
        """Until the decoder hangs up, asks for what is not there, or the film cannot be read."""
        facts = json.dumps({"num_bytes": self._film.num_bytes, "media": self._film.media}).encode()
        try:
            with suppress(OSError):  # the decoder is gone, which who waits for it will see
                await self._give(facts)
                while (question := await self._question()) and self._may_ask(*question):
                    await self._answer(*question)
                    await asyncio.sleep(0)  # what is at hand is given without a wait, and others have this loop, too
        except Exception as error:
            get_logger().exception("decoder.not_answered")
            self.failure = ObjectUnavailable(f"the video could not be read: {error}")
        finally:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # a decoder that waits for bytes hears that none will come

    def _may_ask(self, start: int, num_bytes: int) -> bool:
        self._bytes_left -= max(num_bytes, LEAST_CHARGED)
        is_there = 0 < num_bytes <= MOST_ASKED and start + num_bytes <= self._film.num_bytes
        if not is_there or self._bytes_left < 0:
            get_logger().error("decoder.bad_question", start=start, num_bytes=num_bytes)
            return False
        return True

    async def _answer(self, start: int, num_bytes: int) -> None:
        self._waiting_since = self._loop.time()
        try:
            data = await self._film.read(start, start + num_bytes)
        except SlipstreamError as error:
            self.failure = error
            await self._loop.sock_sendall(self._connection, GIVEN.pack(FAILED))
            return
        finally:
            self._waited_s, self._waiting_since = self.waited_s, 0.0
        await self._give(data)

    async def _give(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._connection, GIVEN.pack(len(data)) + data)

    async def _question(self) -> tuple[int, int] | None:
        message = b""
        while len(message) < ASKED.size:
            piece = await self._loop.sock_recv(self._connection, ASKED.size - len(message))
            if not piece:
                return None
            message += piece
        start, num_bytes = ASKED.unpack(message)
        return start, num_bytes
