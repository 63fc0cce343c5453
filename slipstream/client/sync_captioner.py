"""`Captioner`: the synchronous twin of `AsyncCaptioner`, which it runs on an event loop in a thread of its own."""

import asyncio
import atexit
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from slipstream.client.async_captioner import (
    AsyncCaptioner,
    AsyncCaptionStream,
    CaptionCall,
    ItemT,
    any_event,
    read_to_end,
    text_only,
    with_keywords,
)
from slipstream.client.batch_handles import Archive, BlockingItems, Items
from slipstream.client.caption_client import Video
from slipstream.client.connection import FilePath, GatewayAddress
from slipstream.client.document_client import DocumentCall, with_document_keywords
from slipstream.client.film_client import FilmCall, segment_captions, with_film_keywords
from slipstream.documents.reading import DocumentEvent, PageReading, page_readings
from slipstream.messages import Caption, CaptionEvent, CommittedText, SegmentCaption
from slipstream.service_info import GatewayInfo

# -- background loop --------------------------------------------------------------------------------------------------

ResultT = TypeVar("ResultT")
LAST_CLOSE_S = 10.0
LAST_CANCEL_S = 5.0


_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By process: a fork has its parent's loop, and not the thread that runs it."""
_making_loop = threading.Lock()


def _background_loop() -> asyncio.AbstractEventLoop:
    """One for all captioners, as gRPC reads for all loops of a process at one place."""
    with _making_loop:
        if os.getpid() not in _loops:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="slipstream-client", daemon=True).start()
        return _loops[os.getpid()]


def run_in_background(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The coroutine's result. It is cancelled when this thread is interrupted, as by Ctrl-C, and has ended then, if it
    ends in time. Works in any thread, also where an event loop runs already, which it blocks meanwhile."""
    loop, future = _background_loop(), None
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        return future.result()
    finally:
        if future is None or not future.done():
            asyncio.run_coroutine_threadsafe(_cancelled(coroutine), loop).result()


async def _cancelled(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Cancels its task and waits until that has ended, but not for ever: its generators cannot be closed before."""
    if tasks := [task for task in asyncio.all_tasks() if task.get_coro() is coroutine]:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=LAST_CANCEL_S)


_open_captioners = defaultdict[int, set[AsyncCaptioner]](set)
"""By the process that opened them: they are not those of its forks, whose copies of them are no concern of anybody."""


def _close(captioner: AsyncCaptioner, pid: int) -> None:
    """Closes without waiting: the garbage collector may call this in any thread, also in the loop's own."""
    if pid != os.getpid():
        return
    asyncio.run_coroutine_threadsafe(_close_now(captioner), _background_loop())


async def _close_now(captioner: AsyncCaptioner) -> None:
    await captioner.close()
    _open_captioners[os.getpid()].discard(captioner)


async def _close_all() -> None:
    async with asyncio.timeout(LAST_CLOSE_S):
        await asyncio.gather(*map(_close_now, set(_open_captioners[os.getpid()])), return_exceptions=True)


@atexit.register
def _close_at_exit() -> None:
    """Leaves no process and no folder behind for who did not close."""
    if _open_captioners[os.getpid()]:
        run_in_background(_close_all())


# -- captioner --------------------------------------------------------------------------------------------------------


class _Stream(BlockingItems[ItemT]):
    """What the background loop reads, item by item."""

    def __init__(self, captioner: "Captioner", items: Items[ItemT]) -> None:
        super().__init__(captioner._run, items)  # which holds the captioner: it would be closed with its last reference

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class CaptionStream(_Stream[ItemT]):
    """A caption while it is made: an iterator, and a context manager that ends the caption when it is left.

    The caption begins with the first item that is asked for. Dropping the stream, as by `break`, or `close` ends it at
    the gateway. One thread at a time may read it, and any may close it.
    """

    def __init__(self, captioner: "Captioner", stream: AsyncCaptionStream[ItemT]) -> None:
        super().__init__(captioner, stream)
        self._stream = stream

    @property
    def text(self) -> str:
        """The text so far, also of a caption that failed."""
        return self._stream.text

    @property
    def caption(self) -> Caption:
        """The finished caption. Raises `InvalidRequest` before the stream's end."""
        return self._stream.caption


class DocumentStream(_Stream[ItemT]):
    """A document while it is read, or a film in segments: an iterator, and a context manager that ends the work when it
    is left, as `close` does, and dropping it. One thread at a time may read it, and any may close it."""


class Captioner:
    """Captions videos. Use it with `with`, or `close` it. Several threads may share one.

        with slipstream.Captioner(target="llava-hf/...", draft="llava-hf/...", device="cuda:0") as captioner:
            caption = captioner.caption("holiday.mp4", "What happens?", temperature=0.7, seed=7)
            print(caption.text)

    It runs a private stack, from here to `close`: target, draft and gateway as child processes. `connect` makes one for
    a gateway that runs already. It works in a notebook too, where an event loop runs.

    Args:
        target: folder or hub id of the big model. With neither `target` nor `draft` it is the pocket pair, which knows
            only clips of moving shapes.
        draft: the small model that writes ahead. None: no draft, unless there is no target either.
        device: torch device of both models, such as "cpu" or "cuda:0".
        draft_device: torch device of the draft, where it is another one.
        target_gpus: numbers of the GPUs that share the target, such as "0,1,2,3", in place of `device`.
        dtype: torch dtype of the weights; auto: bfloat16 on CUDA, float32 elsewhere.
        threads: torch threads of each model; None: the usable cores shared out.
        gateway: the address of a running gateway, instead of all this.

    Raises:
        InvalidConfig: options that do not go together, or that the stack cannot start with.
        ServiceUnavailable: a service that did not start.
    """

    def __init__(
        self,
        target: FilePath | None = None,
        draft: FilePath | None = None,
        *,
        device: str = "cpu",
        draft_device: str | None = None,
        target_gpus: str = "",
        dtype: str = "auto",
        threads: int | None = None,
        gateway: GatewayAddress | str | None = None,
    ) -> None:
        self._async = AsyncCaptioner(
            target,
            draft,
            device=device,
            draft_device=draft_device,
            target_gpus=target_gpus,
            dtype=dtype,
            threads=threads,
            gateway=gateway,
        )
        _open_captioners[os.getpid()].add(self._async)
        weakref.finalize(self, _close, self._async, os.getpid()).atexit = False
        run_in_background(self._async.connection())

    @with_keywords
    def caption(self, video: Video, call: CaptionCall) -> Caption:
        """The caption of a video: a path, bytes, an open binary file, or a `RemotePath` of the gateway's.

        Raises:
            InvalidRequest: an option that is out of range or unknown, or bytes that the gateway finds to be no video.
            VideoNotFound: there is no such file.
            UnreadableVideo: a file that is empty, or cannot be read here.
            LimitExceeded: more than this gateway serves.
            Overloaded: no room now; try again later.
            DeadlineExceeded: it took longer than this gateway serves one.
            ServiceUnavailable: the gateway is not there, was lost, or took longer than `timeout_s`.
        """
        return run_in_background(read_to_end(AsyncCaptionStream(self._async.start(video, call), any_event)))

    @with_keywords
    def stream(self, video: Video, call: CaptionCall) -> CaptionStream[CommittedText]:
        """The text of a video's caption as it comes, in pieces that are never taken back; `str(piece)` is the text.

            for piece in captioner.stream("holiday.mp4"):
                print(piece, end="")

        After its end, the stream's `caption` is the whole. Raises what `caption` raises.
        """
        return CaptionStream(self, AsyncCaptionStream(self._async.start(video, call), text_only))

    @with_keywords
    def events(self, video: Video, call: CaptionCall) -> CaptionStream[CaptionEvent]:
        """All that is said of a caption while it is made: `StageChange`, `CommittedText`, `Trace` and `KeptTokens`
        where those were asked for, and the `Caption` at the end. Raises what `caption` raises.
        """
        return CaptionStream(self, AsyncCaptionStream(self._async.start(video, call), any_event))

    @with_document_keywords
    def read_document(self, document: Video, call: DocumentCall) -> DocumentStream[PageReading]:
        """The pages of a document, each when the target has read it: a PDF, PNG, JPEG, WebP or TIFF as a path, bytes, a
        binary file, or a `RemotePath` (a path or an https address of the gateway's).

            for page in captioner.read_document("scan.pdf", pages="1-5"):
                print(page.text)

        What the OCR makes of a page (`page.draft`) saves time, and never changes its text. Raises what
        `AsyncCaptioner.read_document` raises; the pages before are whole.
        """
        return DocumentStream(self, page_readings(self._async.start_document(document, call)))

    @with_document_keywords
    def document_events(self, document: Video, call: DocumentCall) -> DocumentStream[DocumentEvent]:
        """All that is said of a document while it is read: `DocumentFacts` once; then for each page its `PagePicture`,
        `StageChange` and `CommittedText` as they come, its `Caption`, and its `PageDraft`. Raises what `read_document`
        raises."""
        return DocumentStream(self, self._async.start_document(document, call))

    @with_film_keywords
    def caption_segments(self, film: Video, call: FilmCall) -> DocumentStream[SegmentCaption]:
        """The segments of a film, each when it is captioned from its own frames, with its times by the container's
        clock: a path, bytes, an open binary file, or a `RemotePath` of the gateway's.

            for part in captioner.caption_segments("film.mkv", segments="fixed:10s"):
                print(part.segment.start_s, part.text)

        Of several `prompts`, `part.texts` has the answers; the second costs little more than its own words. With
        `summary=True` the last part, whose `segment.is_summary`, is a text about the whole film, made of the others'.
        A segment of which no frame can be decoded says so in `part.segment.error`, and the others go on. Raises what
        `caption` raises; the segments before are whole.
        """
        return DocumentStream(self, segment_captions(self._async.start_film(film, call), call.asked()))

    @property
    def archive(self) -> Archive:
        """The gateway's archive, which captions videos in the background: a gateway with a queue has one, as that of
        `slipstream up`; a private stack has none."""
        return Archive(self._run, self._async.archive)

    def info(self) -> GatewayInfo:
        """What the gateway serves, and its limits. Raises `ServiceUnavailable`."""
        return run_in_background(self._async.info())

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """For handles, which hold this captioner open by it."""
        return run_in_background(work)

    def close(self) -> None:
        """Ends what runs, and the private stack."""
        run_in_background(_close_now(self._async))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def connect(
    address: str,
    *,
    token: str = "",
    ca: FilePath | None = None,
    cert: FilePath | None = None,
    key: FilePath | None = None,
) -> Captioner:
    """A `Captioner` at a running gateway. It connects when it is first used.

    Args:
        address: `host:port`, or `unix:PATH`; several, separated by `,`, are gateways that stand in for each other.
        token: says who calls, where the gateway asks for that.
        ca: PEM file of the authority of the gateway's certificate: use TLS.
        cert: PEM file of the certificate to show, where the gateway asks for one.
        key: PEM file of that certificate's private key.

    Raises:
        InvalidConfig: a file that cannot be used, or a token that would travel in plaintext.
    """
    return Captioner(gateway=GatewayAddress(address, token, ca, cert, key))
