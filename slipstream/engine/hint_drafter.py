"""Drafters that run no model: trees of text that is already there, see `slipstream.speculation.hints`."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from slipstream.engine.local_drafter import PIECE_TOKENS, Drafting, DraftingSession, LocalDrafter
from slipstream.speculation.hints.draft_tree import TreeLimits
from slipstream.speculation.hints.strategies import HintStrategy, LineRecord, Lookup, Resynchronising, Windowed


class HintDrafter(LocalDrafter):
    """Proposes the tree of a strategy, which hears all hints and all that is committed."""

    counts_costs: ClassVar[bool] = True
    """Rows are added while they pay by the measured T_p(k); else as many as the session may have."""

    def __init__(self, session: DraftingSession) -> None:
        self._session = session
        self._strategy = self.make_strategy(session)
        self._line = LineRecord()
        self._num_told = 0

    @staticmethod
    @abstractmethod
    def make_strategy(session: DraftingSession) -> HintStrategy:
        """What makes trees of the hints."""

    def draft(self, committed: Sequence[int], num_tokens: int) -> Drafting:
        return self.draft_beside((), committed, num_tokens)

    def draft_beside(self, line: Sequence[int], committed: Sequence[int], num_tokens: int) -> Drafting:
        yield from ()
        session, strategy = self._session, self._strategy
        num_read = 0
        while session.hints.waiting and num_read < PIECE_TOKENS:
            piece = session.hints.waiting.popleft()
            strategy.add(piece.token_ids, goes_on=piece.goes_on)
            num_read += len(piece.token_ids)
        strategy.commit(committed[self._num_told :])
        self._line.learn(committed[self._num_told :])
        self._num_told = len(committed)
        limits = TreeLimits(num_tokens, session.max_rows, as_chain=session.as_chain)
        if line:
            limits = replace(limits, line=tuple(line), line_survival=self._line.begin(line))
        return strategy.propose(replace(limits, pass_s=session.costs.price()) if self.counts_costs else limits)


class HintsDrafter(HintDrafter):
    """Ours: finds its place again after an error."""

    @staticmethod
    def make_strategy(session: DraftingSession) -> HintStrategy:
        return Resynchronising(session.vocab_size)


class HsdDrafter(HintDrafter):
    """As its paper has it. Its trees depend on the text and the hints alone, so that a lossy text can be made again."""

    counts_costs = False

    @staticmethod
    def make_strategy(session: DraftingSession) -> HintStrategy:
        return Windowed(session.vocab_size)


class LookupDrafter(HintDrafter):
    """Prompt lookup: the hint is the text of the prompt, and what was answered so far."""

    @staticmethod
    def make_strategy(session: DraftingSession) -> HintStrategy:
        return Lookup(session.vocab_size, session.plan.token_ids[session.plan.text_start :])
