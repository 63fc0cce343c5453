"""Where n-grams stand in hint texts: any number of texts, added or continued at any time. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

BREAK = -1
"""Stands between two texts, and for every token that no vocabulary has. No match and no candidate crosses it."""
MAX_LOOKED_AT = 64
"""Places that are compared for one longest match: those nearest to a given one. So a hint that repeats itself without
end costs no more time than another."""


class HintIndex:
    """Places of the n-grams of some lengths in all texts. A place is an index into `tokens`.

    Memory is some 200 bytes for each token and length; who takes in texts of strangers bounds them before.

    Args:
        sizes: the lengths, ascending. `longest` finds any match that is at least as long as the first.
        vocab_size: tokens outside of it break a text in two.
    """

    def __init__(self, sizes: Sequence[int], vocab_size: int) -> None:
        if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"an index needs ascending lengths of at least 1, not {tuple(sizes)}")
        self.sizes = tuple(sizes)
        self.tokens: list[int] = []
        """All texts, each behind a `BREAK`."""
        self.heads: list[int] = []
        """Where each text begins, ascending."""
        self._vocab_size = vocab_size
        self._places: dict[tuple[int, ...], list[int]] = {}
        """By n-gram, the places behind it that have a token, ascending."""

    def add(self, token_ids: Sequence[int]) -> None:
        """One more text, behind the others."""
        self.tokens.append(BREAK)
        self.heads.append(len(self.tokens))
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text that was added last goes on."""
        for token in token_ids:
            if 0 <= token < self._vocab_size:
                self._note_place()
                self.tokens.append(token)
            else:
                self.tokens.append(BREAK)

    def _note_place(self) -> None:
        """A token comes here. Where a text ends nothing does: that is no place to go on from, and is not noted."""
        for size in self.sizes:
            gram = tuple(self.tokens[-size:])
            if len(gram) == size and BREAK not in gram:
                self._places.setdefault(gram, []).append(len(self.tokens))

    def token(self, place: int) -> int:
        """The token there; `BREAK` where no text has one."""
        return self.tokens[place] if 0 <= place < len(self.tokens) else BREAK

    def places(self, gram: Sequence[int]) -> Sequence[int]:
        """All places behind this n-gram where a text goes on, ascending. Its length is one of `sizes`."""
        return self._places.get(tuple(gram), ())

    def longest(self, text: Sequence[int], near: int, *, at_most: int, num_places: int) -> tuple[int, list[int]]:
        """The length of the longest end of `text` that stands in a hint, up to `at_most`, and the places behind it.

        Of several places those nearest to `near` come first: the first or the last one of a text is often wrong, as
        documents repeat headers and words. 0 and no place where nothing matches.
        """
        for size in reversed(self.sizes):
            places = self.places(text[-size:]) if len(text) >= size else ()
            if places:
                return self._longest_of(_nearest(places, near, MAX_LOOKED_AT), text, near, at_most, num_places)
        return 0, []

    def next_head(self, place: int) -> int | None:
        """Where the text behind the one with `place` begins, if there is one."""
        number = bisect_left(self.heads, place + 1)
        return self.heads[number] if number < len(self.heads) else None

    def _longest_of(
        self, places: Sequence[int], text: Sequence[int], near: int, at_most: int, num_places: int
    ) -> tuple[int, list[int]]:
        lengths = {place: self._length(place, text, at_most) for place in places}
        longest = max(lengths.values())
        best = sorted((place for place in places if lengths[place] == longest), key=lambda place: abs(place - near))
        return longest, best[:num_places]

    def _length(self, place: int, text: Sequence[int], at_most: int) -> int:
        """Tokens before `place` that the text ends with."""
        length = 0
        while length < min(at_most, len(text)) and self.tokens[place - length - 1] == text[-length - 1]:
            length += 1
        return length


def _nearest(places: Sequence[int], near: int, count: int) -> Sequence[int]:
    """`count` of the ascending places: half of them before `near`, half behind it, as far as there are so many."""
    first = max(min(bisect_left(places, near) - count // 2, len(places) - count), 0)
    return places[first : first + count]
