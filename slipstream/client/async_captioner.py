"""`AsyncCaptioner`: captions for programs with an event loop, from a private stack or from a running gateway."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

from slipstream.client.batch_handles import AsyncArchive
from slipstream.client.caption_client import (
    CAPTION_TIMEOUT_S,
    RESUME_WAIT_S,
    Video,
    caption_events,
    check_seconds,
    check_video,
    gateway_info,
)
from slipstream.client.connection import Connection, FilePath, GatewayAddress, check_process, check_words, close_with
from slipstream.client.document_client import DocumentCall, check_document, document_events, with_document_keywords
from slipstream.client.film_client import FilmCall, film_events, segment_captions, with_film_keywords
from slipstream.config import check_unicode
from slipstream.documents.reading import DocumentEvent, DocumentOptions, PageReading, page_readings
from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.messages import Caption, CaptionEvent, CommittedText, FilmEvent, SegmentCaption
from slipstream.options import CallOptions, CaptionOptions, keywords_of
from slipstream.service_info import GatewayInfo
from slipstream.stack.local import POCKET_DIR, PRIVATE_GRACE_S, Stack, StackOptions

_LOGGER = logging.getLogger("slipstream.client")

# -- keywords ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaptionCall(CallOptions):
    """What a caller says of one caption: the options of the table, and how to ask for them."""

    request_id: str = field(default="", kw_only=True)
    timeout_s: float = field(default=CAPTION_TIMEOUT_S, kw_only=True)
    resume_wait_s: float = field(default=RESUME_WAIT_S, kw_only=True)


with_keywords = keywords_of(
    CaptionCall,
    {
        "request_id": "names the caption in every log and in the result; made by the gateway when empty.",
        "timeout_s": "seconds that the caption may take in all.",
        "resume_wait_s": "how long to wait for a gateway that was lost, to go on with the caption there; 0: it ends.",
    },
)


def _limit(call: CaptionCall | DocumentCall | FilmCall) -> float:
    """Seconds; of one without a limit very many. Raises `InvalidRequest`, also for a name that is none."""
    limit_s = check_seconds("timeout_s", call.timeout_s)
    if not isinstance(call.request_id, str | None):
        raise InvalidRequest(f"request_id must be text, not {call.request_id!r}")
    check_unicode("request_id", call.request_id)
    return limit_s


# -- streams ----------------------------------------------------------------------------------------------------------

ItemT = TypeVar("ItemT")


class AsyncCaptionStream(Generic[ItemT]):
    """A caption while it is made: an async iterator, and a context manager that ends the caption when it is left.

    The caption begins with the first item that is asked for. Dropping the stream, or `aclose`, ends it at the gateway.
    """

    def __init__(
        self, events: AsyncGenerator[CaptionEvent, None], pick: Callable[[CaptionEvent], ItemT | None]
    ) -> None:
        self._events = events  # knows nothing of this object: the last reference to the stream ends the generator too
        self._pick = pick
        self._pieces: list[str] = []
        self._caption: Caption | None = None

    @property
    def text(self) -> str:
        """The text so far, also of a caption that failed."""
        return "".join(self._pieces)

    @property
    def caption(self) -> Caption:
        """The finished caption. Raises `InvalidRequest` before the stream's end."""
        if self._caption is None:
            raise InvalidRequest("the caption is not finished: read its stream to the end first")
        return self._caption

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        while True:
            event = await anext(self._events)
            if isinstance(event, CommittedText):
                self._pieces.append(str(event))
            elif isinstance(event, Caption):
                self._caption = event
            item = self._pick(event)
            if item is not None:
                return item

    async def aclose(self) -> None:
        """Ends the caption, if it runs."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


async def read_to_end(stream: AsyncCaptionStream[CaptionEvent]) -> Caption:
    """The caption, once it is finished."""
    async with stream:
        async for _ in stream:
            pass
    return stream.caption


def text_only(event: CaptionEvent) -> CommittedText | None:
    """The event, if it is text."""
    return event if isinstance(event, CommittedText) else None


def any_event(event: CaptionEvent) -> CaptionEvent:
    """The event."""
    return event


# -- captioner --------------------------------------------------------------------------------------------------------


class AsyncCaptioner:
    """Captions videos, several at once if asked so. Use it with `async with`, or `close` it.

        async with slipstream.AsyncCaptioner() as captioner:
            captions = await asyncio.gather(*(captioner.caption(path) for path in paths))

    It runs a private stack: target, draft and gateway as child processes, from `async with`, or the first caption, to
    `close` or its last reference. `connect_async` makes one for a gateway that runs already. One is of one event loop.

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
        InvalidConfig: options that do not go together; when the stack starts also what it cannot start with.
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
        if gateway is not None and (target is not None or draft is not None):
            raise InvalidConfig("a gateway that runs has its own target and draft: give either it or them")
        if target is None:
            target, draft = POCKET_DIR / "target", draft or POCKET_DIR / "draft"
        check_words(device=device, draft_device=draft_device or "", target_gpus=target_gpus, dtype=dtype)
        self._gateway = gateway if isinstance(gateway, GatewayAddress | None) else GatewayAddress(gateway)
        self._stack_options = StackOptions(
            target_model=os.fspath(target),
            draft_model=None if draft is None else os.fspath(draft),
            device=device,
            draft_device=draft_device,
            target_gpus=target_gpus,
            dtype=dtype,
            threads=threads,
            stop_grace_s=PRIVATE_GRACE_S,
        )
        self._opening = asyncio.Lock()
        self._exits = AsyncExitStack()
        self._connection: Connection | None = None
        self._is_closed = False

    @with_keywords
    async def caption(self, video: Video, call: CaptionCall) -> Caption:
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
        return await read_to_end(AsyncCaptionStream(self.start(video, call), any_event))

    @with_keywords
    def stream(self, video: Video, call: CaptionCall) -> AsyncCaptionStream[CommittedText]:
        """The text of a video's caption as it comes, in pieces that are never taken back; `str(piece)` is the text.

            async for piece in captioner.stream("holiday.mp4"):
                print(piece, end="")

        After its end, the stream's `caption` is the whole. Raises what `caption` raises.
        """
        return AsyncCaptionStream(self.start(video, call), text_only)

    @with_keywords
    def events(self, video: Video, call: CaptionCall) -> AsyncCaptionStream[CaptionEvent]:
        """All that is said of a caption while it is made: `StageChange`, `CommittedText`, `Trace` and `KeptTokens`
        where those were asked for, and the `Caption` at the end. Raises what `caption` raises.
        """
        return AsyncCaptionStream(self.start(video, call), any_event)

    @with_document_keywords
    def read_document(self, document: Video, call: DocumentCall) -> AsyncGenerator[PageReading, None]:
        """The pages of a document, each when the target has read it: a PDF, PNG, JPEG, WebP or TIFF as a path, bytes, a
        binary file, or a `RemotePath` (a path or an https address of the gateway's).

            async for page in captioner.read_document("scan.pdf", pages="1-5"):
                print(page.text)

        What the OCR makes of a page (`page.draft`) saves time, and never changes its text. Leaving it, by `aclose`,
        ends the work at the gateway.

        Raises:
            InvalidConfig: this gateway reads no documents.
            InvalidRequest: an option or pages that there are not, or bytes that are no document that can be read.
            VideoNotFound, UnreadableVideo: there is no such file, or it cannot be read here.
            LimitExceeded: more than this gateway or its reader serves.
            Overloaded: no room now; try again later.
            DeadlineExceeded: a page took longer than this gateway serves one. The pages before are whole.
            ServiceUnavailable: the gateway, its target or its reader is not there or was lost, or it took longer than
                `timeout_s`. The pages before are whole.
        """
        return page_readings(self.start_document(document, call))

    @with_document_keywords
    def document_events(self, document: Video, call: DocumentCall) -> AsyncGenerator[DocumentEvent, None]:
        """All that is said of a document while it is read: `DocumentFacts` once; then for each page its `PagePicture`,
        `StageChange` and `CommittedText` as they come, its `Caption`, and its `PageDraft`. Raises what `read_document`
        raises."""
        return self.start_document(document, call)

    @with_film_keywords
    def caption_segments(self, film: Video, call: FilmCall) -> AsyncGenerator[SegmentCaption, None]:
        """The segments of a film, each when it is captioned from its own frames, with its times by the container's
        clock: a path, bytes, an open binary file, or a `RemotePath` of the gateway's.

            async for part in captioner.caption_segments("film.mkv", segments="fixed:10s"):
                print(part.segment.start_s, part.text)

        Of several `prompts`, `part.texts` has the answers; the second costs little more than its own words. With
        `summary=True` the last part, whose `segment.is_summary`, is a text about the whole film, made of the others'.
        A segment of which no frame can be decoded says so in `part.segment.error`, and the others go on. Leaving it, by
        `aclose`, ends the work at the gateway. Raises what `caption` raises; the segments before are whole.
        """
        return segment_captions(self.start_film(film, call), call.asked())

    @with_film_keywords
    def film_events(self, film: Video, call: FilmCall) -> AsyncGenerator[FilmEvent, None]:
        """All that is said of a film while its segments are captioned: `FilmFacts` once; then for each its `Segment`,
        `StageChange` and `CommittedText` as they come, and its `Caption`. Raises what `caption` raises."""
        return self.start_film(film, call)

    @property
    def archive(self) -> AsyncArchive:
        """The gateway's archive, which captions videos in the background: a gateway with a queue has one, as that of
        `slipstream up`; a private stack has none."""
        return AsyncArchive(self.connection)

    async def info(self) -> GatewayInfo:
        """What the gateway serves, and its limits. Raises `ServiceUnavailable`."""
        return await gateway_info(await self.connection())

    async def connection(self) -> Connection:
        """To the gateway; starts the stack if need be. Raises `InvalidRequest`: closed, in another loop, in a fork."""
        async with self._opening:
            if self._is_closed:
                raise InvalidRequest("this captioner is closed")
            if self._connection is None:
                check_process()
                self._connection = await self._open()
            self._connection.check_loop()
            return self._connection

    async def _open(self) -> Connection:
        address = self._gateway
        close_with(self, self._exits)
        if address is None:
            stack = await self._exits.enter_async_context(Stack(self._stack_options, report=_LOGGER.warning))
            address = GatewayAddress(stack.gateway_address)
        return await self._exits.enter_async_context(address.open())

    def start(self, video: Video, call: CaptionCall) -> AsyncGenerator[CaptionEvent, None]:
        """The caption's events, for the other methods and the synchronous twin. What is wrong with the video or the
        options is raised at once; the gateway is asked with the first event."""
        check_video(video)
        check_seconds("resume_wait_s", call.resume_wait_s)
        return self._read_events(video, call, call.asked(), _limit(call))

    async def _read_events(
        self, video: Video, call: CaptionCall, options: CaptionOptions, limit_s: float
    ) -> AsyncGenerator[CaptionEvent, None]:
        events = caption_events(
            await self.connection(),
            video,
            options,
            request_id=call.request_id,
            timeout_s=limit_s,
            resume_wait_s=call.resume_wait_s,
        )
        async with aclosing(events):
            async for event in events:
                yield event

    def start_document(self, document: Video, call: DocumentCall) -> AsyncGenerator[DocumentEvent, None]:
        """The document's events, as `start` gives a caption's."""
        check_document(document)
        return self._read_document(document, call, call.document(), _limit(call))

    async def _read_document(
        self, document: Video, call: DocumentCall, asked: DocumentOptions, limit_s: float
    ) -> AsyncGenerator[DocumentEvent, None]:
        connection = await self.connection()
        events = document_events(connection, document, asked, request_id=call.request_id, timeout_s=limit_s)
        async with aclosing(events):
            async for event in events:
                yield event

    def start_film(self, film: Video, call: FilmCall) -> AsyncGenerator[FilmEvent, None]:
        """The film's events, as `start` gives a caption's."""
        check_video(film)
        return self._caption_film(film, call, call.film(), _limit(call))

    async def _caption_film(
        self, film: Video, call: FilmCall, options: CaptionOptions, limit_s: float
    ) -> AsyncGenerator[FilmEvent, None]:
        connection = await self.connection()
        events = film_events(connection, film, options, request_id=call.request_id, timeout_s=limit_s)
        async with aclosing(events):
            async for event in events:
                yield event

    async def close(self) -> None:
        """Ends what runs, and the private stack."""
        async with self._opening:
            self._is_closed = True
            await self._exits.aclose()

    async def __aenter__(self) -> Self:
        await self.connection()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def connect_async(
    address: str,
    *,
    token: str = "",
    ca: FilePath | None = None,
    cert: FilePath | None = None,
    key: FilePath | None = None,
) -> AsyncCaptioner:
    """An `AsyncCaptioner` at a running gateway. It connects when it is first used.

    Args:
        address: `host:port`, or `unix:PATH`; several, separated by `,`, are gateways that stand in for each other.
        token: says who calls, where the gateway asks for that.
        ca: PEM file of the authority of the gateway's certificate: use TLS.
        cert: PEM file of the certificate to show, where the gateway asks for one.
        key: PEM file of that certificate's private key.

    A file that cannot be used, or a token that would travel in plaintext, is an `InvalidConfig` at the first use.
    """
    return AsyncCaptioner(gateway=GatewayAddress(address, token, ca, cert, key))
