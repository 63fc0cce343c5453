"""Stops a blocking decode: the deadline and the caller's wish, polled between packets and inside every read."""

import os
import time
from collections.abc import Callable
from typing import BinaryIO, ClassVar

from slipstream.errors import LimitExceeded, SlipstreamError, UnreadableVideo


class DecodeCancelled(SlipstreamError):
    """The caller asked to stop; nobody waits for this result any more."""

    status: ClassVar[str] = "CANCELLED"


class Watch:
    """One call's deadline and stop request."""

    def __init__(self, timeout_s: float, should_stop: Callable[[], bool] | None) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._should_stop = should_stop or (lambda: False)

    @property
    def expired(self) -> bool:
        """Whether `check` would raise."""
        return time.monotonic() >= self._deadline_s or self._should_stop()

    def check(self) -> None:
        """Raise DecodeCancelled or LimitExceeded when it is time to stop."""
        if self._should_stop():
            raise DecodeCancelled("decoding was cancelled")
        if time.monotonic() >= self._deadline_s:
            raise LimitExceeded(
                f"decoding took longer than {self._timeout_s:g} s; send a shorter or smaller video, or raise timeout_s"
            )


class WatchedReader:
    """The first `length` bytes of a file, for libav. It ends early instead of raising: the caller is C.

    After every call into libav, `check` tells why the file seemed to end.
    """

    def __init__(self, source: BinaryIO, length: int, watch: Watch) -> None:
        self._source = source
        self._length = length
        self._watch = watch
        self._failure: Exception | None = None

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end, after a failed read, or once the watch has expired."""
        if self._failure is not None or self._watch.expired:
            return b""
        try:
            return self._source.read(max(0, min(size, self._length - self._source.tell())))
        except Exception as failure:
            self._failure = failure
            return b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the read position; -1 when the source cannot."""
        try:
            if whence == os.SEEK_END:
                return self._source.seek(self._length + offset)
            return self._source.seek(offset, whence)
        except Exception:
            return -1

    def tell(self) -> int:
        """The read position in bytes."""
        return self._source.tell()

    def check(self) -> None:
        """Raise what stopped the reading: DecodeCancelled, LimitExceeded or UnreadableVideo."""
        self._watch.check()
        if self._failure is not None:
            raise UnreadableVideo(f"reading the video failed: {self._failure}") from self._failure
