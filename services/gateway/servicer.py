"""The gateway's gRPC face: receive, decode, caption; one stream of events out."""

import asyncio
import contextlib
import copy
import math
from collections.abc import AsyncIterator, Coroutine

import grpc
import structlog

from services.gateway.caption import Caption
from services.gateway.config import GatewayConfig
from services.gateway.ledger import Ledger
from services.gateway.media import Media
from services.gateway.options import CaptionOptions, resolve_options
from services.gateway.peers import Peers
from slipstream import __version__
from slipstream.errors import (
    LimitExceeded,
    ModelNotUsable,
    Overloaded,
    ProtocolViolation,
    ServiceUnavailable,
    SlipstreamError,
)
from slipstream.logs import get_logger
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.speculation.costs import CostModel, DecayedMean

FIND_DRAFT_S = 0.5
"""A draft that is frozen delays a caption by no more."""
Events = asyncio.Queue[gateway_pb2.CaptionEvent | None]


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Implements `proto/slipstream/rpc/v1/gateway.proto`."""

    def __init__(self, config: GatewayConfig, peers: Peers) -> None:
        self._config = config
        self._peers = peers
        self._media = Media(config)
        self._num_captions = 0
        self._costs: dict[tuple[object, ...], CostModel] = {}
        self._plain_token_s: dict[object, DecayedMean] = {}
        """By size: plain decoding is the same whatever the draft, and captions without one measure it too."""

    async def GetGateway(
        self, request: gateway_pb2.GetGatewayRequest, context: grpc.aio.ServicerContext
    ) -> gateway_pb2.GatewayInfo:
        config, target, draft = self._config, self._peers.target.model, self._peers.draft
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
        if self._num_captions >= self._config.max_captions:
            raise Overloaded(
                f"{self._num_captions} captions are in work, as many as this gateway takes; try again later"
            )
        self._num_captions += 1
        events: Events = asyncio.Queue()
        working = asyncio.create_task(self._bounded(self._caption(options, aiter(requests), events)))
        working.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await working
        finally:
            self._num_captions -= 1
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await working

    async def close(self) -> None:
        """Ends the decoder threads."""
        self._media.close()

    async def _check_draft(self) -> None:
        """Refuses a pair that does not fit. One that cannot be reached is no reason to refuse: it may come later."""
        try:
            await self._peers.find_draft(FIND_DRAFT_S)
        except ModelNotUsable:
            raise
        except SlipstreamError as error:
            get_logger().warning("draft.missing", reason=str(error))

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
        loop, config = asyncio.get_running_loop(), self._config
        ledger = Ledger(arrived=loop.time())

        def stage(name: str, done: int = 0, total: int = 0) -> None:
            change = gateway_pb2.StageChange(stage=name, done=done, total=total)
            events.put_nowait(gateway_pb2.CaptionEvent(stage=change))

        stage("receive")
        target = await self._peers.target.ask(wait_for_ready=True)
        if options.speculative:
            await self._check_draft()
        if options.num_frames > target.max_frames:
            raise LimitExceeded(
                f"num_frames {options.num_frames} is more than the target's limit of {target.max_frames}"
            )
        async with self._media.open(options.path, requests) as source:
            video = await self._media.sample(
                source, options.num_frames, lambda done, total: stage("decode", done, total)
            )
        ledger.sampled = loop.time()
        key = _costs_key(options, len(video.frames) * target.tokens_per_frame)
        costs = self._costs.get(key, CostModel()).fork()
        costs.plain_token_s = copy.copy(self._plain_token_s.get(key[0], costs.plain_token_s))
        caption = Caption(
            options,
            video,
            self._peers,
            costs,
            ledger,
            events.put_nowait,
            draft_silence_s=config.draft_timeout_s,
            timeout_s=config.request_timeout_s,
        )
        summary = await caption.run()
        self._costs[key], self._plain_token_s[key[0]] = costs, costs.plain_token_s
        events.put_nowait(gateway_pb2.CaptionEvent(summary=summary))
        get_logger().info(
            "caption.finished",
            num_tokens=summary.num_tokens,
            num_frames=summary.video.num_frames,
            total_s=round(summary.timings.total_s, 3),
            tau=round(summary.speculation.tau, 3),
            drafts_lost=summary.speculation.drafts_lost,
        )


def _costs_key(options: CaptionOptions, num_video_tokens: int) -> tuple[object, ...]:
    """Captions of one kind share their running averages: similar length, similar draft context."""
    size, alpha = round(math.log2(num_video_tokens)), round(options.alpha, 1)
    return (size, options.method, options.pruner, alpha, options.positions)
