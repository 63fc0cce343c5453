"""The gateway's gRPC face: a request in, a stream of events out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

import grpc
import structlog
from google.protobuf.message import Message

from slipstream import __version__
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.film_captioner import FilmCaptioner
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.documents.surfaces import surface_of
from slipstream.errors import InvalidRequest
from slipstream.messages import CaptionEvent
from slipstream.rpc.codec import caption_event, gateway_info_message, read_options
from slipstream.rpc.document_codec import document_event_messages, read_document_options
from slipstream.rpc.film_codec import film_event
from slipstream.rpc.message_limits import chunks_of, first_of, of_one_message
from slipstream.rpc.pools import peer_infos
from slipstream.rpc.security import current_owner
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.service_info import ArchiveInfo, GatewayInfo

Events = asyncio.Queue[CaptionEvent | None]
EventT = TypeVar("EventT")
VIDEO_RULE = "after `options` a caption takes `video` chunks only"
DOCUMENT_RULE = "after `options` a document takes `document` chunks only"
PATH_RULE = "`options` name a path, and more followed them: the file is either at its path or sent in chunks"


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Implements `proto/slipstream/rpc/v1/gateway.proto`."""

    def __init__(
        self,
        config: GatewayConfig,
        captioner: GatewayCaptioner,
        documents: DocumentCaptioner,
        films: FilmCaptioner,
        archive_info: Callable[[], ArchiveInfo | None] = lambda: None,
    ) -> None:
        self._config = config
        self._captioner = captioner
        self._documents = documents
        self._films = films
        self._archive_info = archive_info

    def register(self, server: grpc.aio.Server) -> None:
        """Serves from now on."""
        gateway_pb2_grpc.add_GatewayServicer_to_server(self, server)

    async def GetGateway(
        self, request: gateway_pb2.GetGatewayRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.GatewayInfo:
        config, peers = self._config, self._captioner.peers
        target, draft = peers.target.model, peers.draft.model if peers.draft else None
        info = GatewayInfo(
            version=__version__,
            target_model=target.model_id if target else "",
            draft_model=draft.model_id if draft else "",
            tokens_per_frame=target.tokens_per_frame if target else 0,
            max_frames=min(config.max_frames, target.max_frames if target else config.max_frames),
            max_new_tokens=config.max_new_tokens,
            max_window=config.max_window,
            max_video_bytes=config.max_video_bytes,
            default_prompt=config.default_prompt,
            accepts_paths=bool(config.roots),
            reads_documents=bool(config.reader),
            placements=self._captioner.placements(),
            gates_open=self._captioner.num_gates[0],
            gates_closed=self._captioner.num_gates[1],
            archive=self._archive_info(),
            peers=peer_infos((peers.target, peers.draft)),
            target_revision=target.revision if target else "",
            target_dtype=target.dtype if target else "",
            draft_revision=draft.revision if draft else "",
            draft_dtype=draft.dtype if draft else "",
            surface=surface_of("", target.surface if target else ""),
        )
        return gateway_info_message(info)

    async def Caption(
        self, requests: AsyncIterator[gateway_pb2.CaptionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.CaptionEvent]:
        first = await first_of(requests, "options", "a caption")
        options, asked = first.options, read_options(first.options)
        plan = make_plan(
            asked,
            self._config,
            path=options.path,
            request_id=options.request_id,
            owner=current_owner(),
            delivered=first.resume_after,
        )
        if plan.options.in_segments:
            raise InvalidRequest("segments must be left out of one caption: CaptionSegments has those of segments")
        if plan.is_sparing:
            name = "skip_marked" if plan.options.get("duplicates", "off") == "off" else "duplicates"
            raise InvalidRequest(f"{name} is for segments and the archive: leave it out")
        structlog.contextvars.bind_contextvars(request_id=plan.request_id)
        with self._captioner.asked(plan):
            upload = chunks_of(requests, "video", VIDEO_RULE)
            async with aclosing(_checked(self._events(plan, upload), requests, plan)) as events:
                async for event in events:
                    yield caption_event(event)

    async def CaptionSegments(
        self, requests: AsyncIterator[gateway_pb2.CaptionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.FilmEvent]:
        first = await first_of(requests, "options", "a film")
        if first.resume_after:
            raise InvalidRequest("a film in segments is not resumed by tokens; leave resume_after out")
        options, asked = first.options, read_options(first.options)
        plan = make_plan(asked, self._config, path=options.path, request_id=options.request_id, owner=current_owner())
        structlog.contextvars.bind_contextvars(request_id=plan.request_id)
        upload = chunks_of(requests, "video", VIDEO_RULE)
        async with aclosing(_checked(self._films.caption_interactively(plan, upload), requests, plan)) as events:
            async for event in events:
                yield film_event(event)

    async def ReadDocument(
        self, requests: AsyncIterator[gateway_pb2.ReadDocumentRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.ReadDocumentEvent]:
        first = await first_of(requests, "options", "a document")
        options, asked = first.options, read_document_options(first.options)
        plan = self._documents.plan(asked, path=options.path, request_id=options.request_id, owner=current_owner())
        structlog.contextvars.bind_contextvars(request_id=plan.request_id)
        upload = chunks_of(requests, "document", DOCUMENT_RULE)
        events = _checked(self._documents.read_interactively(asked, plan, upload), requests, plan)
        async with aclosing(events):
            async for event in events:
                for message in document_event_messages(event):
                    yield message

    async def _events(self, plan: CaptionPlan, upload: AsyncIterator[bytes]) -> AsyncGenerator[CaptionEvent, None]:
        events: Events = asyncio.Queue()
        working = asyncio.create_task(self._caption(plan, upload, events))
        working.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await working
        finally:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await working

    async def _caption(self, plan: CaptionPlan, upload: AsyncIterator[bytes], events: Events) -> None:
        events.put_nowait(await self._captioner.caption_interactively(plan, upload, events.put_nowait))


def _checked(
    events: AsyncGenerator[EventT, None], requests: AsyncIterator[Message], plan: CaptionPlan
) -> AsyncGenerator[EventT, None]:
    """What is told of a file that is uploaded, or of one at a path, behind which nothing may come."""
    return of_one_message(events, requests, PATH_RULE) if plan.path else events
