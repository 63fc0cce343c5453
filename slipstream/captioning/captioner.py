"""Captions for both of the gateway's doors, the interactive call and the archive. Knows no gRPC server and no queue."""

import asyncio
import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from slipstream.captioning.caption import Caption
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.media import Media
from slipstream.captioning.options import CaptionOptions
from slipstream.captioning.peers import Peers
from slipstream.captioning.stats import Ledger
from slipstream.errors import LimitExceeded, ModelNotUsable, Overloaded, SlipstreamError
from slipstream.logs import get_logger
from slipstream.metrics import GatewayMetrics
from slipstream.rpc.v1 import common_pb2, gateway_pb2
from slipstream.speculation.pacing import CostModel, DecayedMean
from slipstream.video.decode import SampledVideo

FIND_DRAFT_S = 0.5
"""A draft that is frozen delays a caption by no more."""
Emit = Callable[[gateway_pb2.CaptionEvent], None]


class Captioner:
    """Makes captions in steps: check, sample, caption. What passes cost is remembered from one caption to the next."""

    def __init__(
        self, config: GatewayConfig, peers: Peers, media: Media, metrics: GatewayMetrics | None = None
    ) -> None:
        self.peers = peers
        self.media = media
        self.metrics = metrics or GatewayMetrics()
        self._config = config
        self._num_captions = 0
        self._costs: dict[tuple[object, ...], CostModel] = {}
        self._plain_token_s: dict[object, DecayedMean] = {}
        """By size: plain decoding is the same whatever the draft, and captions without one measure it too."""

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """A place for one interactive caption. The archive has slots of its own, so it never takes one of these.
        Raises `Overloaded`."""
        if self._num_captions >= self._config.max_captions:
            raise Overloaded(
                f"{self._num_captions} captions are in work, as many as this gateway takes; try again later"
            )
        self._num_captions += 1
        try:
            yield
        finally:
            self._num_captions -= 1

    async def check(self, options: CaptionOptions, *, wait_for_ready: bool = False) -> common_pb2.ModelInfo:
        """What the target serves now. Raises `ServiceUnavailable` without a target, `ModelNotUsable` for a draft that
        does not fit it, and `LimitExceeded`."""
        target = await self.peers.target.ask(wait_for_ready=wait_for_ready)
        if options.speculative:
            await self._check_draft()
        if options.num_frames > target.max_frames:
            raise LimitExceeded(
                f"num_frames {options.num_frames} is more than the target's limit of {target.max_frames}"
            )
        return target

    async def sample(
        self, options: CaptionOptions, source: BinaryIO, emit: Emit, ledger: Ledger, *, digest: bool = False
    ) -> SampledVideo:
        """The frames of an open file, with the file's digest if asked for. Needs no model."""
        with self.metrics.decoding(os.fstat(source.fileno()).st_size):
            video = await self.media.sample(
                source, options.num_frames, lambda done, total: emit(stage_event("decode", done, total)), digest=digest
            )
        ledger.sampled = asyncio.get_running_loop().time()
        return video

    async def caption(
        self, options: CaptionOptions, video: SampledVideo, emit: Emit, ledger: Ledger
    ) -> gateway_pb2.Summary:
        """Captions sampled frames; needs a `check` shortly before. Cancelled, it stops both models."""
        target = self.peers.target.model
        assert target is not None, "the target has been asked"
        key = _costs_key(options, len(video.frames) * target.tokens_per_frame)
        costs = self._costs.get(key, CostModel()).fork()
        costs.plain_token_s = copy.copy(self._plain_token_s.get(key[0], costs.plain_token_s))
        caption = Caption(
            options,
            video,
            self.peers,
            costs,
            ledger,
            emit,
            draft_silence_s=self._config.draft_timeout_s,
            timeout_s=self._config.request_timeout_s,
        )
        summary = await caption.run()
        self._costs[key], self._plain_token_s[key[0]] = costs, costs.plain_token_s
        self.metrics.captioned(summary)
        if self._config.log_text:
            get_logger().debug("caption.text", prompt=options.prompt, text=summary.text)
        get_logger().info(
            "caption.finished",
            num_tokens=summary.num_tokens,
            num_frames=summary.video.num_frames,
            total_s=round(summary.timings.total_s, 3),
            tau=round(summary.speculation.tau, 3),
            drafts_lost=summary.speculation.drafts_lost,
        )
        return summary

    async def _check_draft(self) -> None:
        """Refuses a pair that does not fit. One that cannot be reached is no reason to refuse: it may come later."""
        try:
            await self.peers.find_draft(FIND_DRAFT_S)
        except ModelNotUsable:
            raise
        except SlipstreamError as error:
            get_logger().warning("draft.missing", reason=str(error))


def stage_event(name: str, done: int = 0, total: int = 0) -> gateway_pb2.CaptionEvent:
    """A step of the work began or moved on."""
    return gateway_pb2.CaptionEvent(stage=gateway_pb2.StageChange(stage=name, done=done, total=total))


def _costs_key(options: CaptionOptions, num_video_tokens: int) -> tuple[object, ...]:
    """Captions of one kind share their running averages: similar length, similar draft context."""
    size, alpha = round(math.log2(num_video_tokens)), round(options.alpha, 1)
    return (size, options.method, options.pruner, alpha, options.positions)
