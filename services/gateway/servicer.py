"""The gateway's gRPC face: receive, decode, caption; one stream of events out."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine

import grpc
import structlog

from slipstream import __version__
from slipstream.captioning.captioner import Captioner, stage_event
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.options import CaptionOptions, resolve_options
from slipstream.captioning.stats import Ledger
from slipstream.errors import ProtocolViolation, ServiceUnavailable
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc

Events = asyncio.Queue[gateway_pb2.CaptionEvent | None]


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Implements `proto/slipstream/rpc/v1/gateway.proto`."""

    def __init__(self, config: GatewayConfig, captioner: Captioner) -> None:
        self._config = config
        self._captioner = captioner

    async def GetGateway(
        self, request: gateway_pb2.GetGatewayRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.GatewayInfo:
        config, peers = self._config, self._captioner.peers
        target, draft = peers.target.model, peers.draft
        return gateway_pb2.GatewayInfo(
            version=__version__,
            target_model=target.model_id if target else "",
            draft_model=draft.model.model_id if draft and draft.model else "",
            tokens_per_frame=target.tokens_per_frame if target else 0,
            max_frames=min(config.max_frames, target.max_frames if target else config.max_frames),
            max_new_tokens=config.max_new_tokens,
            max_window=config.max_window,
            max_video_bytes=config.max_video_bytes,
            default_prompt=config.default_prompt,
            accepts_paths=bool(config.roots),
        )

    async def Caption(
        self, requests: AsyncIterator[gateway_pb2.CaptionRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[gateway_pb2.CaptionEvent]:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "options":
            raise ProtocolViolation("a caption begins with `options`")
        options = resolve_options(first.options, self._config)
        structlog.contextvars.bind_contextvars(request_id=options.request_id)
        with self._captioner.metrics.captioning(options.method), self._captioner.admitted():
            events: Events = asyncio.Queue()
            working = asyncio.create_task(self._bounded(self._caption(options, aiter(requests), events)))
            working.add_done_callback(lambda _: events.put_nowait(None))
            try:
                while (event := await events.get()) is not None:
                    yield event
                await working
            finally:
                working.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await working

    async def _bounded(self, work: Coroutine[None, None, None]) -> None:
        """Ends a caption that takes too long, also one whose upload never ends."""
        try:
            async with asyncio.timeout(self._config.request_timeout_s):
                await work
        except TimeoutError:
            raise ServiceUnavailable(
                f"the caption was not done within this server's limit of {self._config.request_timeout_s:g} s"
            ) from None

    async def _caption(
        self, options: CaptionOptions, requests: AsyncIterator[gateway_pb2.CaptionRequest], events: Events
    ) -> None:
        captioner, emit = self._captioner, events.put_nowait
        ledger = Ledger(arrived=asyncio.get_running_loop().time())
        emit(stage_event("receive"))
        await captioner.check(options, wait_for_ready=True)
        async with captioner.media.open(options.path, requests) as source:
            video = await captioner.sample(options, source, emit, ledger)
        summary = await captioner.caption(options, video, emit, ledger)
        emit(gateway_pb2.CaptionEvent(summary=summary))
