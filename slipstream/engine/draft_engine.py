"""One draft model and its sessions: encode, prune, prefill, then write a line without waiting. Knows no wire."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from slipstream.budget import Admission, Memory
from slipstream.engine.batcher import SessionWork, encode_blocks, frames_bytes, step_each
from slipstream.engine.draft_session import DraftLine, DraftSession, TreeGrowth
from slipstream.engine.prefix_cache import ByteLru, frames_digest
from slipstream.engine.thread import Lane, ModelThread
from slipstream.engine.video_lm import VideoLM, Window, check_positions
from slipstream.errors import ProtocolViolation, SlipstreamError
from slipstream.messages import DraftStart, DraftTokens
from slipstream.pruning import Guidance, VideoTokens, get_pruner, num_kept, prune
from slipstream.sampling.params import Proposal
from slipstream.sampling.sampler import DraftSampler
from slipstream.speculation.pipeline import AdvanceLine, JoinPoint, RestartLine
from slipstream.speculation.protocol import TokenTree

# -- draft writer -----------------------------------------------------------------------------------------------------

FLUSH_S = 0.005
"""A chunk that is not yet whole leaves after this long: fast drafts send windows, slow drafts send tokens."""


class LineWriter:
    """The rounds of passes on the model's thread. `wake` is called on the event loop, all else happens there."""

    def __init__(self, model: VideoLM, thread: ModelThread) -> None:
        self._model = model
        self._thread = thread
        self._lock = threading.Lock()
        self._woken: list[DraftSession] = []
        self._is_running = False
        self._writing: dict[DraftSession, None] = {}
        self._loop = asyncio.get_running_loop()

    def wake(self, session: DraftSession) -> None:
        """The session may have something to do: it is ready, has new orders, or has ended."""
        with self._lock:
            self._woken.append(session)
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._round, Lane.DECODE)

    def _round(self) -> None:
        """Passes until nobody may write, or for `FLUSH_S`: then its cost is charged, and whoever is next goes on."""
        started = time.perf_counter()
        while self._gather():
            self._pass(list(self._writing))
            if time.perf_counter() - started > FLUSH_S:
                if self._thread.is_contended:
                    for session in self._writing:
                        self._send(session)
                self._thread.submit(self._round, Lane.DECODE)
                return

    def _gather(self) -> bool:
        """Who writes in the next pass. False, and the round is over, when nobody does."""
        with self._lock:
            woken, self._woken = self._woken, []
        for session in woken:
            self._writing.setdefault(session)
        for session in list(self._writing):
            if not self._may_write(session):
                self._writing.pop(session, None)
        with self._lock:
            self._is_running = bool(self._writing or self._woken)
            return self._is_running

    def _may_write(self, session: DraftSession) -> bool:
        """Carries out the session's orders, and says whether its line may go on."""
        if session.work.closed:
            return False
        try:
            while session.orders:
                self._carry_out(session)
            line = session.line
            if session.num_sent == len(line.output):
                session.chunk_started_s = time.perf_counter()
            if session.request.tree:
                return self._may_grow(session)
            if len(line.output) < min(line.write_until, self._room(session)):
                return True
            self._send(session)
        except Exception as error:
            self._fail(session, error)
        return False

    def _carry_out(self, session: DraftSession) -> None:
        order, line = session.orders.popleft(), session.line
        if not isinstance(order, RestartLine):
            if order.epoch == line.epoch:
                line.write_until = order.write_until
            return
        if order.keep > len(line.output):
            raise ProtocolViolation(f"a restart keeps {order.keep} tokens, but the line has {len(line.output)}")
        if any(token >= self._model.info.vocab_size for token in order.suffix):
            raise ProtocolViolation("a restart has a token outside the vocabulary")
        output = [*line.output[: order.keep], *order.suffix]
        session.line = DraftLine(order.epoch, order.write_until, order.first_chunk, output)
        session.num_sent = len(output)
        session.proposals.clear()
        state = session.work.state
        num_kept = min(state.num_tokens, state.num_prompt_tokens + order.keep)
        growth, session.growth = session.growth, None
        if growth is None or len(growth.text) != order.keep:
            state.rollback(num_kept)
        else:
            state.keep_path(num_kept, growth.cached_path(order.suffix, state.num_tokens - num_kept))

    def _room(self, session: DraftSession) -> int:
        """Output tokens that the context allows; the last one is written and never read."""
        state = session.work.state
        num_read = state.num_tokens - state.num_prompt_tokens
        return self._model.info.max_context - (state.next_position - num_read) + 1

    def _may_grow(self, session: DraftSession) -> bool:
        """A line is one tree, and ends when it is complete."""
        line = session.line
        if session.growth is None:
            depth = min(line.write_until, self._room(session)) - len(line.output)
            if depth <= 0:
                return False
            session.growth = TreeGrowth(tuple(line.output), depth, started_s=time.perf_counter())
        return not session.growth.is_complete

    def _pass(self, sessions: Sequence[DraftSession]) -> None:
        """The next token of every session, or the next few where that takes no wait between them."""
        num_tokens = min(map(self._room_ahead, sessions), default=0)
        batch = [(session.work.state, session.line.output[-1]) for session in sessions] if num_tokens > 1 else []
        try:
            written = self._model.write_ahead(batch, num_tokens) if batch else None
        except Exception:
            written = None  # a step of one token finds out whose fault it is
        if written is None:
            self._step(sessions)
            return
        for session, token_ids in zip(sessions, written, strict=True):
            self._take(session, token_ids)

    def _room_ahead(self, session: DraftSession) -> int:
        """Tokens that the session may write without a look at their logits."""
        line, state = session.line, session.work.state
        num_unseen = len(line.output) - (state.num_tokens - state.num_prompt_tokens)
        if self._model.static is None or session.growth or num_unseen != 1 or not session.sampler.takes_largest:
            return 0
        return min(line.write_until, self._room(session)) - len(line.output)

    def _take(self, session: DraftSession, written: Sequence[int]) -> None:
        """Of tokens that the model has written by itself those before the first that nobody could have chosen."""
        taken = [*takewhile(lambda token: 0 <= token < session.sampler.vocab_size, written)]
        state = session.work.state
        state.rollback(state.num_tokens - len(written) + len(taken))
        if taken:
            self._append(session, taken)
        else:
            self._step([session])

    def _step(self, sessions: Sequence[DraftSession]) -> None:
        """The next token of every session; the first of a caption comes from the prefill's logits."""
        batch = [(session, session.work.state, _unseen(session)) for session in sessions]
        stepping = [(state, unseen) for _, state, unseen in batch if unseen]
        outcomes = iter(step_each(self._model.step, stepping) if stepping else ())
        for session, _, unseen in batch:
            outcome = next(outcomes) if unseen else session.prompt_logits
            if not isinstance(outcome, torch.Tensor):
                self._fail(session, outcome)
            elif session.growth is not None:
                rows = outcome if isinstance(unseen, TokenTree) else outcome.view(-1, outcome.shape[-1])[-1:]
                self._grow(session, session.growth, rows)
            else:
                self._choose(session, outcome[-1] if unseen else outcome)

    def _grow(self, session: DraftSession, growth: TreeGrowth, rows: torch.Tensor) -> None:
        try:
            growth.grow(rows, session.sampler.rank)
        except Exception as error:
            self._fail(session, error)
            return
        if growth.is_complete:
            tree, pass_s = growth.tree, (time.perf_counter() - growth.started_s) / growth.num_levels
            chunk = DraftTokens(session.line.epoch, len(growth.text), tree.token_ids, pass_s, parents=tree.parents)
            self._loop.call_soon_threadsafe(session.chunks.put_nowait, chunk)

    def _choose(self, session: DraftSession, logits: torch.Tensor) -> None:
        try:
            token, proposal = session.sampler.choose(logits, session.line.output)
        except Exception as error:
            self._fail(session, error)
        else:
            self._append(session, [token], proposal)

    def _append(self, session: DraftSession, token_ids: Sequence[int], proposal: Proposal | None = None) -> None:
        line = session.line
        line.output += token_ids
        if proposal is not None:
            session.proposals.append(proposal)
        is_first = 0 < line.first_chunk <= len(line.output) - session.num_sent
        if is_first or time.perf_counter() - session.chunk_started_s > FLUSH_S:
            self._send(session)

    def _send(self, session: DraftSession) -> None:
        line = session.line
        token_ids = line.output[session.num_sent :]
        if not token_ids:
            return
        pass_s = (time.perf_counter() - session.chunk_started_s) / len(token_ids)
        chunk = DraftTokens(line.epoch, session.num_sent, tuple(token_ids), pass_s, tuple(session.proposals))
        session.proposals.clear()
        session.num_sent, line.first_chunk = len(line.output), 0
        self._loop.call_soon_threadsafe(session.chunks.put_nowait, chunk)

    def _fail(self, session: DraftSession, error: Exception | None) -> None:
        """The session's writing ends here; the others' goes on."""
        assert error is not None, "a line starts from the logits of the prompt"
        self._writing.pop(session, None)
        self._loop.call_soon_threadsafe(session.chunks.put_nowait, error)


def _unseen(session: DraftSession) -> Window:
    """What the model has not taken in of the line, or of its tree; nothing where the prompt's own logits come next."""
    if session.growth is not None and session.growth.fed is not None:
        return session.growth.fed
    state = session.work.state
    return session.line.output[state.num_tokens - state.num_prompt_tokens :]


# -- draft engine -----------------------------------------------------------------------------------------------------

# One draft model and its sessions: encode, prune, prefill, then write a line without waiting.

HEADROOM_TOKENS = 512
"""Room for a line behind the committed tokens, counted when a session is admitted; the draft is not told how long the
text may become."""
FRAMES_WAIT_S = 10.0
"""A caption goes on without a draft, so its session does not wait for long."""


@dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """How much a draft takes on."""

    max_sessions: int
    kv_budget_bytes: int
    frames_budget_bytes: int = 2**40
    embedding_cache_bytes: int = 0


class DraftEngine:
    """Owns the model's thread. Every public method is called on the event loop."""

    def __init__(self, model: VideoLM, thread: ModelThread, limits: DraftLimits) -> None:
        self.model = model
        self.thread = thread
        self.admission = Admission(
            budget_bytes=limits.kv_budget_bytes,
            max_sessions=limits.max_sessions,
            max_queued=0,
            queue_timeout_s=0.0,
            what="draft",
        )
        self.frames = Admission(
            budget_bytes=limits.frames_budget_bytes,
            max_sessions=limits.max_sessions,
            max_queued=limits.max_sessions,
            queue_timeout_s=FRAMES_WAIT_S,
            what="draft",
            of=Memory.FRAMES,
        )
        self.embeddings: ByteLru[bytes, torch.Tensor] = ByteLru(limits.embedding_cache_bytes, "--embedding-cache-mb")
        """Video embeddings by the digest of their frames. Touched on the model's thread only."""
        self._writer = LineWriter(model, thread)

    async def open(
        self, request: DraftStart, join: JoinPoint, num_frames: int, frame_size: tuple[int, int] | None = None
    ) -> DraftSession:
        """Gives a session a place; its frames may come after `admit`. Raises for unknown names, a prompt that does not
        fit, or when there is no room: nobody waits for a draft, as the caption goes on without one."""
        get_pruner(request.pruner)
        check_positions(request.positions)
        num_kept(1, request.alpha)
        plan = await asyncio.to_thread(  # positions of a long video take tens of milliseconds
            self.model.plan_prompt,
            request.prompt,
            num_frames,
            frame_size=frame_size,
            seconds_per_frame=request.seconds_per_frame,
            times_s=request.times_s,
        )
        if any(token >= self.model.info.vocab_size for token in join.committed):
            raise ProtocolViolation("a committed token is outside the vocabulary")
        num_video_tokens = num_kept(plan.num_video_tokens, request.alpha)
        num_tokens = plan.num_tokens - plan.num_video_tokens + num_video_tokens + len(join.committed)
        line = DraftLine(join.epoch, join.write_until, join.first_chunk, list(join.committed))
        width = min(self.model.info.vocab_size, request.vocab_size or self.model.info.vocab_size)
        sampler = DraftSampler(request.sampling, plan.token_ids, width)
        work = SessionWork(self.thread, self.frames.reserve(frames_bytes(num_frames, frame_size)))
        try:
            place = self.admission.reserve(self.model.kv_bytes(num_tokens + HEADROOM_TOKENS))
        except SlipstreamError:
            work.free_frames()
            raise
        return DraftSession(request, plan, work, place, sampler, line, num_sent=len(join.committed))

    async def admit(self, session: DraftSession) -> None:
        """Waits for room for the session's frames, which others soon give back. Raises `Overloaded`."""
        async for _ in session.work.wait_for_frames():
            pass

    def close(self, session: DraftSession) -> asyncio.Future[None]:
        """Ends a session. Its memory is freed after the pass that may be running, on the model's thread; then the
        result is done."""
        released = session.work.close(then=session.place.release)
        session.chunks.put_nowait(None)
        self._writer.wake(session)
        return released

    async def encode(self, session: DraftSession) -> tuple[torch.Tensor, float]:
        """Video embeddings [tokens, hidden] of all frames, which are freed then, and the seconds that took. Those of an
        earlier session with the same frames are taken where they were kept."""
        keeps, work = self.embeddings.limit_bytes > 0, session.work
        digest = await asyncio.to_thread(frames_digest, work.received_frames) if keeps else None
        blocks = [block async for block in work.run_blocks(self._encode(work, digest))]
        work.free_frames()
        return blocks[-1][0], sum(seconds for _, seconds in blocks)

    def _encode(self, work: SessionWork, digest: bytes | None) -> Iterator[tuple[torch.Tensor, float]]:
        """Block after block; all of them together come last."""
        known = self.embeddings.get(digest) if digest is not None else None
        if known is not None:
            yield known, 0.0
            return
        blocks = []
        for block, seconds in encode_blocks(self.model, work, len(work.received_frames)):
            blocks.append(block)
            yield block, seconds
        embeddings = torch.cat(blocks)
        if digest is not None:
            self.embeddings.put(digest, embeddings, embeddings.nbytes)
        yield embeddings, 0.0

    async def choose_tokens(
        self, session: DraftSession, embeddings: torch.Tensor, guidance: Guidance | None
    ) -> tuple[torch.Tensor, float]:
        """Indices of the video tokens to keep, ascending int64, and the seconds that took."""
        request, plan = session.request, session.plan
        pruner = get_pruner(request.pruner)
        video = VideoTokens(plan.num_video_tokens, plan.num_steps, embeddings[:, : self.model.info.hidden_size])

        def choose() -> torch.Tensor:
            here = None if guidance is None else guidance.to(embeddings.device)  # states are rated faster on a GPU
            return prune(pruner, video, request.alpha, guidance=here, seed=request.seed)

        return await session.work.run(choose)

    async def prefill(self, session: DraftSession, embeddings: torch.Tensor, keep: torch.Tensor) -> float:
        """Runs the pruned prompt through the layers; returns the seconds that took."""
        return sum([seconds async for seconds in session.work.run_blocks(self._prefill(session, embeddings, keep))])

    def _prefill(self, session: DraftSession, embeddings: torch.Tensor, keep: torch.Tensor) -> Iterator[float]:
        started = time.perf_counter()
        headroom = len(session.line.output) + HEADROOM_TOKENS
        prefill = self.model.start_prefill(
            session.plan, embeddings, keep=keep, positions=session.request.positions, headroom=headroom
        )
        session.work.on_release(prefill.cache.clear)
        for layer in range(1, self.model.info.num_layers + 1):
            prefill.run_layers(layer)
            yield time.perf_counter() - started
            started = time.perf_counter()
        session.work.state, session.prompt_logits = prefill.finish()
        yield time.perf_counter() - started

    def restart(self, session: DraftSession, action: RestartLine) -> None:
        """Ends the line that is being written, at the latest after the token that is being computed."""
        session.orders.append(action)
        self._writer.wake(session)

    def advance(self, session: DraftSession, action: AdvanceLine) -> None:
        """Moves the limit of the line, if it is still the one that is written."""
        session.orders.append(action)
        self._writer.wake(session)

    async def write(self, session: DraftSession) -> AsyncIterator[DraftTokens]:
        """What is written until the session is closed: as far as the line may go, then as it is told more."""
        self._writer.wake(session)
        while (chunk := await session.chunks.get()) is not None:
            if isinstance(chunk, Exception):
                try:
                    raise chunk
                finally:
                    del chunk  # an error knows its traceback, which leads here and to the session
            yield chunk
