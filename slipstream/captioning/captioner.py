"""Captions for both of the gateway's doors, the interactive call and the archive: plan, check, sample, caption."""

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from slipstream.captioning.caption_run import CaptionRun, Emit
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.late_hints import LateHints
from slipstream.captioning.media import Media
from slipstream.captioning.plan import CaptionPlan, new_costs
from slipstream.captioning.stats import CaptionStats
from slipstream.errors import LimitExceeded, SlipstreamError, with_notes
from slipstream.frame_size import ANY_SIZE
from slipstream.logs import get_logger
from slipstream.messages import Caption, StageChange
from slipstream.metrics import GatewayMetrics
from slipstream.options import CaptionOptions
from slipstream.rpc.callers import Places
from slipstream.rpc.peers import Peers
from slipstream.rpc.security import current_rights
from slipstream.service_info import ModelInfo, Placement, check_honours
from slipstream.speculation.caption_book import CaptionBook, Kind, Opening
from slipstream.speculation.placement import placements
from slipstream.time_limits import within_limit
from slipstream.video.files import VideoFile
from slipstream.video.messages import SampledVideo

FIND_DRAFT_S = 0.5
"""A draft that is frozen delays a job of the archive by no more."""
_PROSE = re.compile("[A-Za-z ]+")
LETTERS_PER_TOKEN = 3
"""Of prose in ASCII, for which tokenizers need one for four to five."""


class GatewayCaptioner:
    """Makes captions. What passes cost is remembered from one caption to the next."""

    def __init__(
        self, config: GatewayConfig, peers: Peers, media: Media, metrics: GatewayMetrics | None = None
    ) -> None:
        self.peers = peers
        self.media = media
        self.metrics = metrics or GatewayMetrics()
        self._config = config
        self.places = Places(
            "captions",
            config.max_captions,
            config.owner_share,
            are="are in work",
            own_limit=lambda: current_rights().max_captions,
        )
        self._book = CaptionBook()
        self._num_running = 0
        self.metrics.watch_gate(self._book)

    def placements(self) -> tuple[Placement, ...]:
        """How many targets the draft should have, as the latest captions foresee it; none before there were any."""
        measured = self._book.newest
        return placements(measured, self._config.max_window) if measured is not None else ()

    @property
    def num_gates(self) -> tuple[int, int]:
        """Kinds of captions whose gate is open, and closed."""
        return self._book.num_kinds - self._book.num_resting, self._book.num_resting

    @contextlib.contextmanager
    def asked(self, plan: CaptionPlan) -> Iterator[None]:
        """Surrounds all that is done for a caller's caption, and counts it.

        Raises `Overloaded` before any work is begun where no place is free as far as can be known now, so that not a
        byte is uploaded in vain.
        """
        with self.metrics.captioning(plan.method.name):
            self.places.check()
            yield

    async def caption_interactively(self, plan: CaptionPlan, upload: AsyncIterator[bytes], emit: Emit) -> Caption:
        """All that is done for a caption that was `asked`: receive, sample, caption. `upload` is read where the plan
        names no path.

        Raises:
            Overloaded: too many captions are in work.
            ServiceUnavailable: no target.
            DeadlineExceeded: the caption took longer than this server allows.
            SlipstreamError: whatever is wrong with the video, the request or the models.
        """
        async with within_limit(self._config.request_timeout_s, "the caption was not done"):
            return await self._caption_source(plan, upload, emit)

    async def check(self, plan: CaptionPlan, *, wait_for_ready: bool = False) -> ModelInfo:
        """What the target serves now. Raises `ServiceUnavailable` without a target, `VersionMismatch` for one of a
        release too far away, and `LimitExceeded`. The draft is not waited for: what is wrong with it costs speed only.
        """
        target = await self.peers.target.ask(wait_for_ready=wait_for_ready)
        num_frames = plan.options.num_frames
        if num_frames > target.max_frames and "num_frames" in plan.asked:
            raise LimitExceeded(f"num_frames {num_frames} is more than the target's limit of {target.max_frames}")
        check_honours(target, plan.sampling, thinking=plan.options.thinking, logprobs=plan.options.logprobs)
        return target

    def settled(self, plan: CaptionPlan, target: ModelInfo) -> CaptionPlan:
        """The plan for this target: it has no more frames than fit its context where the request does not say how many,
        and the target's own sampling where this gateway is told to. Raises `InvalidRequest`."""
        plan = _fitting(plan, target)
        return plan.with_defaults(target.sampling_defaults) if self._config.generation_config == "model" else plan

    async def look_for_draft(self, plan: CaptionPlan) -> None:
        """Asks which draft there is now, for those who note it down."""
        if not plan.speculative:
            return
        try:
            await self.peers.find_draft(FIND_DRAFT_S)
        except SlipstreamError as error:
            get_logger().warning("draft.missing", reason=with_notes(error))

    async def sample(
        self, plan: CaptionPlan, source: VideoFile, emit: Emit, stats: CaptionStats, *, digest: bool = False
    ) -> SampledVideo:
        """The frames of an open file as the target wants them, with the file's digest if asked for. Asks no model.

        Close them when the caption has ended: they count in this gateway's budget.
        """
        target = self.peers.target.model
        with self.metrics.decoding(source.num_bytes):
            video = await self.media.sample(
                source,
                plan.options.num_frames,
                lambda done, total: emit(StageChange("decode", done, total)),
                fps=plan.options.get("fps", 0.0),
                size=target.frame_size if target is not None else ANY_SIZE,
                owner=plan.owner,
                in_background=plan.in_background,
                on_queued=lambda num_ahead: emit(StageChange("queued", 0, num_ahead)),
                digest=digest,
            )
        stats.sampled = asyncio.get_running_loop().time()
        return video

    async def caption(
        self,
        plan: CaptionPlan,
        video: SampledVideo,
        emit: Emit,
        stats: CaptionStats,
        *,
        resume_wait_s: float = 0.0,
        late_hints: LateHints | None = None,
    ) -> Caption:
        """Captions sampled frames; needs a `check` shortly before. Cancelled, it stops both models.

        `resume_wait_s`: how long to wait for a target when one is lost in the middle; 0: that ends the caption.
        `late_hints`: what else the target drafts from, once it is there.
        """
        target = self.peers.target.model
        assert target is not None, "the target has been asked"
        with self._opened(plan, target, len(video.frames) * target.tokens_per_frame) as opening:
            run = CaptionRun(
                plan,
                video,
                self.peers,
                opening,
                stats,
                self.metrics.timing(emit),
                draft_silence_s=self._config.draft_timeout_s,
                timeout_s=self._config.request_timeout_s,
                resume_wait_s=resume_wait_s,
                late_hints=late_hints,
            )
            caption = await run.run()
            if plan.delivered:  # what it took is the end of a caption, which tells nothing of whole ones
                self._book.give_up(opening)
            else:
                self._book.end(opening, caption.num_tokens, caption.timings.first_token_s)
        self._report(plan, caption)
        return caption

    @contextlib.contextmanager
    def _opened(self, plan: CaptionPlan, target: ModelInfo, num_video_tokens: int) -> Iterator[Opening]:
        """Surrounds a caption: what captions of its kind have taught before."""
        self._num_running += 1
        try:
            opening = self._open(plan, target, num_video_tokens)
            try:
                yield opening
            except BaseException:
                self._book.give_up(opening)
                raise
        finally:
            self._num_running -= 1

    def _open(self, plan: CaptionPlan, target: ModelInfo, num_video_tokens: int) -> Opening:
        draft = self.peers.draft.model if self.peers.draft else None
        kind = Kind(
            size=(target.model_id, target.revision, round(math.log2(max(num_video_tokens, 1)))),
            settings=((draft.model_id, draft.revision) if draft else None, *_settings(plan)),
            load=self._num_running.bit_length(),
            prompt=self._book.prompt_class(plan.options.prompt),
        )
        gated = plan.gated and self._config.gate_memory
        return self._book.begin(kind, new_costs(plan), gated=gated, max_window=plan.options.max_window)

    async def _caption_source(self, plan: CaptionPlan, upload: AsyncIterator[bytes], emit: Emit) -> Caption:
        stats = CaptionStats(arrived=asyncio.get_running_loop().time())
        emit(StageChange("receive"))
        plan = self.settled(plan, await self.check(plan, wait_for_ready=True))
        with contextlib.ExitStack() as held:
            async with self.media.open(plan.path, upload, owner=plan.owner) as source:
                # The archive has slots of its own, and takes none of these.
                held.enter_context(self.places.held())
                video = held.enter_context(await self.sample(plan, source, emit, stats))
            return await self.caption(plan, video, emit, stats, resume_wait_s=self._config.resume_wait_s)

    def _report(self, plan: CaptionPlan, caption: Caption) -> None:
        self.metrics.captioned(caption)
        if self._config.log_text:
            get_logger().debug("caption.text", prompt=plan.options.prompt, text=caption.text)
        get_logger().info(
            "caption.finished",
            num_tokens=caption.num_tokens,
            num_frames=caption.video.num_frames,
            total_s=round(caption.timings.total_s, 3),
            tau=round(caption.speculation.tau, 3),
            drafts_lost=caption.speculation.drafts_lost,
            gate=caption.speculation.gate_start,
            resumptions=caption.timings.resumptions,
        )


def _fitting(plan: CaptionPlan, target: ModelInfo) -> CaptionPlan:
    """The same with no more frames than fit beside the words and a whole answer, where the request does not say how
    many."""
    if "num_frames" in plan.asked or not target.tokens_per_frame:
        return plan
    words = (plan.options.get("system", ""), *plan.options.get("turns", ()), max(plan.options.questions, key=len))
    num_others = sum(map(_most_tokens, words)) + plan.options.max_new_tokens
    most = max(1, target.max_frames - math.ceil(num_others / target.tokens_per_frame))
    return replace(plan, options=CaptionOptions(num_frames=min(plan.options.num_frames, most)).over(plan.options))


def _most_tokens(text: str) -> int:
    """Of a text, whatever the tokenizer: digits, signs and other letters may be one each."""
    num_others = len(_PROSE.sub("", text))
    return num_others + math.ceil((len(text) - num_others) / LETTERS_PER_TOKEN)


def _settings(plan: CaptionPlan) -> tuple[object, ...]:
    """Of an option, what decides how a draft does. Captions that share all of it share what they measure."""
    options, method, sampling = plan.options, plan.method, plan.sampling
    context = (method.name, method.shape, options.pruner, round(options.alpha, 1), options.positions)
    drawn = () if sampling.greedy else (sampling.rule, sampling.top_k, sampling.top_p, sampling.min_p)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    choice = (round(sampling.temperature, 1), *penalties, sampling.is_structured, *drawn)
    return (*context, method.policy, method.gamma, options.max_window, *choice)
