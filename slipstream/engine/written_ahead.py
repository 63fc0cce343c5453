"""What is noted, or chosen, while a model writes on by itself, token after token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.sampling.params import Proposal
from slipstream.sampling.sampler import DraftSampler


@dataclass(frozen=True, slots=True)
class Ranked:
    """The likeliest tokens of a place, the first before all, and the draft's own chance of each."""

    token_ids: list[int]
    sure: list[float]

    def led_by(self, token_id: int, count: int, vocab_size: int) -> tuple[list[int], list[float]]:
        """At most `count`, first the token that the model went on with: of equals it may have taken another one."""
        pairs = zip(self.token_ids, self.sure, strict=True)
        others = [(each, sure) for each, sure in pairs if each != token_id and each < vocab_size]
        kept = [(token_id, self.sure[0]), *others[: count - 1]]
        return [each for each, _ in kept], [sure for _, sure in kept]


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
            self._proposals += [proposal] if proposal is not None else []
        self.text.append(token)
        return token

    def read(self) -> list[Ahead]:
        """Of the one session."""
        return [Ahead(self._candidates, self._proposals)]
