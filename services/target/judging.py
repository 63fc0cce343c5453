"""Judges windows: every session's passes are packed with the others', and each has its own verdict. Knows no wire."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import torch

from services.target.session import Judgement, TargetSession
from slipstream.errors import InvalidRequest
from slipstream.models.base import VideoLM
from slipstream.models.batcher import MAX_STEPS, Step, StepBatcher
from slipstream.models.thread import Lane, ModelThread
from slipstream.sampling.params import Proposal
from slipstream.speculation.acceptance import FinishReason, end_verdict


class Judge:
    """Runs the passes of all sessions of one target."""

    def __init__(self, model: VideoLM, thread: ModelThread) -> None:
        self._model = model
        self._batcher = StepBatcher(model, thread, max_steps=1 if model.strict_width else MAX_STEPS)
        self._longest_window = model.strict_width - 1 if model.strict_width else None

    async def judge(
        self,
        session: TargetSession,
        window: tuple[int, ...],
        num_passes: int = 1,
        proposals: tuple[Proposal, ...] = (),
    ) -> AsyncIterator[Judgement]:
        """The first pass judges the window, each further one adds a token; less when the text ends before.

        The first call must bring an empty window: it answers from the prefill's logits, without a pass. The next one
        must wait for the last judgement of the one before. `proposals` are those of the window's tokens, where the
        sampling rule needs them.
        """
        if session.rule.max_new_tokens <= len(session.committed):
            raise InvalidRequest("the text of this session has ended")
        vocab_size = self._model.info.vocab_size
        if any(token >= vocab_size for token in window):
            raise InvalidRequest(f"the window has a token outside the vocabulary of {vocab_size}")
        room = session.rule.max_new_tokens - len(session.committed) - 1
        window = window[:room]  # more could not be committed beside the pass's own token, nor fit the context
        window = window[: self._longest_window]
        if not session.committed:
            judgement, _ = await session.work.run(partial(_first_judgement, session), Lane.DECODE)
            yield judgement
            return
        passes = _Passes(session, self._batcher, num_passes)
        passes.start(window, proposals)
        async for judgement in passes.results():
            yield judgement

    def forget(self, session: TargetSession) -> None:
        """The session has ended: its waiting step is dropped and no pass waits for its next."""
        self._batcher.forget(session.work)


@dataclass(eq=False)
class _Passes:
    """The passes that one message asks for. Each further one is handed in where the last one ended, on the model's
    thread, so that plain decoding waits for no event loop."""

    session: TargetSession
    batcher: StepBatcher
    num_left: int

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Queue[Judgement | Exception | None] = asyncio.Queue()

    def start(self, window: tuple[int, ...] = (), proposals: tuple[Proposal, ...] = ()) -> None:
        self.num_left -= 1
        session = self.session
        step = Step(
            session.work,
            session.work.state,
            (session.committed[-1], *window),
            on_logits=partial(self._on_logits, window, proposals),
            on_error=self._tell,
        )
        self.batcher.submit(step)

    async def results(self) -> AsyncIterator[Judgement]:
        try:
            while (judgement := await self._done.get()) is not None:
                if isinstance(judgement, Exception):
                    raise judgement
                yield judgement
        finally:
            self.num_left = 0

    def _on_logits(
        self, window: tuple[int, ...], proposals: tuple[Proposal, ...], logits: torch.Tensor, pass_s: float
    ) -> bool:
        judgement = _judgement(self.session, logits, window, proposals, pass_s)
        text_goes_on = judgement.verdict.finish_reason is None
        if text_goes_on and self.num_left > 0:
            self.start()
            self._tell(judgement)
        else:
            self._tell(judgement, None)
        return text_goes_on

    def _tell(self, *outcomes: Judgement | Exception | None) -> None:
        for outcome in outcomes:
            self._loop.call_soon_threadsafe(self._done.put_nowait, outcome)


def _first_judgement(session: TargetSession) -> Judgement:
    """On the model's thread, which has waited for no pass."""
    assert session.first_logits is not None
    logits, session.first_logits = session.first_logits[None], None
    return _judgement(session, logits, (), (), 0.0)


def _judgement(
    session: TargetSession,
    logits: torch.Tensor,
    window: tuple[int, ...],
    proposals: tuple[Proposal, ...],
    pass_s: float,
) -> Judgement:
    """On the model's thread: decides from the logits [len(window) + 1, vocab], forgets what was rejected, commits the
    rest."""
    num_accepted, own_token = session.sampler.judge(logits, session.committed, window, proposals)
    verdict = end_verdict(window, num_accepted, own_token, len(session.committed), session.rule)
    text = session.text.push(verdict.committed(window), last=verdict.finish_reason is not None)
    if text.stop:
        verdict = verdict.ended_at(len(text.pieces) - 1, FinishReason.STOP, text.stop)
    session.work.state.rollback(session.plan.num_tokens + len(session.committed) + verdict.num_accepted)
    session.committed.extend(verdict.committed(window))
    return Judgement(verdict, text.pieces, pass_s)
