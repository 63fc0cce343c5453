"""Judges windows: every session's passes are packed with the others', and each has its own verdict."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from slipstream.engine.batcher import MAX_STEPS, Step, StepBatcher
from slipstream.engine.local_drafter import Drafting, DraftingSession, HintRoom, LocalDrafter
from slipstream.engine.rides import Rides
from slipstream.engine.segments import GreedyRows, Window
from slipstream.engine.target_prefill import TargetSession
from slipstream.engine.thread import Lane, ModelThread
from slipstream.engine.video_lm import VideoLM
from slipstream.errors import InvalidRequest
from slipstream.messages import TokenLogprob
from slipstream.sampling.params import MOST_TOLD
from slipstream.session_messages import Judgement, JudgeRequest, PassFacts
from slipstream.speculation.hints.tolerance import EXACT, Rating, Tolerance, accept_tolerantly
from slipstream.speculation.lines import MAX_NODES as MAX_ROWS
from slipstream.speculation.methods import METHODS
from slipstream.speculation.pacing import WindowCosts
from slipstream.speculation.protocol import ROOT, FinishReason, TokenTree, Verdict, accept_tree, end_verdict


class WindowJudge:
    """Runs the passes of all sessions of one target."""

    def __init__(self, model: VideoLM, thread: ModelThread, rides: Rides | None = None) -> None:
        self._model = model
        self._batcher = StepBatcher(model, thread, max_steps=1 if model.strict_width else MAX_STEPS, rides=rides)
        self._longest_window = model.strict_width - 1 if model.strict_width else None
        self._costs = WindowCosts()
        """T_p(k) of all sessions. Touched on the model's thread only."""

    async def judge(self, session: TargetSession, request: JudgeRequest) -> AsyncIterator[Judgement]:
        """The first pass judges the window, each further one adds a token; less when the text ends before. Where the
        session drafts for itself, every pass judges what was drafted for it, too.

        The first call must bring an empty window: it answers from the prefill's logits, without a pass. The next one
        must wait for the last judgement of the one before.
        """
        if session.rule.max_new_tokens <= len(session.committed):
            raise InvalidRequest("the text of this session has ended")
        vocab_size = self._model.info.vocab_size
        if any(token >= vocab_size for token in request.window):
            raise InvalidRequest(f"the window has a token outside the vocabulary of {vocab_size}")
        if request.self_draft and session.drafter_type is None:
            raise InvalidRequest("this session was opened without a drafter of its own")
        if request.self_draft and request.window and not METHODS[session.request.local_drafter].is_hybrid:
            raise InvalidRequest(f"{session.request.local_drafter!r} drafts alone, and takes no window beside its own")
        if not session.committed:
            judgement, _ = await session.work.run(partial(_first_judgement, session), Lane.DECODE)
            yield judgement
            return
        passes = _RequestedPasses(
            session, self._batcher, request, self._longest_window, self._model.info.max_context, self._costs
        )
        if request.self_draft:
            await session.work.run(passes.begin_drafting, Lane.DECODE)
        else:
            passes.begin()
        async for judgement in passes.results():
            yield judgement

    def forget(self, session: TargetSession) -> None:
        """The session has ended: its waiting step is dropped and no pass waits for its next."""
        self._batcher.forget(session.work)


@dataclass(eq=False)
class _RequestedPasses:
    """The passes that one message asks for. Each further one is handed in where the last one ended, on the model's
    thread, so that plain decoding waits for no event loop."""

    session: TargetSession
    batcher: StepBatcher
    request: JudgeRequest
    longest_window: int | None
    max_context: int
    """Positions that the model knows."""
    costs: WindowCosts

    def __post_init__(self) -> None:
        self._num_left = self.request.num_passes
        self._asked_s: float | None = time.perf_counter()
        """When the first pass was asked for, before anything was drafted for it; None: it was handed in."""
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Queue[Judgement | Exception | None] = asyncio.Queue()
        self._nodes: tuple[int, ...] = ()
        """The nodes of the tree that was asked about which are judged: those that can be committed."""
        self._num_given = 0
        """Tokens that the pass judges of the window that was asked about, beside those drafted here."""

    def begin(self) -> None:
        """Hands in the first pass."""
        tree = self.request.tree
        if tree is None:
            window = self.request.window[: self._room][: self.longest_window]
            self._judge(JudgeRequest(window, proposals=self.request.proposals))
        elif self.longest_window is not None:  # of a tree such passes judge the likeliest path
            self._nodes = tree.first_path[: self._room][: self.longest_window]
            self._judge(JudgeRequest(tuple(tree.token_ids[node] for node in self._nodes)))
        else:
            tree, self._nodes = tree.shallow(self._room, self._room_for_nodes)
            self._judge(JudgeRequest(tree.token_ids if tree else (), tree=tree))

    def begin_drafting(self) -> None:
        """Begins to draft for the first pass. On the model's thread, as all that drafters do."""
        session = self.session
        if session.drafter is None:
            session.drafter = _make_drafter(session, self.costs, self.longest_window)
            session.work.on_release(session.drafter.close)
        self._draft(session.drafter, self.request.window)

    async def results(self) -> AsyncIterator[Judgement]:
        try:
            while (judgement := await self._done.get()) is not None:
                if isinstance(judgement, Exception):
                    try:
                        raise judgement
                    finally:
                        del judgement  # an error knows its traceback, which leads here and to the session
                yield judgement
        finally:
            self._num_left = 0

    @property
    def _room(self) -> int:
        """Tokens that can be committed beside the pass's own, and have a position in the context."""
        left = self.session.rule.max_new_tokens - len(self.session.committed) - 1
        return max(0, min(left, self.max_context - self.session.work.state.next_position - 1))

    @property
    def _room_for_nodes(self) -> int:
        """Of a tree, beside the last committed token: a cache that grows copies a whole video's rows, and takes memory
        that nobody has counted. There is room for at least as many nodes as can be committed."""
        cache = self.session.work.state.cache
        return max(0, cache.capacity - cache.length - 1)

    def _draft(self, drafter: LocalDrafter, window: tuple[int, ...] = ()) -> None:
        """Has the next window drafted, which is then judged; the given `window` is a part of it."""
        num_tokens = min(max(self.request.self_draft, len(window)), self._room)
        if self.longest_window is not None:
            num_tokens = min(num_tokens, self.longest_window)
        window = window[:num_tokens]
        self._num_given = len(window)
        committed = self.session.committed
        if window:
            drafting = drafter.draft_beside(window, committed, num_tokens)
        else:
            drafting = drafter.draft(committed, num_tokens)
        self._go_on_drafting(drafting, num_tokens)

    def _go_on_drafting(
        self, drafting: Drafting, num_tokens: int, logits: torch.Tensor | None = None, draft_s: float = 0.0
    ) -> None:
        started = time.perf_counter()
        try:
            state, window = next(drafting) if logits is None else drafting.send(logits)
        except StopIteration as done:
            self._judge(
                _drafted(done.value, num_tokens, not _tolerance(self.session).is_lossy),
                draft_s + time.perf_counter() - started,
            )
            return

        def on_rows(rows: GreedyRows, facts: PassFacts) -> bool:
            self._go_on_drafting(drafting, num_tokens, rows.logits, draft_s + facts.pass_s)
            return True

        self.batcher.submit(Step(self.session.work, state, window, on_rows, self._tell, is_drafting=True))

    def _judge(self, request: JudgeRequest, draft_s: float = 0.0) -> None:
        self._num_left -= 1
        session = self.session
        on_rows = partial(self._on_rows, request, draft_s)
        window, takes_largest = _rows(session.committed[-1], request), session.sampler.takes_largest
        step = Step(session.work, session.work.state, window, on_rows, self._tell, takes_largest=takes_largest)
        if self._asked_s is not None:
            step.handed_in_s, self._asked_s = self._asked_s + draft_s, None
        self.batcher.submit(step)

    def _on_rows(self, request: JudgeRequest, draft_s: float, rows: GreedyRows, facts: PassFacts) -> bool:
        self.costs.observe(len(request.window), facts.pass_s, facts.company)
        num_drafted = len(request.window) - self._num_given if self.request.self_draft else 0
        facts = replace(facts, num_drafted=num_drafted, draft_s=draft_s)
        judgement = _judgement(self.session, rows, request, facts)
        judgement = replace(judgement, verdict=self._told(judgement.verdict, request))
        text_goes_on = judgement.verdict.finish_reason is None
        if text_goes_on and self._num_left > 0:
            if self.session.drafter is not None and self.request.self_draft:
                self._draft(self.session.drafter)
            else:
                self._judge(JudgeRequest())
            self._tell(judgement)
        else:
            self._tell(judgement, None)
        return text_goes_on

    def _told(self, verdict: Verdict, request: JudgeRequest) -> Verdict:
        """The verdict in words that the caller knows: nodes of its own tree, tokens that it has not seen."""
        if self.request.self_draft:
            accepted = verdict.path or range(verdict.num_accepted)
            return replace(verdict, path=(), drafted=tuple(request.window[node] for node in accepted))
        if self.request.tree is None:
            return verdict
        accepted = verdict.path or range(verdict.num_accepted)
        return replace(verdict, path=tuple(self._nodes[node] for node in accepted))

    def _tell(self, *outcomes: Judgement | Exception | None) -> None:
        for outcome in outcomes:
            self._loop.call_soon_threadsafe(self._done.put_nowait, outcome)


def _drafted(drafted: Sequence[int] | TokenTree | None, num_tokens: int, may_be_chain: bool) -> JudgeRequest:
    """The pass over what a drafter returned, which may be more than it was asked for. A tree without branches is judged
    as a chain, which takes fewer steps; but tolerance is of trees."""
    if isinstance(drafted, TokenTree):
        tree, _ = drafted.shallow(num_tokens)
        branches = tree is not None and not (tree.is_chain and may_be_chain)
        return JudgeRequest(tree.token_ids if tree else (), tree=tree if branches else None)
    return JudgeRequest(tuple(drafted or ())[:num_tokens])


def _rows(last_token: int, request: JudgeRequest) -> Window:
    """What the pass takes in: the last committed token, which is in no cache yet, and the window behind it."""
    if request.tree is None:
        return (last_token, *request.window)
    return TokenTree((last_token, *request.window), (ROOT, *(parent + 1 for parent in request.tree.parents)))


def _make_drafter(session: TargetSession, costs: WindowCosts, longest_window: int | None) -> LocalDrafter:
    assert session.drafter_type is not None
    hints, strict_width = session.request.hints, 0 if longest_window is None else longest_window + 1
    return session.drafter_type(
        DraftingSession(
            plan=session.plan,
            state=session.work.state,
            attention=session.attention,
            sampler=session.sampler,
            num_kept=session.request.self_draft_kept,
            headroom=session.request.max_new_tokens + strict_width,
            vocab_size=session.sampler.vocab_size,
            max_rows=min(hints.max_rows if hints else 0, longest_window or MAX_ROWS),
            as_chain=longest_window is not None,
            costs=costs,
            hints=session.hints or HintRoom(),
        )
    )


def _first_judgement(session: TargetSession) -> Judgement:
    """On the model's thread, which has waited for no pass."""
    assert session.first_logits is not None
    logits, session.first_logits = session.first_logits[None], None
    return _judgement(session, GreedyRows(logits), JudgeRequest(), PassFacts(0.0))


def _judgement(session: TargetSession, rows: GreedyRows, request: JudgeRequest, facts: PassFacts) -> Judgement:
    """On the model's thread: decides from the len(window) + 1 rows, forgets what was rejected, commits the rest."""
    verdict = _decide(session, rows, request)
    text = session.text.push(verdict.committed(request.window), last=verdict.finish_reason is not None)
    if text.stop:
        verdict = verdict.ended_at(len(text.pieces) - 1, FinishReason.STOP, text.stop)
    num_before = session.plan.num_tokens + len(session.committed)
    if request.tree is None:
        session.work.state.rollback(num_before + verdict.num_accepted)
    else:
        session.work.state.keep_path(num_before - 1, (0, *(node + 1 for node in verdict.path)))
    session.committed.extend(verdict.committed(request.window))
    if session.drafter is not None:
        session.drafter.on_commit()
    likely = _likely(session, rows, verdict, request) if session.request.logprobs else ((), ())
    return Judgement(verdict, tuple(text.pieces), facts, *likely)


def _likely(
    session: TargetSession, rows: GreedyRows, verdict: Verdict, request: JudgeRequest
) -> tuple[tuple[float, ...], tuple[TokenLogprob, ...]]:
    """How likely each committed token was, by the row behind which it stands, and the likeliest tokens there."""
    tokens = verdict.committed(request.window)
    behind = [0, *(node + 1 for node in verdict.path or range(verdict.num_accepted))][: len(tokens)]
    logprobs, best = rows.likely(behind, tokens, num_best=min(session.request.top_logprobs, MOST_TOLD))
    begins = len(tokens) == len(session.committed)
    return tuple(logprobs), tuple(
        TokenLogprob(token, session.text.alone(token, begins=begins), chance) for token, chance in best
    )


def _tolerance(session: TargetSession) -> Tolerance:
    hints = session.request.hints
    return EXACT if hints is None else hints.tolerance


def _decide(session: TargetSession, rows: GreedyRows, request: JudgeRequest) -> Verdict:
    committed, sampler, window = session.committed, session.sampler, request.window
    logits, largest = rows.logits, rows.largest
    if request.tree is None:
        num_accepted, own_token = sampler.judge(logits, committed, window, request.proposals, largest)
        return end_verdict(window, num_accepted, own_token, len(committed), session.rule)

    def choose(row: int, path: tuple[int, ...]) -> int:
        """The target's own choice there: a tree is judged by equality with it under every sampling rule."""
        text = [*committed, *(window[node] for node in path)]
        _, token = sampler.judge(logits[row : row + 1], text, (), largest=largest[row : row + 1])
        return token

    def rate(row: int, path: tuple[int, ...], candidates: Sequence[int]) -> Rating:
        return sampler.rate(logits[row : row + 1], [*committed, *(window[node] for node in path)], candidates)

    if (tolerance := _tolerance(session)).is_lossy:
        path, own_token = accept_tolerantly(request.tree, rate, tolerance)
    else:
        path, own_token = accept_tree(request.tree, choose)
    return end_verdict(window, len(path), own_token, len(committed), session.rule, path)
