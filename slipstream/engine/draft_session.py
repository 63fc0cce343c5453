"""One caption at the draft: what was asked, and the line that it writes: a chain unless a tree was asked for."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.budget import Reservation
from slipstream.engine.forward import DecodeState
from slipstream.engine.segments import Window
from slipstream.engine.session_work import SessionWork
from slipstream.engine.video_lm import PromptPlan
from slipstream.engine.written_tree import Ranked
from slipstream.sampling.params import Proposal
from slipstream.sampling.sampler import DraftSampler
from slipstream.session_messages import DraftStart, DraftTokens
from slipstream.speculation.protocol import JoinPoint, LineAction, RestartLine
from slipstream.speculation.trees.rows import PassTime

# -- tokens that the model writes by itself ---------------------------------------------------------------------------

# What is noted of them, or chosen, while it goes on.


@dataclass(frozen=True, slots=True)
class Ahead:
    """What was found out of one session's tokens. Of what it has, one for each of them."""

    candidates: Sequence[Ranked] = ()
    proposals: Sequence[Proposal] = ()


class LargestAhead:
    """The model goes on with the largest of the logits. The likeliest tokens at each place are kept, which nobody waits
    for meanwhile."""

    def __init__(self, num_sessions: int, width: int) -> None:
        """`width`: tokens to keep of each place."""
        self._num_sessions, self._width = num_sessions, width
        self._found: list[tuple[Tensor, Tensor]] = []

    def note(self, logits: Tensor) -> None:
        """Of the next place, [sessions, vocab]."""
        if self._width:
            sure, token_ids = logits.softmax(-1).topk(min(self._width, logits.shape[-1]))
            self._found.append((sure, token_ids))

    def read(self) -> list[Ahead]:
        """By session."""
        if not self._found:
            return [Ahead()] * self._num_sessions
        sure, token_ids = (torch.stack(each, 1).tolist() for each in zip(*self._found, strict=True))
        return [Ahead(list(map(Ranked, *of_session))) for of_session in zip(token_ids, sure, strict=True)]


@dataclass
class ChosenAhead:
    """One session's sampler chooses each token itself, behind `text`, which grows by it: they are drawn, or penalised
    for what was written before."""

    sampler: DraftSampler
    text: list[int]
    width: int
    """Candidates to keep of each place; 0: what a chain needs."""
    _candidates: list[Ranked] = field(default_factory=list)
    _proposals: list[Proposal] = field(default_factory=list)

    def note(self, logits: Tensor) -> int:
        """The token by the next logits, [1, vocab]. Raises as the sampler."""
        if self.width:
            found = Ranked(*self.sampler.candidates(logits[0], self.text, self.width))
            self._candidates.append(found)
            token = found.token_ids[0]
        else:
            token, proposal = self.sampler.choose(logits[0], self.text)
            if proposal is not None:
                self._proposals.append(proposal)
        self.text.append(token)
        return token

    def read(self) -> list[Ahead]:
        """Of the one session."""
        return [Ahead(self._candidates, self._proposals)]


# -- lines ------------------------------------------------------------------------------------------------------------

# What a caption writes between two restarts. Each kind knows what is read next, what is kept and what is sent of it.


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What the model's next pass costs, as things are."""

    pass_s: PassTime
    """Seconds, by the nodes that it reads."""
    ahead_s: float
    """Seconds of a token that is written on from the end of a chain; infinite where none can be."""
    is_thrifty: bool
    """What hardly becomes text would keep other captions waiting."""


class DraftLine(ABC):
    """Where the draft writes. `output` holds committed tokens and, behind them, what it wrote itself and reads as
    text."""

    def __init__(self, start: JoinPoint, sampler: DraftSampler) -> None:
        self.epoch = start.epoch
        self.write_until = start.write_until
        self.first_chunk = start.first_chunk
        self.output = [*start.committed]
        self.sampler = sampler
        self._begins = len(self.output)

    @property
    def may_write(self) -> bool:
        """The caption takes drafts; where its gate is closed, the line may not grow."""
        return self.write_until > self._begins

    # what is read

    @abstractmethod
    def goes_on(self, write_until: int, costs: Callable[[], PassCosts]) -> bool:
        """Whether there is something to read, with room for what follows before `write_until`."""

    def unseen(self, num_known: int) -> Window:
        """What the next pass takes in behind `num_known` output tokens in the cache; nothing where the prompt's own
        logits come next."""
        return self.output[num_known:]

    @property
    def chance(self) -> float | None:
        """That what is read next becomes text; None where that is not known."""
        return None

    @abstractmethod
    def read(self, rows: Tensor) -> None:
        """The pass has taken that in: the logits [n, vocab] behind its nodes, or behind its last token. Raises as the
        sampler."""

    def end_of_chain(self, num_known: int, write_until: int) -> tuple[int, int]:
        """The token that the line ends with, and how many the model may write behind it before anybody looks at their
        logits. None may, where it is no single token that is read next."""
        return 0, 0

    @property
    def width(self) -> int:
        """Candidates that are kept of each place; 0: the chosen token alone."""
        return 0

    def choosing(self) -> ChosenAhead:
        """Chooses the tokens that go on behind that end."""
        return ChosenAhead(self.sampler, [*self.output], self.width)

    @abstractmethod
    def go_on(self, token_ids: Sequence[int], ahead: Ahead) -> None:
        """They follow it, as many as `end_of_chain` has allowed."""

    # what is kept

    def move(self, state: DecodeState, root: int) -> None:
        """The text goes on down to node `root` of a dynamic tree; of other lines nothing is to be kept or dropped."""
        return

    def keep_rows(self, state: DecodeState, order: RestartLine) -> None:
        """Leaves of the model's cache what the next line begins with: this one may have foreseen what that is told."""
        most = max(order.keep + len(order.suffix) - 1, 0)  # what follows the last token is still to be said
        num_output = min(order.keep + self._num_foreseen(order), most)
        num_kept = min(state.num_tokens, state.num_prompt_tokens + num_output)
        state.keep_path(num_kept, self._rows_foreseen(num_output, order.suffix, state.num_tokens - num_kept))

    def _num_foreseen(self, order: RestartLine) -> int:
        """Tokens of the order's suffix that the line's own output has in their places."""
        return 0

    def _rows_foreseen(self, num_output: int, suffix: Sequence[int], num_behind: int) -> Sequence[int]:
        """Of the `num_behind` rows that the cache holds behind `num_output` tokens, those of the beginning of `suffix`,
        ascending. Its last token is never among them."""
        return ()

    # what is sent

    @property
    @abstractmethod
    def num_unsent(self) -> int:
        """Tokens that are not sent yet, of a tree those of its likeliest path."""

    @property
    def has_unsent(self) -> bool:
        """There is something to send."""
        return self.num_unsent > 0

    @abstractmethod
    def take(self, seconds: float) -> DraftTokens:
        """What is not sent yet, for the wire. `seconds`: since the first pass for it began."""


class Chain(DraftLine):
    """One token behind the other."""

    def __init__(self, start: JoinPoint, sampler: DraftSampler) -> None:
        super().__init__(start, sampler)
        self._num_sent = len(self.output)
        self._proposals: list[Proposal] = []
        """Of the tokens that are not sent yet, where the sampling rule needs them."""

    def goes_on(self, write_until: int, costs: Callable[[], PassCosts]) -> bool:
        """It is as long as it may be, or goes on."""
        return len(self.output) < write_until

    def read(self, rows: Tensor) -> None:
        """One token follows."""
        choosing = self.choosing()
        token = choosing.note(rows[-1:])
        self.go_on([token], *choosing.read())

    def end_of_chain(self, num_known: int, write_until: int) -> tuple[int, int]:
        """Its last token, where all others are in the cache."""
        return (self.output[-1], write_until - len(self.output)) if len(self.output) - num_known == 1 else (0, 0)

    def go_on(self, token_ids: Sequence[int], ahead: Ahead) -> None:
        """Its own tokens are read as text."""
        self.output += token_ids
        self._proposals += ahead.proposals

    @property
    def num_unsent(self) -> int:
        """All that was written since it was asked last."""
        return len(self.output) - self._num_sent

    def take(self, seconds: float) -> DraftTokens:
        """With what the sampling rule must know of each."""
        token_ids, first = tuple(self.output[self._num_sent :]), self._num_sent
        proposals, self._proposals = tuple(self._proposals), []
        self._num_sent = len(self.output)
        return DraftTokens(self.epoch, first, token_ids, seconds / len(token_ids), proposals)


# -- session ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class DraftSession:
    """One caption at the draft. All but `orders` and `chunks` is touched on the model's thread only, once it writes."""

    request: DraftStart
    plan: PromptPlan
    work: SessionWork
    place: Reservation
    begin: Callable[[JoinPoint], DraftLine]
    """A line of the kind that was asked for."""
    line: DraftLine
    orders: deque[LineAction] = field(default_factory=deque)
    """What the thread has not carried out. All is, in order: each restart builds on the one before."""
    chunks: asyncio.Queue[DraftTokens | Exception | None] = field(default_factory=asyncio.Queue)
    """What was written; None, or what went wrong, at the end."""
    prompt_logits: torch.Tensor | None = None
    """[vocab], after the prefill."""
    chunk_started_s: float = 0.0
    """When the first pass of the chunk began that is being written."""

    @property
    def num_known(self) -> int:
        """Output tokens, and nodes behind them, that the model's cache holds."""
        return self.work.state.num_tokens - self.work.state.num_prompt_tokens


def ahead_of(lines: Sequence[DraftLine]) -> LargestAhead | ChosenAhead:
    """What is noted, or chosen, of the tokens of these while the model writes on by itself: of several, the largest."""
    if not all(line.sampler.takes_largest for line in lines):
        (line,) = lines
        return line.choosing()
    return LargestAhead(len(lines), max(line.width for line in lines))
