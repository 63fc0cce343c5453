"""Files of videos: threads that touch them, as a file system may hang, and one that holds a video while it arrives."""

import asyncio
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, BinaryIO, Protocol, TypeVar, cast, runtime_checkable

from slipstream.errors import LimitExceeded, Overloaded, ServiceUnavailable
from slipstream.logs import get_logger
from slipstream.video.ranged_film import RangedFilm

ResultT = TypeVar("ResultT")

DEFAULT_FILE_TIMEOUT_S = 30.0
FILE_THREADS = 4
IN_MEMORY_BYTES = 32 * 1024**2
"""A video beyond this goes to a temporary file."""
_NO_ROOM = "the server has no room for the video now; try again later"


@runtime_checkable
class Closable(Protocol):
    """An open file, or what holds one."""

    def close(self) -> object: ...


class FileThreads:
    """Makes the calls to one file system off the event loop, so that one which hangs stops nobody but its callers.

    A call that hangs cannot be ended: its thread goes on waiting and keeps its place. They are daemon threads, unlike
    those of an executor, so that the process can end all the same.
    """

    def __init__(self, timeout_s: float = DEFAULT_FILE_TIMEOUT_S, max_threads: int = FILE_THREADS) -> None:
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(max_threads)

    async def run(self, call: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """What the call gives or raises. A result with `close` that comes too late is closed.

        Raises ServiceUnavailable when there is none in time, waiting for a place included.
        """
        result: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._places.acquire()
                try:
                    _start_thread(self._call, result, call, arguments)
                except BaseException:
                    self._places.release()
                    raise
                return await self._awaited(result)
        except TimeoutError:
            get_logger().error("files.hung", call=getattr(call, "__name__", "?"), timeout_s=self._timeout_s)
            raise ServiceUnavailable(
                f"the file system of the video does not answer within this server's limit of {self._timeout_s:g} s;"
                " try again later"
            ) from None

    def close(self, file: Closable) -> None:
        """Closes a file that is not needed any more, and does not wait for it."""
        _start_thread(_close, file)

    async def _awaited(self, result: "asyncio.Future[ResultT]") -> ResultT:
        """The result, which may come just as whoever waits for it is cancelled."""
        try:
            return await result
        except asyncio.CancelledError:
            if not result.cancelled() and result.exception() is None:
                self._give_up(result.result())
            raise

    def _call(
        self, result: "asyncio.Future[ResultT]", call: Callable[..., ResultT], arguments: tuple[Any, ...]
    ) -> None:
        hand_over = partial(_call_on, result.get_loop(), self._hand_over, result)
        try:
            given = call(*arguments)
        except Exception as error:  # without this frame, which would keep the arguments alive
            hand_over(None, error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        else:
            if not hand_over(given, None) and isinstance(given, Closable):
                _close(given)

    def _hand_over(self, result: "asyncio.Future[Any]", given: Any, error: Exception | None) -> None:
        self._places.release()
        if not result.done() and error is not None:
            result.set_exception(error)
        elif not result.done():
            result.set_result(given)
        else:
            self._give_up(given)

    def _give_up(self, given: Any) -> None:
        """Nobody waits for it any more."""
        if isinstance(given, Closable):
            self.close(given)


def _start_thread(call: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=call, args=arguments, name="files", daemon=True).start()


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> bool:
    """Whether the loop has not ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)
        return True
    return False


def _close(file: Closable) -> None:
    with suppress(OSError):  # what is still buffered has no place to go
        file.close()


@dataclass(frozen=True)
class VideoFile:
    """A video: an open regular file, or one in a store that is read by ranges."""

    file: BinaryIO | RangedFilm
    num_bytes: int
    files: FileThreads
    """The threads that may touch it: it may lie on a disk of the network that hangs."""
    name: str = field(default_factory=partial(secrets.token_hex, 8))
    """Of this opening of it, which no other has."""

    @property
    def whole(self) -> BinaryIO:
        """The file, of a source that was opened to be read as a whole."""
        assert not isinstance(self.file, RangedFilm), "it was to be opened whole"
        return self.file

    def close(self) -> None:
        """Blocks, like all that is done to the file."""
        self.whole.close()


class VideoBuffer:
    """Holds a video while it arrives, in a file without a name: in memory at first, on disk when it grows. There is
    always a descriptor to hand to a decoder. Gone when closed."""

    def __init__(self, max_bytes: int, files: FileThreads | None = None) -> None:
        """`files` are the threads that may touch the disk."""
        self._max_bytes = max_bytes
        self._files = files or FileThreads()
        self._size = 0
        self._in_memory = True
        self.file: BinaryIO = os.fdopen(os.memfd_create("video"), "w+b")
        """What has arrived; `write` may replace it."""

    def __enter__(self) -> "VideoBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close(self.file)

    async def write(self, data: bytes) -> None:
        """Appends. Raises LimitExceeded for a video that is too large, Overloaded when the disk or memory is full, and
        ServiceUnavailable when the disk hangs."""
        self._size += len(data)
        if self._size > self._max_bytes:
            raise LimitExceeded(f"the file is larger than this server's limit of {self._max_bytes} bytes")
        if self._in_memory and self._size <= IN_MEMORY_BYTES:
            self._write(data)
        else:
            await self._files.run(self._write_to_disk, data)

    async def finished(self) -> "VideoFile":
        """The whole file, at its start. Raises Overloaded or ServiceUnavailable."""
        if self._in_memory:
            self._rewind()
        else:
            await self._files.run(self._rewind)
        return VideoFile(self.file, self._size, self._files)

    def _write(self, data: bytes) -> None:
        try:
            self.file.write(data)
        except OSError:
            raise Overloaded(_NO_ROOM) from None

    def _write_to_disk(self, data: bytes) -> None:
        if self._in_memory:
            try:
                self._move_to_disk()
            except OSError:
                raise Overloaded(_NO_ROOM) from None
        self._write(data)

    def _rewind(self) -> None:
        try:
            self.file.seek(0)
        except OSError:
            raise Overloaded(_NO_ROOM) from None

    def _move_to_disk(self) -> None:
        disk = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed with this object)
        self.file.seek(0)
        shutil.copyfileobj(self.file, disk)
        self.file.close()
        self.file, self._in_memory = disk, False
