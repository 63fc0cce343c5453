"""One target model and its sessions: who is admitted, their prefill, guidance for the draft, their end.

The passes over windows are in `judging.py`, the prefill's blocks in `target_prefill.py`.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from slipstream.budget import Admission, MemoryUse, Reservation, Turns
from slipstream.engine.judging import WindowJudge
from slipstream.engine.local_drafter import HintRoom, LocalDrafter, find_local_drafter
from slipstream.engine.prefix_cache import PrefixCache, frames_digest
from slipstream.engine.rides import Rides
from slipstream.engine.session_work import (
    PROMPT_BEHIND_PEOPLE_S,
    OpenPulls,
    SessionWork,
    frames_bytes,
    plan_session,
)
from slipstream.engine.target_prefill import PrefillEvent, PromptPass, TargetSession, headroom_of, schedule_of
from slipstream.engine.text_attention import TextAttention
from slipstream.engine.thread import ModelThread
from slipstream.engine.video_lm import PromptPlan, VideoLM
from slipstream.errors import InvalidConfig, InvalidRequest, LimitExceeded, SessionExists, SessionGone, SlipstreamError
from slipstream.families.adapter import StoppingText
from slipstream.pruning import Guidance, Score
from slipstream.pruning.guided import scores_of
from slipstream.pruning.lossy import Schedule
from slipstream.sampling.sampler import TargetSampler
from slipstream.sampling.structure import Structures
from slipstream.session_messages import Judgement, JudgeRequest, Prefilled, PrefillStage, StageProgress, TargetStart
from slipstream.speculation.methods import METHODS, TOLERANT_METHOD, GuidanceKind, LossyRank
from slipstream.speculation.protocol import StopRule

T = TypeVar("T")
MAX_PULLS = MAX_HINT_CALLS = 64
"""Drafts may be lost and join again within a caption; each pull costs the model's thread some time."""
MAX_HINT_CHARS = 2**20
"""Of one text, which is cut there: a session keeps far fewer tokens."""
SESSION_WAIT_S = 30.0
"""How long guidance may be asked for before its session is opened: target and draft are called at the same time."""


@dataclass(frozen=True, kw_only=True)
class TargetLimits:
    """How much a target takes on, and the layer of its guidance."""

    guidance_layer: int = 0
    """0: `default_guidance_layer`."""
    max_sessions: int
    kv_budget_bytes: int
    frames_budget_bytes: int = 2**40
    max_queued: int = 0
    queue_timeout_s: float = 0.0
    prefix_cache_bytes: int = 0
    ride_along: float = 0.0
    """How much longer a pass may become by rows of prompts in the background, as a share of its time; 0: none ride."""


class TargetEngine:
    """Owns the model's thread. Every method is called on the event loop."""

    def __init__(self, model: VideoLM, thread: ModelThread, limits: TargetLimits) -> None:
        num_layers = model.info.num_layers
        if limits.guidance_layer > num_layers:
            raise InvalidConfig(f"--guidance-layer {limits.guidance_layer}: the model has {num_layers} layers")
        self.model = model
        self.thread = thread
        self.guidance_layer = limits.guidance_layer or default_guidance_layer(num_layers)
        self.admission = Admission(
            budget_bytes=limits.kv_budget_bytes,
            max_sessions=limits.max_sessions,
            max_queued=limits.max_queued,
            queue_timeout_s=limits.queue_timeout_s,
            what="target",
        )
        self.frames = Admission(
            budget_bytes=limits.frames_budget_bytes,
            max_sessions=limits.max_sessions + limits.max_queued,
            max_queued=limits.max_sessions + limits.max_queued,
            queue_timeout_s=limits.queue_timeout_s,
            what="target",
            of=MemoryUse.FRAMES,
        )
        self.prefixes = PrefixCache(limits.prefix_cache_bytes)
        self._rides = Rides(thread, limits.ride_along) if limits.ride_along > 0 and not model.strict_width else None
        self._judge = WindowJudge(model, thread, self._rides)
        self._structures = Structures(model.text.tokenizer, model.info.vocab_size, model.info.eos_token_ids)
        self._turns = Turns(PROMPT_BEHIND_PEOPLE_S)
        self._sessions: dict[str, TargetSession] = {}
        self._opened = asyncio.Condition()

    async def open(
        self, request: TargetStart, num_frames: int, frame_size: tuple[int, int] | None = None
    ) -> TargetSession:
        """Gives a session a place, which `admit` waits for; without frames its prompt is about no video. Raises for a
        prompt that does not fit the context or the memory, an id in use, or when there is no room in the queue either.
        """
        info = self.model.info
        plan = await plan_session(self.model, request, num_frames, frame_size)
        if plan.num_tokens + request.max_new_tokens > info.max_context:
            raise LimitExceeded(
                f"{plan.num_tokens} prompt tokens ({num_frames} frames) and {request.max_new_tokens} new ones exceed "
                f"the model's context of {info.max_context}; ask for fewer frames or tokens"
            )
        drafter_type = find_local_drafter(request.local_drafter) if request.local_drafter else None
        with_attention = request.with_attention or (drafter_type is not None and drafter_type.needs_attention)
        check_hints(request, is_strict=bool(self.model.strict_width))
        check_text(request, plan)
        hints = await self._hint_room(request)
        asked = request.sampling
        structure = await self._structures.opened(asked) if asked.is_structured else None
        sampler = TargetSampler(asked, plan.token_ids, info.vocab_size, structure, info.eos_token_ids)
        lossy = schedule_of(request, plan, info.num_layers)
        check_attends(self.model, request, drafter_type, lossy)
        if request.session_id in self._sessions:  # nothing is awaited from here on until it is one of them
            raise SessionExists(f"session {request.session_id!r} is open already; give every request its own id")
        kv_bytes = self._kv_bytes(request, plan, drafter_type)
        place, work = self._reserve(kv_bytes, frames_bytes(num_frames, frame_size), request.in_background)
        session = TargetSession(
            request=request,
            plan=plan,
            rule=StopRule(frozenset(info.eos_token_ids), request.max_new_tokens),
            sampler=sampler,
            text=StoppingText(self.model.text_stream(), request.sampling.stop),
            guidance=asyncio.get_running_loop().create_future(),
            attention=TextAttention(plan) if with_attention else None,
            drafter_type=drafter_type,
            lossy=lossy,
            prefilled=asyncio.get_running_loop().create_future(),
            place=place,
            work=work,
            pulls=OpenPulls(request.session_id),
            hints=hints,
        )
        self._sessions[request.session_id] = session
        try:
            async with self._opened:
                self._opened.notify_all()
        except asyncio.CancelledError:
            self.close(session)
            raise
        return session

    def close(self, session: TargetSession) -> asyncio.Future[None]:
        """Ends a session. Its memory is freed after the pass that may be running, on the model's thread, and then its
        place is given to the next; the result is done when it is."""
        if self._sessions.get(session.request.session_id) is session:
            del self._sessions[session.request.session_id]
        self._judge.forget(session)
        session.guidance.cancel()
        session.pulls.end()
        session.prefilled.cancel()
        return session.work.close(then=session.place.release)

    async def admit(self, session: TargetSession) -> AsyncIterator[StageProgress]:
        """Waits until there is room for the session and for its frames, telling how many are ahead. Only then are the
        frames to be received.

        Raises:
            Overloaded: no place became free in time.
        """
        for waiting in (session.place.wait(), session.work.wait_for_frames()):
            async for num_ahead in waiting:
                yield StageProgress(PrefillStage.QUEUED, 0, num_ahead)

    async def prefill(self, session: TargetSession) -> AsyncIterator[StageProgress | Prefilled]:
        """Runs the prompt of a session that was admitted and has its frames, telling how far it is; the facts come
        last. The frames are freed once they are encoded."""
        work = session.work
        assert session.place.admitted_at is not None, "a session is admitted before its prompt is run"
        shares = self.prefixes.is_on and session.lossy is None and not session.plan.is_text
        digest = await asyncio.to_thread(frames_digest, work.received_frames) if shares else None
        prompt = PromptPass(
            self.model, self.prefixes, session, guidance_layer=self.guidance_layer, digest=digest, rides=self._rides
        )
        work.take_turn(prompt.num_new_tokens)
        events: AsyncIterator[PrefillEvent] = work.run_blocks(prompt.blocks())
        async for event in events:
            match event:
                case Guidance():
                    if not session.guidance.done():
                        session.guidance.set_result(event)
                    continue
                case StageProgress(stage=PrefillStage.PREFILL):
                    work.free_frames()
            yield event
        if not session.prefilled.done():
            session.prefilled.set_result(None)

    def judge(self, session: TargetSession, request: JudgeRequest) -> AsyncIterator[Judgement]:
        """Runs passes over the last committed token and the window; see `WindowJudge.judge`."""
        return self._judge.judge(session, request)

    async def add_hints(self, session_id: str, texts: Sequence[str], *, capability: bytes) -> int:
        """Gives a session more hints; how many tokens of them it took. Raises `SessionGone` when there is no such
        session, or the capability is not the session's."""
        session = await self._capable(session_id, capability)
        if not capability or session.hints is None:
            raise InvalidRequest(f"session {session_id!r} drafts from no hints")
        session.num_hint_calls += 1
        if session.num_hint_calls > MAX_HINT_CALLS:
            raise LimitExceeded(f"this session was given hints {MAX_HINT_CALLS} times; give it more of them at once")
        return session.hints.add(await asyncio.to_thread(self._tokenize, texts))

    @contextlib.asynccontextmanager
    async def guidance(
        self, session_id: str, kind: str, score: Score = Score.SIMILARITY_VARIATION, *, capability: bytes = b""
    ) -> AsyncIterator[Guidance]:
        """The guidance of a session, as soon as the layers that it is made of have run: layer L, or all for attention
        as such. It is sent on inside the block, which ends with the session.

        Raises:
            SessionGone: there is no such session, it ended meanwhile, or the capability is not the session's.
            Overloaded: too many pull its guidance at once.
            LimitExceeded: it was pulled too often.
            InvalidRequest: the session was opened without such guidance.
        """
        session = await self._capable(session_id, capability)
        session.num_pulls += 1
        if session.num_pulls > MAX_PULLS:
            raise LimitExceeded(
                f"the guidance of this session was pulled {MAX_PULLS} times, which is enough for any draft"
            )
        if not session.request.with_guidance:
            raise InvalidRequest(f"session {session_id!r} was opened without guidance")
        async with session.pulls.one():
            yield await self._guidance_of(session, kind, score)

    async def _guidance_of(self, session: TargetSession, kind: str, score: Score) -> Guidance:
        guidance = await _of_open_session(session, session.guidance)
        if score.is_attention:
            return await self._attention(session, kind, score)
        if kind == GuidanceKind.HIDDEN_STATES:
            return await asyncio.to_thread(guidance.to, "cpu")  # hundreds of MB, which the event loop must not wait for
        return await self._scores(lambda: scores_of(guidance, score))

    async def _attention(self, session: TargetSession, kind: str, score: Score) -> Guidance:
        attention, last = session.attention, self.guidance_layer - 1
        if attention is None or kind != GuidanceKind.SCORES:
            raise InvalidRequest(f"{score} comes as scores, and from sessions that were opened with attention")
        if score is Score.ATTENTION_VARIATION:
            if self.model.runner.recurs:  # layers that attend may be few before L
                await _of_open_session(session, session.prefilled)
            return await self._scores(lambda: attention.variation(last))
        await _of_open_session(session, session.prefilled)
        return await self._scores(attention.mean)

    async def _scores(self, make: Callable[[], Tensor]) -> Guidance:
        """Made, and brought to the host, on the model's thread: the event loop waits for no device."""
        return Guidance(scores=await self.thread.run(lambda: make().cpu()))

    def _reserve(self, kv_bytes: int, num_frames_bytes: int, in_background: bool) -> tuple[Reservation, SessionWork]:
        """A session's place, and its work, with room for its frames if the place is there at once; or the error."""
        self.frames.check(num_frames_bytes)
        place = self.admission.reserve(kv_bytes, in_background=in_background)
        work = SessionWork(self.thread, self._turns, self.frames, num_frames_bytes, in_background=in_background)
        try:
            if place.admitted_at is not None:
                work.ask_for_frames()
        except SlipstreamError:
            place.release()
            raise
        return place, work

    def _kv_bytes(self, request: TargetStart, plan: PromptPlan, drafter_type: type[LocalDrafter] | None) -> int:
        """What the session's caches will hold at most: its own, and its drafter's."""
        num_bytes = self.model.kv_bytes(plan.num_tokens + headroom_of(request))
        if drafter_type is None:
            return num_bytes
        num_cached = drafter_type.max_cached_tokens(plan, request.self_draft_kept, request.max_new_tokens)
        return num_bytes + (self.model.kv_bytes(num_cached) if num_cached else 0)

    async def _hint_room(self, request: TargetStart) -> HintRoom | None:
        """With the hints that come with the request; None where its drafter looks at no texts that it is given."""
        if request.local_drafter not in METHODS or not METHODS[request.local_drafter].takes_hints:
            return None
        room = HintRoom()
        if request.hints is not None:
            room.add(await asyncio.to_thread(self._tokenize, request.hints.texts))
        return room

    def _tokenize(self, texts: Iterable[str]) -> list[list[int]]:
        """Each with an end of text behind it, as the answer that it is like may end there. On any thread."""
        ends = list(self.model.info.eos_token_ids[:1])
        return [[*self.model.tokenize(text[:MAX_HINT_CHARS]), *ends] for text in texts]

    async def _capable(self, session_id: str, capability: bytes) -> TargetSession:
        """The session, for who shows its capability. Raises `SessionGone`."""
        session = await self._wait_opened(session_id)
        if not hmac.compare_digest(session.request.guidance_capability, capability):
            raise SessionGone(f"no session {session_id!r} is open here")
        return session

    async def _wait_opened(self, session_id: str) -> TargetSession:
        async with self._opened:
            opened = self._opened.wait_for(lambda: session_id in self._sessions)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(opened, timeout=SESSION_WAIT_S)
            if session_id not in self._sessions:  # never opened, or closed again at once
                raise SessionGone(f"no session {session_id!r} is open here")
            return self._sessions[session_id]


async def _of_open_session(session: TargetSession, future: asyncio.Future[T]) -> T:
    """What the future brings; it is cancelled when the session ends."""
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.cancelled():
            raise SessionGone(f"session {session.request.session_id!r} has ended") from None
        raise


def check_hints(request: TargetStart, *, is_strict: bool) -> None:
    """Raises `InvalidRequest` for a tolerance that this session cannot have."""
    hints = request.hints
    if hints is None or not hints.tolerance.is_lossy:
        return
    if request.local_drafter != TOLERANT_METHOD or not request.sampling.greedy:
        raise InvalidRequest(f"a tolerance below 1 is for {TOLERANT_METHOD!r} alone: ask for that and temperature 0")
    if is_strict:
        raise InvalidRequest(
            "a tolerance below 1 judges trees, and this target's passes have a strict width, which takes chains: leave"
            " the tolerance out, or start the target with --strict-width 0"
        )


def check_attends(
    model: VideoLM, request: TargetStart, drafter_type: type[LocalDrafter] | None, lossy: Schedule | None
) -> None:
    """Raises `InvalidRequest` for what goes by the attention of layers that have linear attention."""
    is_ranked = lossy is not None and lossy.rank is not LossyRank.REDUNDANCY
    if (is_ranked or (drafter_type is not None and drafter_type.needs_attention)) and model.runner.recurs:
        raise InvalidRequest(
            f"{request.local_drafter or 'this lossy baseline'} goes by the attention of every layer, and most layers of"
            " this target have linear attention, which pays none to single tokens: take another method"
        )


def check_text(request: TargetStart, plan: PromptPlan) -> None:
    """Raises `InvalidRequest` for a session without a video that is to do something with one."""
    if plan.is_text and (request.with_guidance or request.with_attention or request.lossy is not None):
        raise InvalidRequest("a prompt without a video has no video tokens to prune: leave guidance and lossy out")


def default_guidance_layer(num_layers: int) -> int:
    """L = 20 for the papers' models of 80 layers; at most a quarter of the layers otherwise."""
    return min(20, max(1, num_layers // 4))
