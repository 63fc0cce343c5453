"""Holds a video while it arrives. There is always a descriptor to hand to a decoder. Knows no wire."""

import contextlib
import os
import shutil
import tempfile
from types import TracebackType
from typing import BinaryIO, cast

from slipstream.errors import LimitExceeded, Overloaded

IN_MEMORY_BYTES = 32 * 1024**2
"""A video beyond this goes to a temporary file."""


class VideoBuffer:
    """A file without a name: in memory at first, on disk when it grows. Gone when closed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._in_memory = True
        self.file: BinaryIO = os.fdopen(os.memfd_create("video"), "w+b")
        """What has arrived; `write` may replace it."""

    def __enter__(self) -> "VideoBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what is still buffered has no place to go
            self.file.close()

    def write(self, data: bytes) -> None:
        """Appends. Raises LimitExceeded for a video that is too large, Overloaded when the disk or memory is full."""
        self._size += len(data)
        if self._size > self._max_bytes:
            raise LimitExceeded(f"the video is larger than this server's limit of {self._max_bytes} bytes")
        try:
            if self._in_memory and self._size > IN_MEMORY_BYTES:
                self._move_to_disk()
            self.file.write(data)
        except OSError:
            raise Overloaded("the server has no room for the video now; try again later") from None

    def finished(self) -> BinaryIO:
        """The whole file, at its start. Raises Overloaded."""
        try:
            self.file.seek(0)
        except OSError:
            raise Overloaded("the server has no room for the video now; try again later") from None
        return self.file

    def _move_to_disk(self) -> None:
        disk = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed with this object)
        self.file.seek(0)
        shutil.copyfileobj(self.file, disk)
        self.file.close()
        self.file, self._in_memory = disk, False
