"""Where the text stands in the hints: found again after an error, and given up when nothing there comes true. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.speculation.hints.index import BREAK, HintIndex

OFFSETS = (1, 0, 2, 3, 4)
"""Where a hint may go on behind the token at which the text left it: a wrong token, one that it lacks, and one, two or
three that it has too many. A wrong character often makes two or three tokens of what was one."""
MAX_MISSES = 1
"""Passes without any right token after which the cursor is dropped; the longest match then finds the place again."""


@dataclass(frozen=True)
class Guess:
    """A place from which the text may go on, and why: kinds of guesses are right with chances of their own."""

    kind: str
    place: int


class Cursor:
    """Follows the committed text through the hints. `place` is that of the token expected next, or of the token at
    which the text left the hint."""

    def __init__(self, index: HintIndex) -> None:
        self.place: int | None = None
        self._index = index
        self._is_left = False
        self._num_misses = 0

    @property
    def near(self) -> int:
        """Where to look first."""
        return self.place or 0

    def guesses(self) -> list[Guess]:
        """Where the text may go on, by what it did so far; none while nothing is known."""
        if self.place is None:
            return [Guess("first head", head) for head in self._index.heads[:1]]
        if not self._is_left:
            guesses = [Guess("follow", self.place)]
            ends = self._index.token(self.place) == BREAK
        else:
            behind = self._num_misses
            guesses = [Guess(f"offset {offset}, {behind} missed", self.place + offset) for offset in OFFSETS]
            ends = any(self._index.token(guess.place) == BREAK for guess in guesses)
        head = self._index.next_head(self.place)
        if head is not None:
            guesses.append(Guess("next head, at an end" if ends else "next head", head))
        return guesses

    def follow(self, guesses: Sequence[Guess], committed: Sequence[int]) -> None:
        """`committed` tokens were added to the text; the guess that foresaw most of them says where it stands now.

        Of guesses that foresaw equally many the first counts. Where none foresaw a single token, the cursor counts a
        miss, goes on by as many tokens, and is dropped after `MAX_MISSES`.
        """
        best, best_length = None, 0
        for guess in guesses:
            length = foreseen(self._index, guess.place, committed)
            if length > best_length:
                best, best_length = guess, length
        if best is not None:
            self.place = best.place + best_length
            self._is_left, self._num_misses = best_length < len(committed), 0
        elif self.place is not None:
            if self._is_left:
                self._num_misses += 1
                self.place += len(committed)
            self._is_left = True
            if self._num_misses > MAX_MISSES:
                self.place, self._is_left, self._num_misses = None, False, 0


def foreseen(index: HintIndex, place: int, committed: Sequence[int]) -> int:
    """How many of the committed tokens stand there."""
    length = 0
    while length < len(committed) and index.token(place + length) == committed[length]:
        length += 1
    return length
