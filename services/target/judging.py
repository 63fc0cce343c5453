"""Judges windows: every session's passes are packed with the others', and each has its own verdict. Knows no wire."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import torch

from services.target.session import Judgement, TargetSession
from slipstream.errors import InvalidRequest
from slipstream.models.base import VideoLM
from slipstream.models.batcher import Step, StepBatcher
from slipstream.models.thread import Lane, ModelThread
from slipstream.speculation.acceptance import Verdict, judge_window


class Judge:
    """Runs the passes of all sessions of one target."""

    def __init__(self, model: VideoLM, thread: ModelThread) -> None:
        self._model = model
        self._batcher = StepBatcher(model, thread)

    async def judge(
        self, session: TargetSession, window: tuple[int, ...], num_passes: int = 1
    ) -> AsyncIterator[Judgement]:
        """The first pass judges the window, each further one adds a token; less when the text ends before.

        The first call must bring an empty window: it answers from the prefill's logits, without a pass. The next one
        must wait for the last judgement of the one before.
        """
        if session.rule.max_new_tokens <= len(session.committed):
            raise InvalidRequest("the text of this session has ended")
        vocab_size = self._model.info.vocab_size
        if any(token >= vocab_size for token in window):
            raise InvalidRequest(f"the window has a token outside the vocabulary of {vocab_size}")
        room = session.rule.max_new_tokens - len(session.committed) - 1
        window = window[:room]  # more could not be committed beside the pass's own token, nor fit the context
        if not session.committed:
            judgement, _ = await session.work.run(partial(_first_judgement, session), Lane.DECODE)
            yield judgement
            return
        passes = _Passes(session, self._batcher, num_passes)
        passes.start(window)
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

    def start(self, window: tuple[int, ...]) -> None:
        self.num_left -= 1
        session = self.session
        step = Step(
            session.work,
            session.work.state,
            (session.committed[-1], *window),
            on_logits=partial(self._on_logits, window),
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

    def _on_logits(self, window: tuple[int, ...], logits: torch.Tensor, pass_s: float) -> bool:
        judgement = _judgement(self.session, logits, window, pass_s)
        text_goes_on = judgement.verdict.finish_reason is None
        if text_goes_on and self.num_left > 0:
            self.start(())
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
    return _judgement(session, logits, (), 0.0)


def _judgement(session: TargetSession, logits: torch.Tensor, window: tuple[int, ...], pass_s: float) -> Judgement:
    """On the model's thread: decides, forgets what was rejected, commits the rest."""
    verdict = _verdict(session, logits, window)
    num_kept = session.plan.num_tokens + len(session.committed) + verdict.num_accepted
    session.work.state.rollback(num_kept)
    committed = verdict.committed(window)
    session.committed.extend(committed)
    pieces = session.text.push(committed)
    if verdict.finish_reason is not None:
        pieces[-1] += session.text.flush()
    return Judgement(verdict, pieces, pass_s)


def _verdict(session: TargetSession, logits: torch.Tensor, window: tuple[int, ...]) -> Verdict:
    """What the target says of a window, from the logits [len(window) + 1, vocab] after the committed text and so on."""
    return judge_window(window, logits.argmax(dim=-1).tolist(), len(session.committed), session.rule)
