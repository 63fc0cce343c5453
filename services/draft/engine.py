"""One draft model and its sessions: encode, prune, prefill, then write a line without waiting. Knows no wire."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import torch

from slipstream.errors import Overloaded, ProtocolViolation, SessionGone
from slipstream.models.base import PromptPlan, VideoLM
from slipstream.models.thread import ModelThread, Priority
from slipstream.models.work import SessionWork
from slipstream.pruning import Guidance, get_pruner, num_kept, prune
from slipstream.rpc.codec import DraftRequest, Frames
from slipstream.speculation.pipeline import AdvanceLine, JoinPoint, RestartLine

FLUSH_S = 0.005
"""A chunk that is not yet whole leaves after this long: fast drafts send windows, slow drafts send tokens."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of a line, the output position of the first, and the mean seconds of a pass."""

    epoch: int
    position: int
    token_ids: list[int]
    pass_s: float


@dataclass
class Line:
    """Where the draft writes. `output` holds committed tokens and, after them, what it wrote itself."""

    epoch: int
    write_until: int
    first_chunk: int
    output: list[int]
    """Touched on the model's thread only."""


@dataclass
class DraftSession:
    """One caption at the draft."""

    request: DraftRequest
    plan: PromptPlan
    work: SessionWork
    line: Line
    restarts: deque[RestartLine] = field(default_factory=deque)
    """Restarts that the thread has not carried out. All are, in order: each builds on the one before."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    prompt_logits: torch.Tensor | None = None


class DraftEngine:
    """Owns the model's thread. Every public method is called on the event loop."""

    def __init__(self, model: VideoLM, thread: ModelThread, *, max_sessions: int) -> None:
        self.model = model
        self.thread = thread
        self.max_sessions = max_sessions
        self._num_sessions = 0

    def open(self, request: DraftRequest, join: JoinPoint, num_frames: int) -> DraftSession:
        """Admits a session. Raises for an unknown pruner, a prompt that does not fit, or when there is no room."""
        if self._num_sessions >= self.max_sessions:
            raise Overloaded(f"the draft serves {self.max_sessions} captions at once; try again later")
        get_pruner(request.pruner)
        num_kept(1, request.alpha)
        plan = self.model.plan_prompt(request.prompt, num_frames)
        if any(token >= self.model.info.vocab_size for token in join.committed):
            raise ProtocolViolation("a committed token is outside the vocabulary")
        self._num_sessions += 1
        line = Line(join.epoch, join.write_until, join.first_chunk, list(join.committed))
        return DraftSession(request, plan, SessionWork(self.model, self.thread), line)

    def close(self, session: DraftSession) -> None:
        """Ends a session. Its memory is freed after the pass that may be running, on the model's thread."""
        if not session.work.closed:
            self._num_sessions -= 1
        session.work.close()
        session.wake.set()

    async def encode(self, session: DraftSession, frames: Frames) -> tuple[torch.Tensor, float]:
        """Video embeddings [tokens, hidden] of all frames, and the seconds that took."""
        blocks = [block async for block in session.work.encode(frames)]
        return torch.cat([embeddings for embeddings, _ in blocks]), sum(seconds for _, seconds in blocks)

    async def choose_tokens(self, session: DraftSession, guidance: Guidance | None) -> tuple[torch.Tensor, float]:
        """Indices of the video tokens to keep, ascending int64, and the seconds that took."""
        request, num_video_tokens = session.request, session.plan.num_video_tokens
        pruner = get_pruner(request.pruner)
        return await session.work.run(
            lambda: prune(pruner, num_video_tokens, request.alpha, guidance=guidance, seed=request.seed),
        )

    async def prefill(self, session: DraftSession, embeddings: torch.Tensor, keep: torch.Tensor) -> float:
        """Runs the pruned prompt through the layers; returns the seconds that took."""
        prefill, total_s = await session.work.start_prefill(
            session.plan, embeddings, keep=keep, positions=session.request.positions
        )
        async for _, seconds in session.work.run_layers(prefill):
            total_s += seconds
        session.prompt_logits, seconds = await session.work.finish_prefill(prefill)
        return total_s + seconds

    def restart(self, session: DraftSession, action: RestartLine) -> None:
        """Ends the line that is being written, at the latest after the token that is being computed."""
        session.restarts.append(action)
        session.wake.set()

    def advance(self, session: DraftSession, action: AdvanceLine) -> None:
        """Moves the limit of the line, if it is still the one that is written."""
        if not session.restarts and action.epoch == session.line.epoch:
            session.line.write_until = action.write_until
            session.wake.set()

    async def write(self, session: DraftSession) -> AsyncIterator[Chunk]:
        """Writes until the session is closed: as far as the line may go, then waits to be told more."""
        while not session.work.closed:
            session.wake.clear()
            try:
                chunk, seconds = await session.work.run(lambda: self._write_chunk(session), Priority.DECODE)
            except SessionGone:
                return
            if chunk is None:
                await session.wake.wait()
                continue
            epoch, position, token_ids = chunk
            yield Chunk(epoch, position, token_ids, seconds / len(token_ids))

    def _write_chunk(self, session: DraftSession) -> tuple[int, int, list[int]] | None:
        """On the model's thread: the next tokens of the line, or None when it may not go on."""
        while session.restarts:
            self._restart(session, session.restarts.popleft())
        line, started = session.line, time.perf_counter()
        position, limit = len(line.output), min(line.write_until, self._room(session))
        while len(line.output) < limit and not session.restarts:
            line.output.append(self._next_token(session))
            if len(line.output) - position == line.first_chunk or time.perf_counter() - started > FLUSH_S:
                break
        line.first_chunk = 0
        token_ids = line.output[position:]
        return (line.epoch, position, token_ids) if token_ids else None

    def _restart(self, session: DraftSession, action: RestartLine) -> None:
        state = session.work.state
        if action.keep > len(session.line.output):
            raise ProtocolViolation(
                f"a restart keeps {action.keep} tokens, but the line has {len(session.line.output)}"
            )
        if any(token >= self.model.info.vocab_size for token in action.suffix):
            raise ProtocolViolation("a restart has a token outside the vocabulary")
        output = [*session.line.output[: action.keep], *action.suffix]
        session.line = Line(action.epoch, action.write_until, action.first_chunk, output)
        state.rollback(min(state.num_tokens, state.num_prompt_tokens + action.keep))

    def _room(self, session: DraftSession) -> int:
        """Output tokens that the context allows; the last one is written and never read."""
        state = session.work.state
        num_read = state.num_tokens - state.num_prompt_tokens
        return self.model.info.max_context - (state.next_position - num_read) + 1

    def _next_token(self, session: DraftSession) -> int:
        state = session.work.state
        assert session.prompt_logits is not None
        unseen = session.line.output[state.num_tokens - state.num_prompt_tokens :]
        logits = self.model.step([(state, unseen)])[0][-1] if unseen else session.prompt_logits
        return int(logits.argmax())
