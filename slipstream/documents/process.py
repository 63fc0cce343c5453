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
from dataclasses import asdict, dataclass
from pathlib import Path
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
from slipstream.logs import get_logger
from slipstream.video.decoder_process import (
    KILL_SLACK_S,
    SENT_FROM_OUTSIDE,
    START_S,
    ConfinedProcess,
    OnReady,
    sealed_memory,
)

MODULE = "slipstream.documents.child"
_PATIENCE, _SLICES = 3, 4
"""Times its limit that a process may take which others keep from its core, and how often in each it is looked at."""
_MAX_MESSAGE_BYTES = 16 * 1024
_MAX_TEXT = 600
_MAX_PAGES = 100_000
_ENVIRONMENT = {"ORT_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
"""onnxruntime would start a thread that reports its use; a reader has one thread, and no network."""
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
        return math.ceil(self.limits.open_s + 2 * self.limits.max_pages * (self.limits.page_s + 2)) + 60


class ReaderLost(Exception):
    """The process crashed, hung or talked nonsense."""

    def __init__(self, reason: str, *, may_retry: bool, is_slow: bool = False) -> None:
        super().__init__(reason)
        self.may_retry = may_retry
        """Whether the document is probably not to blame."""
        self.is_slow = is_slow


class ReaderProcess(ConfinedProcess):
    """A running process, for one document. After any error but a refusal it is of no use any more."""

    def __init__(self, spec: ReaderSpec, on_ready: OnReady = lambda confined: None) -> None:
        """See `ConfinedProcess`."""
        self._spec = spec
        self._shared: mmap.mmap | None = None
        limits = (spec.memory_bytes + spec.shared_bytes, spec.cpu_s)
        super().__init__("reader", spec.module, limits, on_ready, _ENVIRONMENT)

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
        """See `ConfinedProcess`."""
        super().kill()
        if self._shared is not None:
            self._shared.close()

    async def _start(self, on_ready: OnReady) -> None:
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
            message = await self._heard(limit_s)
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

    async def _heard(self, limit_s: float) -> bytes:
        """The next message. Raises TimeoutError where none comes within `limit_s`; a process that has had less of a
        core than that and goes on working is given up to `_PATIENCE` times as long: others take its time."""
        receiving = asyncio.ensure_future(self._receive(_MAX_MESSAGE_BYTES))
        began_s = worked_s = _worked_s(self.process.pid)
        slices = [limit_s + KILL_SLACK_S, *[limit_s / _SLICES] * round((_PATIENCE - 1) * _SLICES)]
        try:
            for number, slice_s in enumerate(slices):
                await asyncio.wait([receiving], timeout=slice_s)
                if receiving.done():
                    return receiving.result()
                before_s, worked_s = worked_s, _worked_s(self.process.pid)
                if worked_s - began_s >= limit_s or (number and worked_s <= before_s):
                    break
            raise TimeoutError
        finally:
            receiving.cancel()

    def _nonsense(self, failure: Exception) -> ReaderLost:
        self.process.kill()
        get_logger().error("reader.bad_answer", reader=self.process.pid, reason=repr(failure))
        return ReaderLost("its reader broke", may_retry=False)

    async def _lost(self) -> ReaderLost:
        status, cause = await self._end()
        get_logger().warning("reader.lost", reader=self.process.pid, cause=cause)
        if -status == signal.SIGXCPU:
            return ReaderLost("it took too much time of the processor", may_retry=False, is_slow=True)
        return ReaderLost(f"its reader crashed ({cause})", may_retry=-status in SENT_FROM_OUTSIDE)


def _worked_s(pid: int) -> float:
    """Seconds that a process and those below it have run on a core, by their first threads; 0 for one that is gone."""
    task = Path("/proc") / str(pid) / "task" / str(pid)
    try:
        below = map(int, (task / "children").read_text().split())
        return int((task / "schedstat").read_text().split()[0]) / 1e9 + sum(map(_worked_s, below))
    except (OSError, ValueError, IndexError):
        return 0.0


def _number(fields: dict[str, Any], name: str, low: int, high: int) -> int:
    value = fields[name]
    if type(value) is not int or not low <= value <= high:
        raise BadDraft(f"{name} is not in {low}..{high}")
    return value
