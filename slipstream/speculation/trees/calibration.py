"""How often a draft's candidates are right, learnt from what became text. Pure."""

import bisect
from collections.abc import Sequence

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Between the bins of a draft's own probability."""
_CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
MEMORY = 0.995
"""Weight that a bin's counts keep when it is counted in again: it remembers some 200 tokens."""
PRIOR_WEIGHT = 2.0
"""Until then a draft is believed: the bin's own probability counts as so many tokens."""
MIN_CHANCE, MAX_CHANCE = 1e-4, 0.9995
MAX_RANKS = 8
"""Later candidates are taken for the last of these."""


class Calibration:
    """The chance that the candidate of a rank is the target's token, given that all before it are.

    By 16 bins of the probability p that the draft itself gives the candidate: (hits + 2 centre) / (tokens + 2). A draft
    may say what it likes; it is believed only as far as its candidates came true.
    """

    def __init__(self) -> None:
        self._hits = [[0.0] * len(_CENTRES) for _ in range(MAX_RANKS)]
        self._counts = [[0.0] * len(_CENTRES) for _ in range(MAX_RANKS)]

    def chance(self, rank: int, p: float) -> float:
        """Of the candidate of that rank, from 0, which the draft gives the probability `p`."""
        rank, place = min(rank, MAX_RANKS - 1), bisect.bisect(EDGES, p)
        hits = self._hits[rank][place] + PRIOR_WEIGHT * _CENTRES[place]
        return min(max(hits / (self._counts[rank][place] + PRIOR_WEIGHT), MIN_CHANCE), MAX_CHANCE)

    def observe(self, ps: Sequence[float], hit: int | None) -> None:
        """One position became text: the candidate of rank `hit` was right, or None of those with these `ps`."""
        for rank, p in enumerate(ps[:MAX_RANKS]):
            place = bisect.bisect(EDGES, p)
            self._hits[rank][place] = self._hits[rank][place] * MEMORY + (rank == hit)
            self._counts[rank][place] = self._counts[rank][place] * MEMORY + 1.0
