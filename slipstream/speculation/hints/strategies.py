"""How hints become trees: the windows of `hsd`, ours, which resynchronises, and the text itself as a hint.

Pure, and never what decides a token.
"""

from collections.abc import Sequence
from typing import Protocol

from slipstream.speculation.hints.cursor import Cursor, Guess, foreseen
from slipstream.speculation.hints.draft_tree import Candidate, TreeLimits, grow_tree
from slipstream.speculation.hints.index import HintIndex
from slipstream.speculation.protocol import TokenTree, num_common


class HintStrategy(Protocol):
    """Drafts for one text. It is told all that is committed, in order."""

    def add(self, token_ids: Sequence[int], *, goes_on: bool = False) -> None:
        """One more hint, or more of the one before; at any time."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these."""

    def propose(self, limits: TreeLimits) -> TokenTree | None:
        """What may follow the text; None: nothing that is worth a row."""


# -- hierarchical speculative decoding --------------------------------------------------------------------------------

WINDOW = 3
"""n of that paper, section 3.2."""


class Windowed:
    """Its section 3.2: the last three tokens are the window; what follows it, wherever it stands in any of the
    unordered texts, is a candidate to that text's end; the prefix tree of all candidates is judged in one pass.

    The paper bounds neither their number nor the tree. Here `limits` do: the tree is filled level by level, as nothing
    says which candidate is better, and no more candidates are looked at than twice its rows.
    """

    def __init__(self, vocab_size: int, window: int = WINDOW) -> None:
        self._index = HintIndex((window,), vocab_size)
        self._window = window
        self._text: list[int] = []

    def add(self, token_ids: Sequence[int], *, goes_on: bool = False) -> None:
        (self._index.extend if goes_on else self._index.add)(token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._text = [*self._text, *token_ids][-self._window :]

    def propose(self, limits: TreeLimits) -> TokenTree | None:
        places = self._index.places(self._text) if len(self._text) == self._window else ()
        return grow_tree(self._index, [Candidate(place, 1.0) for place in places[: 2 * limits.max_rows]], limits)


# -- what guesses are worth -------------------------------------------------------------------------------------------

DECAY = 0.98
"""Weight that an observation keeps when the next one of its kind arrives."""
FIRST_CHANCE, FIRST_CHANCE_WEIGHT = 0.2, 1.0
FIRST_SURVIVAL, FIRST_SURVIVAL_WEIGHT = 0.85, 3.0
"""A few observations correct them. By data, see docs/decisions.md."""


class Rate:
    """How often something came true lately. `prior` counts as `weight` observations."""

    def __init__(self, prior: float, weight: float) -> None:
        self._right, self._all = prior * weight, weight

    @property
    def value(self) -> float:
        return self._right / self._all

    def observe(self, num_right: int, num_all: int) -> None:
        keep = DECAY**num_all
        self._right, self._all = self._right * keep + num_right, self._all * keep + num_all


class LineRecord:
    """How often the tokens of a draft's lines came true, behind those that did."""

    def __init__(self) -> None:
        self._survival = Rate(FIRST_SURVIVAL, FIRST_SURVIVAL_WEIGHT)
        self._line: tuple[int, ...] = ()

    def begin(self, line: Sequence[int]) -> float:
        """This line is judged now; what the chance of each of its tokens is."""
        self._line = tuple(line)
        return self._survival.value

    def learn(self, committed: Sequence[int]) -> None:
        """This is what came."""
        length = num_common(self._line, committed)
        self._survival.observe(length, min(length + 1, len(self._line), len(committed)))
        self._line = ()


class Experience:
    """What each kind of guess has been worth in this text. A guess is right or wrong by the text that is committed,
    whether it was drafted or not: so a hint of lies is watched for nothing, and drafted again once it tells the truth.
    """

    def __init__(self, index: HintIndex) -> None:
        self._index = index
        self._rates: dict[str, tuple[Rate, Rate]] = {}
        """By kind: that its first token is right, and each further one."""

    def learn(self, guesses: Sequence[Guess], committed: Sequence[int]) -> None:
        """These were the guesses, and this is what came."""
        for guess in guesses:
            length = foreseen(self._index, guess.place, committed)
            chance, survival = self._rates_of(guess.kind)
            chance.observe(min(length, 1), 1)
            if length and len(committed) > 1:
                survival.observe(length - 1, min(length, len(committed) - 1))

    def candidates(self, guesses: Sequence[Guess]) -> list[Candidate]:
        """The guesses with their chances."""
        rated = [(guess, *self._rates_of(guess.kind)) for guess in guesses]
        return [Candidate(guess.place, chance.value, survival.value) for guess, chance, survival in rated]

    def _rates_of(self, kind: str) -> tuple[Rate, Rate]:
        if kind not in self._rates:
            first = Rate(FIRST_CHANCE, FIRST_CHANCE_WEIGHT)
            self._rates[kind] = first, Rate(FIRST_SURVIVAL, FIRST_SURVIVAL_WEIGHT)
        return self._rates[kind]


# -- ours -------------------------------------------------------------------------------------------------------------

LONGEST_MATCH = 8
NUM_PLACES = 2
MATCH_SIZES = (2, 4)
"""A match of one token is chance more often than not, and the cursor needs none."""


class Resynchronising:
    """The two nearest places of the longest match, and the cursor's guesses, each followed as far as it has paid."""

    def __init__(self, vocab_size: int) -> None:
        self._index = HintIndex(MATCH_SIZES, vocab_size)
        self._cursor = Cursor(self._index)
        self._experience = Experience(self._index)
        self._text: list[int] = []

    def add(self, token_ids: Sequence[int], *, goes_on: bool = False) -> None:
        (self._index.extend if goes_on else self._index.add)(token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        guesses = self._guesses()
        self._experience.learn(guesses, token_ids)
        self._cursor.follow(guesses, token_ids)
        self._text = [*self._text, *token_ids][-LONGEST_MATCH:]

    def propose(self, limits: TreeLimits) -> TokenTree | None:
        return grow_tree(self._index, self._experience.candidates(self._guesses()), limits)

    def _guesses(self) -> list[Guess]:
        """No place twice: what a match finds, the cursor need not."""
        guesses: dict[int, Guess] = {}
        for guess in (*_matches(self._index, self._text, self._cursor.near), *self._cursor.guesses()):
            guesses.setdefault(guess.place, guess)
        return list(guesses.values())


class Lookup:
    """Prompt lookup: the prompt and the text itself are the hint, and every match is a guess."""

    def __init__(self, vocab_size: int, prompt: Sequence[int] = ()) -> None:
        self._index = HintIndex(MATCH_SIZES, vocab_size)
        self._index.add(prompt)
        self._experience = Experience(self._index)
        self._text: list[int] = list(prompt)[-LONGEST_MATCH:]

    def add(self, token_ids: Sequence[int], *, goes_on: bool = False) -> None:
        raise TypeError("prompt lookup takes no hints")

    def commit(self, token_ids: Sequence[int]) -> None:
        self._experience.learn(self._guesses(), token_ids)
        self._text = [*self._text, *token_ids][-LONGEST_MATCH:]
        self._index.extend(token_ids)

    def propose(self, limits: TreeLimits) -> TokenTree | None:
        return grow_tree(self._index, self._experience.candidates(self._guesses()), limits)

    def _guesses(self) -> list[Guess]:
        return _matches(self._index, self._text, len(self._index.tokens))


def _matches(index: HintIndex, text: Sequence[int], near: int) -> list[Guess]:
    length, places = index.longest(text, near, at_most=LONGEST_MATCH, num_places=NUM_PLACES)
    return [Guess(f"match of {length}, {rank}", place) for rank, place in enumerate(places)]
