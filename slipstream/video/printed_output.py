"""What a confined process prints becomes log events."""

import asyncio
import os

from slipstream.logs import get_logger
from slipstream.video.messages import printable

_READ_BYTES = 64 * 1024
MAX_LINES = 100
"""Lines of one process's life that are logged; a hostile file could make it print for ever."""


class PrintedOutput:
    """The reading end of a pipe. Lines are cut to a bounded length, and beyond a bounded number they are dropped."""

    def __init__(self, read_end: int, pid: int, kind: str) -> None:
        self._read_end = read_end
        self._pid = pid
        self._kind = kind
        self._unfinished = b""
        self._num_lines = 0
        self._loop = asyncio.get_running_loop()
        os.set_blocking(read_end, False)
        self._loop.add_reader(read_end, self._read)

    def close(self) -> None:
        """Logs what is still in the pipe and closes it."""
        self._read()
        self._log(self._unfinished)
        self._stop_reading()
        os.close(self._read_end)

    def _read(self) -> None:
        try:
            data = os.read(self._read_end, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._stop_reading()
        if self._num_lines >= MAX_LINES:
            self._unfinished = b""
            return
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self._unfinished = self._unfinished[:_READ_BYTES]
        for line in lines:
            self._log(line)

    def _stop_reading(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._read_end)

    def _log(self, line: bytes) -> None:
        self._num_lines += 1
        if line.strip() and self._num_lines <= MAX_LINES:
            line_text = printable(line.decode(errors="replace"))
            get_logger().warning(f"{self._kind}.printed", line=line_text, **{self._kind: self._pid})
