"""One target model and its sessions: encode, prefill with guidance on the way, judge windows. Knows no wire."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from slipstream.errors import InvalidConfig, InvalidRequest, LimitExceeded, Overloaded, SessionGone
from slipstream.models.base import Prefill, PromptPlan, VideoLM
from slipstream.models.text import TextStream
from slipstream.models.thread import ModelThread, Priority
from slipstream.models.work import SessionWork
from slipstream.pruning import Guidance
from slipstream.pruning.uv import make_guidance, similarity_variation
from slipstream.rpc.codec import Frames, TargetRequest
from slipstream.speculation.acceptance import StopRule, Verdict, judge_window

SESSION_WAIT_S = 30.0
"""How long guidance may be asked for before its session is opened: target and draft are called at the same time."""


@dataclass(frozen=True)
class StageProgress:
    """Units of work done of a stage."""

    stage: Literal["encode", "prefill"]
    done: int
    total: int


@dataclass(frozen=True)
class PrefillFacts:
    """What the prefill was and took. `until_guidance_s` and `after_guidance_s` are the layers before and after L."""

    prompt_tokens: int
    video_tokens: int
    encode_s: float
    until_guidance_s: float
    after_guidance_s: float
    kv_bytes: int


@dataclass(frozen=True)
class Judgement:
    """A verdict, the text of its tokens, and the seconds of its pass."""

    verdict: Verdict
    pieces: list[str]
    pass_s: float


@dataclass
class TargetSession:
    """One caption at the target. `committed` ends with the one token that is not in the cache yet."""

    request: TargetRequest
    plan: PromptPlan
    rule: StopRule
    text: TextStream
    guidance: asyncio.Future[Guidance]
    work: SessionWork
    committed: list[int] = field(default_factory=list)
    first_logits: torch.Tensor | None = None


class TargetEngine:
    """Owns the model's thread. Every method is called on the event loop."""

    def __init__(self, model: VideoLM, thread: ModelThread, *, guidance_layer: int, max_sessions: int) -> None:
        if guidance_layer > model.info.num_layers:
            raise InvalidConfig(f"--guidance-layer {guidance_layer}: the model has {model.info.num_layers} layers")
        self.model = model
        self.thread = thread
        self.guidance_layer = guidance_layer or default_guidance_layer(model.info.num_layers)
        self.max_sessions = max_sessions
        self._sessions: dict[str, TargetSession] = {}
        self._opened = asyncio.Condition()

    async def open(self, request: TargetRequest, num_frames: int) -> TargetSession:
        """Admits a session. Raises for a prompt that does not fit, an id in use, or when there is no room."""
        if len(self._sessions) >= self.max_sessions:
            raise Overloaded(f"the target serves {self.max_sessions} captions at once; try again later")
        if request.session_id in self._sessions:
            raise InvalidRequest(f"session {request.session_id!r} is open already; give every request its own id")
        info = self.model.info
        plan = self.model.plan_prompt(request.prompt, num_frames)
        if plan.num_tokens + request.max_new_tokens > info.max_context:
            raise LimitExceeded(
                f"{plan.num_tokens} prompt tokens ({num_frames} frames) and {request.max_new_tokens} new ones exceed "
                f"the model's context of {info.max_context}; ask for fewer frames or tokens"
            )
        session = TargetSession(
            request=request,
            plan=plan,
            rule=StopRule(frozenset(info.eos_token_ids), request.max_new_tokens),
            text=self.model.text_stream(),
            guidance=asyncio.get_running_loop().create_future(),
            work=SessionWork(self.model, self.thread),
        )
        async with self._opened:
            self._sessions[request.session_id] = session
            self._opened.notify_all()
        return session

    def close(self, session: TargetSession) -> None:
        """Ends a session. Its memory is freed after the pass that may be running, on the model's thread."""
        self._sessions.pop(session.request.session_id, None)
        session.work.close()
        session.guidance.cancel()

    async def prefill(self, session: TargetSession, frames: Frames) -> AsyncIterator[StageProgress | PrefillFacts]:
        """Encodes the frames and runs the prompt through the layers, telling its progress; the facts come last.

        Layer-major (design section 5): all tokens pass layers 1..L, the guidance is set, the other layers follow.
        """
        work, blocks, encode_s, num_done = session.work, [], 0.0, 0
        yield StageProgress("encode", 0, len(frames))
        async for embeddings, seconds in work.encode(frames):
            blocks.append(embeddings)
            encode_s += seconds
            num_done += len(embeddings) // self.model.info.tokens_per_frame
            yield StageProgress("encode", num_done, len(frames))
        prefill, until_guidance_s = await work.start_prefill(session.plan, torch.cat(blocks))
        inputs, after_guidance_s = (prefill.video_states(), prefill.text_states()), 0.0
        async for layer, seconds in work.run_layers(prefill):
            if layer <= self.guidance_layer:
                until_guidance_s += seconds
            else:
                after_guidance_s += seconds
            if layer == self.guidance_layer and session.request.with_guidance:
                await self._set_guidance(session, prefill, *inputs)
            yield StageProgress("prefill", layer, self.model.info.num_layers)
        session.first_logits, seconds = await work.finish_prefill(prefill)
        yield PrefillFacts(
            prompt_tokens=session.plan.num_tokens,
            video_tokens=session.plan.num_video_tokens,
            encode_s=encode_s,
            until_guidance_s=until_guidance_s,
            after_guidance_s=after_guidance_s + seconds,
            kv_bytes=work.state.kv_bytes,
        )

    async def judge(self, session: TargetSession, window: tuple[int, ...]) -> Judgement:
        """One target pass over the last committed token and the window. The first call must bring an empty window: it
        answers from the prefill's logits, without a pass."""
        if session.rule.max_new_tokens <= len(session.committed):
            raise InvalidRequest("the text of this session has ended")
        if any(token >= self.model.info.vocab_size for token in window):
            raise InvalidRequest(f"the window has a token outside the vocabulary of {self.model.info.vocab_size}")
        room = session.rule.max_new_tokens - len(session.committed) - 1
        window = window[:room]  # more could not be committed beside the pass's own token, nor fit the context
        verdict, pass_s = await session.work.run(lambda: self._judge(session, window), Priority.DECODE)
        committed = verdict.committed(window)
        session.committed.extend(committed)
        pieces = session.text.push(committed)
        if verdict.finish_reason is not None:
            pieces[-1] += session.text.flush()
        return Judgement(verdict, pieces, pass_s)

    async def guidance(self, session_id: str, kind: str) -> Guidance:
        """The guidance of a session, as soon as layer L has run. Raises `SessionGone` when there is no such session."""
        session = await self._wait_opened(session_id)
        if not session.request.with_guidance:
            raise InvalidRequest(f"session {session_id!r} was opened without guidance")
        future = session.guidance
        try:
            guidance = await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.cancelled():
                raise SessionGone(f"session {session_id!r} has ended") from None
            raise
        if kind == "hidden_states":
            return guidance
        states, sums = guidance.video_states, guidance.text_sums
        assert states is not None and sums is not None
        return Guidance(scores=await self.thread.run(lambda: similarity_variation(states, sums)))

    async def _wait_opened(self, session_id: str) -> TargetSession:
        async with self._opened:
            opened = self._opened.wait_for(lambda: session_id in self._sessions)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(opened, timeout=SESSION_WAIT_S)
            if session_id not in self._sessions:  # never opened, or closed again at once
                raise SessionGone(f"no session {session_id!r} is open here")
            return self._sessions[session_id]

    def _judge(self, session: TargetSession, window: tuple[int, ...]) -> Verdict:
        """On the model's thread."""
        committed, state = session.committed, session.work.state
        if not committed:
            assert session.first_logits is not None
            return judge_window((), [int(session.first_logits.argmax())], 0, session.rule)
        (logits,) = self.model.step([(state, (committed[-1], *window))])
        verdict = judge_window(window, logits.argmax(dim=-1).tolist(), len(committed), session.rule)
        state.rollback(session.plan.num_tokens + len(committed) + verdict.num_accepted)
        return verdict

    async def _set_guidance(
        self, session: TargetSession, prefill: Prefill, video_inputs: torch.Tensor, text_inputs: torch.Tensor
    ) -> None:
        def make() -> Guidance:
            video, text = prefill.video_states(), prefill.text_states()
            return make_guidance(video_inputs, text_inputs, video, text, kind="hidden_states")

        guidance, _ = await session.work.run(make)
        if not session.guidance.done():
            session.guidance.set_result(guidance)


def default_guidance_layer(num_layers: int) -> int:
    """L = 20 for the papers' models of 80 layers; at most a quarter of the layers otherwise."""
    return min(20, max(1, num_layers // 4))
