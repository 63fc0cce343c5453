"""One draft model and its sessions: encode, prune, prefill, then write a line without waiting. Knows no wire."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.budget import Admission, MemoryUse, Turns
from slipstream.engine.branches import BranchedLine, MainPath
from slipstream.engine.draft_session import Chain, DraftLine, DraftSession
from slipstream.engine.line_writer import LineWriter
from slipstream.engine.prefix_cache import ByteLru, frames_digest
from slipstream.engine.session_work import (
    PROMPT_BEHIND_PEOPLE_S,
    SessionWork,
    encode_blocks,
    frames_bytes,
    plan_session,
)
from slipstream.engine.static_tree import StaticTreeLine
from slipstream.engine.thread import ModelThread
from slipstream.engine.video_lm import Prefill, VideoLM
from slipstream.errors import InvalidRequest, ProtocolViolation
from slipstream.pruning import Guidance, VideoTokens, get_pruner, prune
from slipstream.sampling.sampler import DraftSampler
from slipstream.sampling.structure import Structures
from slipstream.session_messages import DraftStart, DraftTokens
from slipstream.speculation.lines import MAX_NODES
from slipstream.speculation.methods import check_positions
from slipstream.speculation.protocol import JoinPoint, LineAction
from slipstream.speculation.trees.calibration import Calibration
from slipstream.speculation.trees.growth import Growth

HEADROOM_TOKENS = 512
"""Least room for a line behind the committed tokens: for trees beside short texts, and where the draft is not told how
long the text may become."""
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
            of=MemoryUse.FRAMES,
        )
        self.embeddings: ByteLru[bytes, torch.Tensor] = ByteLru(limits.embedding_cache_bytes, "--embedding-cache-mb")
        """Video embeddings by the digest of their frames. Touched on the model's thread only."""
        self._turns = Turns(PROMPT_BEHIND_PEOPLE_S)
        self._calibrations = {greedy: Calibration() for greedy in (True, False)}
        """Candidates of texts that are sampled are others. Touched on the model's thread only."""
        self._structures = Structures(model.text.tokenizer, model.info.vocab_size, model.info.eos_token_ids)
        self._writer = LineWriter(model, thread)

    async def open(
        self, request: DraftStart, join: JoinPoint, num_frames: int, frame_size: tuple[int, int] | None = None
    ) -> DraftSession:
        """Gives a session a place; its frames, if it has any, may come after `admit`. Raises for unknown names, a
        prompt that does not fit, or when there is no room: nobody waits for a draft, as the caption goes on without
        one."""
        pruner = get_pruner(request.pruner)
        check_positions(request.positions)
        growth = _checked_growth(request)
        pruner.num_kept(1, request.alpha)
        plan = await plan_session(self.model, request, num_frames, frame_size)
        if any(token >= self.model.info.vocab_size for token in join.committed):
            raise ProtocolViolation("a committed token is outside the vocabulary")
        num_video_tokens = pruner.num_kept(plan.num_video_tokens, request.alpha)
        num_tokens = plan.num_tokens - plan.num_video_tokens + num_video_tokens
        num_tokens += answer_room(request, len(join.committed))
        width = min(self.model.info.vocab_size, request.vocab_size or self.model.info.vocab_size)
        asked = request.sampling
        structure = await self._structures.opened(asked) if asked.is_structured else None
        sampler = DraftSampler(asked, plan.token_ids, width, structure, self.model.info.eos_token_ids)
        num_frames_bytes = frames_bytes(num_frames, frame_size)
        self.frames.check(num_frames_bytes)
        place = self.admission.reserve(self.model.kv_bytes(num_tokens))
        in_background = request.in_background
        work = SessionWork(self.thread, self._turns, self.frames, num_frames_bytes, in_background=in_background)
        work.take_turn(plan.num_tokens)
        begin = partial(self._line, request, sampler, growth)
        return DraftSession(request, plan, work, place, begin, begin(join))

    def _line(self, request: DraftStart, sampler: DraftSampler, growth: Growth | None, start: JoinPoint) -> DraftLine:
        """Of the kind that a request asks for."""
        if request.tree:
            return StaticTreeLine(start, sampler)
        if growth is None:
            return Chain(start, sampler)
        if not growth.extends_branches:
            return MainPath(growth, start, sampler)
        return BranchedLine(growth, self._calibrations[request.sampling.greedy], start, sampler)

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
        earlier session with the same frames, by their digest, are taken where they were kept."""
        keeps, work = self.embeddings.limit_bytes > 0, session.work
        started = time.perf_counter()
        digest = await asyncio.to_thread(frames_digest, work.received_frames) if keeps else None
        digest_s = time.perf_counter() - started
        if digest is not None and self.embeddings.has(digest):
            work.take_turn(session.plan.num_tokens - session.plan.num_video_tokens)
        blocks = [block async for block in work.run_blocks(self._encode(work, digest))]
        work.free_frames()
        return blocks[-1][0], digest_s + sum(seconds for _, seconds in blocks)

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

        def start(headroom: int) -> Prefill:
            positions = session.request.positions
            return self.model.start_prefill(session.plan, embeddings, keep=keep, positions=positions, headroom=headroom)

        return sum([seconds async for seconds in session.work.run_blocks(self._prefill(session, start))])

    async def prefill_text(self, session: DraftSession) -> float:
        """The same of a prompt about no video, of which nothing is pruned."""

        def start(headroom: int) -> Prefill:
            return self.model.start_text(session.plan, headroom=headroom)

        return sum([seconds async for seconds in session.work.run_blocks(self._prefill(session, start))])

    def _prefill(self, session: DraftSession, start: Callable[[int], Prefill]) -> Iterator[float]:
        started = time.perf_counter()
        prefill = start(answer_room(session.request, len(session.line.output)))
        session.work.on_release(prefill.cache.clear)
        for layer in range(1, self.model.info.num_layers + 1):
            prefill.run_layers(layer)
            yield time.perf_counter() - started
            started = time.perf_counter()
        session.work.state, session.prompt_logits = prefill.finish()
        yield time.perf_counter() - started

    def order(self, session: DraftSession, action: LineAction) -> None:
        """A restart ends the line that is being written, at the latest after the token that is being computed. What is
        of a line that is over already does nothing."""
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


def answer_room(request: DraftStart, num_known: int) -> int:
    """Tokens of the answer that the cache has room for, of which so many are there; counted when a session is
    admitted."""
    return max(num_known + HEADROOM_TOKENS, request.max_new_tokens)


def _checked_growth(request: DraftStart) -> Growth | None:
    """How the line of a request branches; None where it is no dynamic tree. Raises `InvalidRequest` for one that no
    gateway asks for."""
    if not request.width:
        return None
    growth = Growth(request.width, max(request.max_rows, 1), least_chance=request.least_chance)
    if request.tree or growth.nodes_per_pass > MAX_NODES:
        raise InvalidRequest(f"a dynamic tree is no static one, and a pass adds at most {MAX_NODES} nodes to it")
    if not 0.0 <= growth.least_chance <= 1.0:  # so NaN is
        raise InvalidRequest(f"no node has a chance of {growth.least_chance:g}; least_chance is from 0 to 1")
    return growth
