"""One caption at the target: what it holds, and its prefill, block by block on the model's thread.

The prefill starts from the frames, or from a prefix that is at hand. The lossy baselines are here too: they drop video
tokens while it runs.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.budget import Reservation
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.local_drafter import HintRoom, LocalDrafter
from slipstream.engine.prefix_cache import PrefixCache, PrefixKey, VideoPrefix
from slipstream.engine.rides import Rides, RidingPrompt
from slipstream.engine.row_prefill import RowPrefill
from slipstream.engine.segments import Observer
from slipstream.engine.session_work import OpenPulls, SessionWork, encode_blocks
from slipstream.engine.text_attention import TextAttention
from slipstream.engine.thread import Pause
from slipstream.engine.video_lm import Prefill, PromptPlan, VideoLM
from slipstream.errors import InvalidRequest
from slipstream.families.adapter import StoppingText
from slipstream.pruning import Guidance, VideoTokens
from slipstream.pruning.guided import make_guidance, top_k
from slipstream.pruning.lossy import Schedule, make_schedule, text_raters
from slipstream.pruning.unguided import keep_changed_tokens
from slipstream.sampling.sampler import TargetSampler
from slipstream.session_messages import Prefilled, PrefillStage, StageProgress, TargetStart
from slipstream.speculation.methods import GuidanceKind, LossyRank
from slipstream.speculation.protocol import StopRule

# -- session ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TargetSession:
    """One caption at the target. `committed` ends with the one token that is not in the cache yet."""

    request: TargetStart
    plan: PromptPlan
    rule: StopRule
    sampler: TargetSampler
    text: StoppingText
    guidance: asyncio.Future[Guidance]
    """Done when layer L has run."""
    attention: TextAttention | None
    """The text's to the video, where somebody asked for it."""
    drafter_type: type[LocalDrafter] | None
    """Of a session that may draft for itself."""
    lossy: Schedule | None
    """What the prefill drops of the video, where the session is a lossy baseline."""
    prefilled: asyncio.Future[None]
    place: Reservation
    work: SessionWork
    pulls: OpenPulls
    """Of its guidance."""
    committed: list[int] = field(default_factory=list)
    """Touched on the model's thread only, once the prefill is done."""
    hints: HintRoom | None = None
    """Where its drafter looks at texts that it is given."""
    first_logits: torch.Tensor | None = None
    """[vocab], after the prefill."""
    drafter: LocalDrafter | None = None
    """Made when drafting is first asked for."""
    carried_share: float = 0.0
    """Of its prompt, what rode along the passes of others."""
    num_pulls: int = 0
    num_hint_calls: int = 0
    """How often its guidance was asked for, and hints were given."""

    @property
    def has_place(self) -> bool:
        """It is served, and its frames may come; else it waits."""
        return self.place.admitted_at is not None and self.work.may_have_frames


def headroom_of(request: TargetStart) -> int:
    """Rows that the session's cache is to have behind the prompt: for the answer, and for a tree of hints behind it. Of
    a draft's trees no more is judged than has room there."""
    return request.max_new_tokens + (request.hints.max_rows if request.hints is not None else 0)


# -- prefill ----------------------------------------------------------------------------------------------------------

PrefillEvent = StageProgress | Guidance | Prefilled
VideoStates = tuple[torch.Tensor, torch.Tensor]


class PromptPass:
    """One session's prompt on its way through the model. Layer-major: all tokens pass layers 1..L, guidance is made,
    the other layers follow.

    When an earlier prompt was about the same frames, their rows and states are copied and only the text is run. A lossy
    session drops video tokens on the way, copies nothing and gives nothing. A prompt about no video is all text.

    Args:
        guidance_layer: L.
        digest: of the frames; None when prefixes are not kept, or not for this session.
        rides: carries the rows of sessions in the background; None: every prompt runs layer by layer.
    """

    def __init__(
        self,
        model: VideoLM,
        prefixes: PrefixCache,
        session: TargetSession,
        *,
        guidance_layer: int,
        digest: bytes | None,
        rides: Rides | None = None,
    ) -> None:
        self._model = model
        self._rides = rides
        self._riding: RidingPrompt | None = None
        self._prefixes = prefixes
        self._session = session
        self._layer = guidance_layer
        self._key = None if digest is None else PrefixKey.of(session.plan, digest)
        self._lossy = LossyPass(session.plan, session.lossy) if session.lossy is not None else None
        self._shared: VideoPrefix | None = None
        self._cache: KVCache | None = None
        self._encode_s = self._until_guidance_s = self._after_guidance_s = 0.0

    @property
    def num_new_tokens(self) -> int:
        """Tokens that are to be run, as things are: behind a prefix that is at hand, those of the text."""
        plan = self._session.plan
        is_known = self._key is not None and self._prefixes.knows(self._key)
        return plan.num_tokens - (plan.text_start if is_known else 0)

    def blocks(self) -> Iterator[PrefillEvent | Pause]:
        """Does one block of work before each item; the facts come last, and then the session has a state."""
        self._session.work.on_release(self._release)
        prefix = self._prefixes.find(self._key) if self._key is not None else None
        if self._session.plan.is_text:
            yield from self._text_alone()
        elif prefix is None:
            yield from self._fresh()
        else:
            yield from self._resumed(prefix)

    def _fresh(self) -> Iterator[PrefillEvent | Pause]:
        plan, work = self._session.plan, self._session.work
        num_frames = len(work.received_frames)
        yield StageProgress(PrefillStage.ENCODE, 0, num_frames)
        embeddings: list[torch.Tensor] = []
        for block, seconds in encode_blocks(self._model, work, num_frames):
            embeddings.append(block)
            self._encode_s += seconds
            num_done = sum(map(len, embeddings)) * num_frames // plan.num_video_tokens
            yield StageProgress(PrefillStage.ENCODE, num_done, num_frames)
        observer = self._lossy or self._session.attention
        if self._rides is not None and work.in_background and observer is None:
            yield from self._by_rows(self._rides, embeddings)
        else:
            yield from self._by_layers(embeddings, observer)

    def _by_layers(self, embeddings: list[torch.Tensor], observer: Observer | None) -> Iterator[PrefillEvent]:
        plan, request = self._session.plan, self._session.request
        started = time.perf_counter()
        prefill = self._model.start_prefill(
            plan, torch.cat(embeddings), headroom=headroom_of(request), observer=observer
        )
        embeddings.clear()
        video_0 = _rounded(prefill.video_states()) if self._keeps_states else None
        text_0 = prefill.text_states()
        if self._lossy is not None:
            self._lossy.drop(prefill)
        self._until_guidance_s += time.perf_counter() - started
        video_states = None
        for event in self._layers(prefill):
            yield event
            if event.done == self._layer and video_0 is not None:
                video_states = video_0, _rounded(prefill.video_states())
                yield from self._guidance(video_states, text_0, prefill.text_states())
        yield self._finish_fresh(prefill, video_states)

    def _by_rows(self, rides: Rides, embeddings: list[torch.Tensor]) -> Iterator[PrefillEvent | Pause]:
        """The same with rows that ride along decoding passes, which gives no more events than there are layers."""
        started, num_layers = time.perf_counter(), self._model.info.num_layers
        prefill = self._model.start_row_prefill(
            self._session.plan,
            torch.cat(embeddings),
            guidance_layer=self._layer,
            headroom=headroom_of(self._session.request),
        )
        embeddings.clear()
        self._cache = prefill.cache
        self._until_guidance_s += time.perf_counter() - started
        yield StageProgress(PrefillStage.PREFILL, 0, num_layers)  # the frames are not needed any more
        self._riding = riding = rides.join(prefill)
        video_states, num_told = None, 0
        while not prefill.is_done:
            yield riding
            riding.check()
            if video_states is None and self._keeps_states and prefill.num_done.first == prefill.num_rows:
                video_states = _rounded(prefill.video_states(0)), _rounded(prefill.video_states(1))
                yield from self._guidance(video_states, prefill.text_states(0), prefill.text_states(1))
            if (num_run := int(prefill.share_done * num_layers)) > num_told:
                num_told = num_run
                yield StageProgress(PrefillStage.PREFILL, num_run, num_layers)
        rides.leave(riding)
        self._riding = None  # it knows the prompt's hidden states, which nobody needs while the answer is written
        self._session.carried_share = riding.carried / prefill.work
        self._until_guidance_s += riding.spent_s[0]
        self._after_guidance_s += riding.spent_s[1]
        yield self._finish_fresh(prefill, video_states)

    @property
    def _keeps_states(self) -> bool:
        """Of the video, for guidance or for a later prompt."""
        return self._session.request.with_guidance or self._key is not None

    def _finish_fresh(self, prefill: Prefill | RowPrefill, video_states: VideoStates | None) -> Prefilled:
        """See `_finish`; what a later prompt may reuse is shared."""
        facts = self._finish(prefill, num_reused=0)
        if self._key is not None and video_states is not None:
            self._shared = VideoPrefix(self._key, self._session.work.state.cache, video_states)
            self._prefixes.share(self._shared)
        return facts

    def _resumed(self, prefix: VideoPrefix) -> Iterator[PrefillEvent]:
        plan = self._session.plan
        started = time.perf_counter()
        cache = prefix.cache.fork(prefix.num_tokens, plan.num_tokens + headroom_of(self._session.request))
        prefill = self._model.resume_prefill(plan, cache, observer=self._session.attention)
        video_states, text_0 = prefix.video_states, prefill.text_states()
        self._until_guidance_s += time.perf_counter() - started
        for event in self._layers(prefill):
            yield event
            if event.done == self._layer:
                yield from self._guidance(video_states, text_0, prefill.text_states())
        yield self._finish(prefill, num_reused=prefix.num_tokens)

    def _text_alone(self) -> Iterator[PrefillEvent]:
        session = self._session
        headroom = headroom_of(session.request)
        started = time.perf_counter()
        prefill = self._model.start_text(session.plan, headroom=headroom, observer=session.attention)
        self._until_guidance_s += time.perf_counter() - started
        yield from self._layers(prefill)
        yield self._finish(prefill, num_reused=0)

    def _layers(self, prefill: Prefill) -> Iterator[StageProgress]:
        self._cache = prefill.cache
        num_layers = self._model.info.num_layers
        for layer in range(1, num_layers + 1):
            started = time.perf_counter()
            prefill.run_layers(layer)
            if self._lossy is not None:
                self._lossy.drop(prefill)
            seconds = time.perf_counter() - started
            if layer <= self._layer:
                self._until_guidance_s += seconds
            else:
                self._after_guidance_s += seconds
            yield StageProgress(PrefillStage.PREFILL, layer, num_layers)

    def _guidance(
        self, video_states: VideoStates, text_0: torch.Tensor, text_states: torch.Tensor
    ) -> Iterator[Guidance]:
        if self._session.request.with_guidance:
            yield make_guidance(video_states[0], text_0, video_states[1], text_states, GuidanceKind.HIDDEN_STATES)

    def _finish(self, prefill: Prefill | RowPrefill, num_reused: int) -> Prefilled:
        session = self._session
        started = time.perf_counter()
        session.work.state, session.first_logits = prefill.finish()
        self._after_guidance_s += time.perf_counter() - started
        return Prefilled(
            prompt_tokens=session.plan.num_tokens,
            video_tokens=session.plan.num_video_tokens,
            encode_s=self._encode_s,
            prefill_until_guidance_s=self._until_guidance_s,
            prefill_after_guidance_s=self._after_guidance_s,
            kv_bytes=session.work.state.kv_bytes,
            reused_tokens=num_reused,
        )

    def _release(self) -> None:
        """The session has ended: what others may reuse is handed to the prefix cache, the rest is freed."""
        if self._rides is not None and self._riding is not None:
            self._rides.leave(self._riding)
            self._riding.end()  # its blocks end, with all that they hold
        if self._shared is not None:
            self._prefixes.retire(self._shared)
        elif self._cache is not None:
            self._cache.clear()


def _rounded(states: torch.Tensor) -> torch.Tensor:
    """A copy in the precision that guidance has."""
    return states.to(torch.bfloat16, copy=True)


# -- lossy ------------------------------------------------------------------------------------------------------------

# Carries out a lossy baseline's schedule in one prefill: ranks the video tokens, and drops them where it says.
#
# What is left of the session is no longer the model's own answer, so nothing of it is shared.

_LAST_TOKEN = (-1,)


def schedule_of(request: TargetStart, plan: PromptPlan, num_layers: int) -> Schedule | None:
    """What the request wants dropped; None of a lossless one.

    Raises:
        InvalidRequest: it wants more of the session than plain decoding, or a share that the method cannot keep.
    """
    if request.lossy is None:
        return None
    if request.with_guidance or request.with_attention or request.local_drafter:
        raise InvalidRequest("a lossy session is a baseline of plain decoding: it guides no draft and drafts nothing")
    return make_schedule(request.lossy, num_video=plan.num_video_tokens, num_layers=num_layers)


class LossyPass:
    """An observer of one whole prefill, which also drops its video tokens: call `drop` before the first layer and after
    each."""

    def __init__(self, plan: PromptPlan, schedule: Schedule) -> None:
        self._plan = plan
        self._rank = schedule.rank
        self._num_keep = {stage.after_layer: stage.num_keep for stage in schedule.stages}
        self._attention: TextAttention | None = None

    @property
    def recording(self) -> TextAttention | None:
        """See `Observer`."""
        return self._attention

    def place_video(self, rows: Tensor) -> None:
        """See `Observer`."""
        if self._attention is not None:
            self._attention.place_video(rows)

    def observe(self, layer: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """Records the layers that rank, see `Observer`."""
        if self._attention is not None:
            self._attention.observe(layer, query, keys, scale)

    def drop(self, prefill: Prefill) -> None:
        """Keeps what the schedule says at this place, if it says anything."""
        num_run = prefill.next_layer
        if num_run == 0:
            self._prepare(prefill)
        num_keep = self._num_keep.get(num_run)
        if num_keep is None:
            return
        if self._rank is LossyRank.REDUNDANCY:
            video = VideoTokens(self._plan.num_video_tokens, self._plan.num_steps, prefill.video_states())
            keep = keep_changed_tokens(video, num_keep, None, 0)
        else:
            assert self._attention is not None, "recorded from the first layer on"
            keep = top_k(self._attention.mean([num_run - 1]), num_keep)
        prefill.keep_video(keep)

    def _prepare(self, prefill: Prefill) -> None:
        if self._rank is LossyRank.REDUNDANCY:
            return
        raters = self._rank is LossyRank.RATERS
        rows = text_raters(prefill.video_states(), prefill.text_states()) if raters else _LAST_TOKEN
        self._attention = TextAttention(self._plan, text_rows=rows, layers={place - 1 for place in self._num_keep})
