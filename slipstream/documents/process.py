"""One reader's process as its parent sees it: starts it, hands it a document, believes little of what it says.

It never tries again; `slipstream.documents.pool` does.
"""

import asyncio
import json
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.documents.messages import (
    MAX_DRAFT_BYTES,
    BadDraft,
    DocumentLimits,
    DocumentRequest,
    PageDraft,
    PagePicture,
    checked_draft,
    clean_text,
    draft_from_bytes,
)
from slipstream.errors import (
    InvalidRequest,
    LimitExceeded,
    ServiceUnavailable,
    SlipstreamError,
    UnreadableDocument,
)
from slipstream.logs import get_logger, heard
from slipstream.video.decoder_process import PrintedOutput, child_environment, sealed_memory

MODULE = "slipstream.documents.child"
START_S = 60.0
"""A reader that is not ready by then is broken. Models are loaded meanwhile."""
KILL_SLACK_S = 1.0
_EXIT_S = 1.0
_MAX_MESSAGE_BYTES = 16 * 1024
_MAX_TEXT = 600
_MAX_PAGES = 100_000
_ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
"""onnxruntime would start a thread that reports its use; a reader has one thread, and no network."""
_SENT_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_REFUSALS: dict[str, type[SlipstreamError]] = {
    kind.__name__: kind for kind in (InvalidRequest, LimitExceeded, UnreadableDocument)
}


@dataclass(frozen=True)
class ReaderSpec:
    """How readers are started."""

    limits: DocumentLimits
    memory_bytes: int
    """Address space on top of what a fresh reader has mapped, the picture apart."""
    module: str = MODULE
    """What to run; tests put a misbehaving one here."""

    @property
    def shared_bytes(self) -> int:
        """Of the memory that a page's picture and draft are handed over in."""
        return 3 * self.limits.max_page_pixels + MAX_DRAFT_BYTES

    @property
    def cpu_s(self) -> int:
        """CPU time of one reader's life."""
        return math.ceil(self.limits.open_s + self.limits.max_pages * (self.limits.page_s + 2)) + 60


class ReaderLost(Exception):
    """The process crashed, hung or talked nonsense."""

    def __init__(self, reason: str, *, may_retry: bool, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.may_retry = may_retry
        """Whether the document is probably not to blame."""
        self.is_slow = is_slow


class ReaderProcess:
    """A running process, for one document. After any error but a refusal it is of no use any more."""

    def __init__(self, spec: ReaderSpec, on_ready: Callable[[tuple[str, ...]], None] = lambda confined: None) -> None:
        """Starts the process. Call from the event loop's own thread: the process dies with the thread that made it."""
        self._spec = spec
        self._is_killed = False
        self._shared: mmap.mmap | None = None
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        read_end, write_end = os.pipe()
        try:
            memory_bytes = spec.memory_bytes + spec.shared_bytes
            numbers = map(str, (theirs.fileno(), memory_bytes, spec.cpu_s, os.getpid()))
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-m", spec.module, *numbers],
                cwd="/",
                env=child_environment() | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[theirs.fileno()],
            )
        except OSError:
            os.close(read_end)
            self._connection.close()
            raise
        finally:
            os.close(write_end)
            theirs.close()
        self._output = PrintedOutput(read_end, self.process.pid, "reader.printed")
        self._loop = asyncio.get_running_loop()
        self._starting = heard(self._loop.create_task(self._start(on_ready)))

    @property
    def is_alive(self) -> bool:
        """Whether it may be given a document; it can still end before it is."""
        return not self._is_killed and self.process.poll() is None

    async def wait_ready(self) -> None:
        """Returns when the process waits for a document. Raises ServiceUnavailable when it does not come to that."""
        await asyncio.shield(self._starting)

    async def open(self, document: int) -> int:
        """Hands over the document behind the descriptor; how many pages it has.

        Raises UnreadableDocument or LimitExceeded about the document, and ReaderLost.
        """
        memory = sealed_memory(self._spec.shared_bytes)
        try:
            self._shared = mmap.mmap(memory, self._spec.shared_bytes, prot=mmap.PROT_READ)
            try:
                socket.send_fds(self._connection, [json.dumps(asdict(self._spec.limits)).encode()], [document, memory])
            except OSError:
                raise await self._lost() from None
        finally:
            os.close(memory)
        fields = await self._answer("opened", self._spec.limits.open_s)
        return _number(fields, "num_pages", 1, _MAX_PAGES)

    async def draw(self, page: int, request: DocumentRequest) -> PagePicture:
        """The picture of a page; its draft is made from now on. Raises as `open` does."""
        try:
            self._connection.send(json.dumps(asdict(request) | {"page": page}).encode())
        except OSError:
            raise await self._lost() from None
        fields = await self._answer("drawn", self._spec.limits.page_s)
        try:
            width, height = (
                _number(fields, side, 1, self._spec.limits.max_page_pixels) for side in ("width", "height")
            )
            if width * height > self._spec.limits.max_page_pixels or not 0 <= float(fields["dpi"]) < 10_000:
                raise BadDraft("a picture is larger than allowed")
        except (KeyError, TypeError, ValueError) as failure:
            raise self._nonsense(failure) from None
        assert self._shared is not None
        pixels = self._shared[: 3 * width * height] if request.pictures else b""
        return PagePicture(page, width, height, float(fields["dpi"]), pixels)

    async def draft(self, picture: PagePicture) -> PageDraft:
        """The draft of the page that was drawn last. Raises as `open` does."""
        fields = await self._answer("drafted", self._spec.limits.page_s)
        start = 3 * self._spec.limits.max_page_pixels
        assert self._shared is not None
        try:
            data = self._shared[start : start + _number(fields, "num_bytes", 1, MAX_DRAFT_BYTES)]
            return checked_draft(draft_from_bytes(data), picture.page, picture.width, picture.height)
        except (KeyError, TypeError, ValueError) as failure:
            raise self._nonsense(failure) from None

    def kill(self) -> None:
        """Ends the process at once; `reap` must follow. May be called again."""
        if self._is_killed:
            return
        self._is_killed = True
        self._starting.cancel()
        self.process.kill()
        self._output.close()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._connection)  # before another descriptor gets its number
        self._connection.close()
        if self._shared is not None:
            self._shared.close()

    def reap(self) -> int:
        """Waits for the end of a killed process and returns its exit status. Blocks for some milliseconds."""
        return self.process.wait()

    async def _start(self, on_ready: Callable[[tuple[str, ...]], None]) -> None:
        try:
            fields = await self._answer("ready", START_S)
            confined = tuple(clean_text(str(name))[:40] for name in fields.get("confined", ())[:20])
        except (ReaderLost, SlipstreamError, TypeError) as failure:
            get_logger().error("reader.not_started", reader=self.process.pid, reason=str(failure))
            raise ServiceUnavailable("the reader of documents does not start; the server's log says why") from None
        on_ready(confined)

    async def _answer(self, kind: str, limit_s: float) -> dict[str, Any]:
        """The fields of the answer, which must be of that kind. Raises what the process refused, or ReaderLost."""
        try:
            async with asyncio.timeout(limit_s + KILL_SLACK_S):
                message = await self._receive()
        except TimeoutError:
            self.process.kill()
            get_logger().warning("reader.timed_out", reader=self.process.pid, waited_for=kind)
            raise ReaderLost(f"it took longer than {limit_s:g} s", may_retry=False, is_slow=True) from None
        if not message:
            raise await self._lost()
        try:
            [(said, fields)] = json.loads(message).items()
            if said == "refused":
                raise _REFUSALS[fields["error"]](clean_text(str(fields["message"]))[:_MAX_TEXT])
            if said != kind or not isinstance(fields, dict):
                raise ValueError(f"it answers something else than {kind}")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as failure:
            raise self._nonsense(failure) from None
        return fields

    async def _receive(self) -> bytes:
        """The next message; none when the process has hung up."""
        try:
            message = await self._loop.sock_recv(self._connection, _MAX_MESSAGE_BYTES + 1)
        except OSError:
            return b""
        return message

    def _nonsense(self, failure: Exception) -> ReaderLost:
        self.process.kill()
        get_logger().error("reader.bad_answer", reader=self.process.pid, reason=repr(failure))
        return ReaderLost("its reader broke", may_retry=False)

    async def _lost(self) -> ReaderLost:
        status = await asyncio.to_thread(self._exit_status)
        cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        get_logger().warning("reader.lost", reader=self.process.pid, cause=cause)
        if -status == signal.SIGXCPU:
            return ReaderLost("it took too much time of the processor", may_retry=False, is_slow=True)
        return ReaderLost(f"its reader crashed ({cause})", may_retry=-status in _SENT_FROM_OUTSIDE)

    def _exit_status(self) -> int:
        """How the process ended after it hung up; one that lives on is killed and counts as failed."""
        try:
            return self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return 1


def _number(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    value = fields[name]
    if type(value) is not int or not low <= value <= high:
        raise BadDraft(f"{name} is not in {low}..{high}")
    return value
