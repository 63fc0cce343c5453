"""Hierarchical speculative decoding's tolerance: what is nearly as likely as the model's choice is taken. Lossy. Pure.

Eq. 10 can be read in two ways, and both are here by name. Below 1 either changes the text; at 1 only the model's own
choice is accepted, and the text is plain decoding's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from slipstream.errors import InvalidRequest
from slipstream.speculation.protocol import ROOT, TokenTree


class ToleranceRule(StrEnum):
    """How eq. 10 is read, for u* the best candidate and u^ the model's own choice."""

    LOG_RATIO = "log_ratio"
    """As printed: log p(u^) / log p(u*) >= tau, a ratio of two negative numbers."""
    PROBABILITY_RATIO = "probability_ratio"
    """As the one public implementation had it: log p(u*) - log p(u^) >= log tau."""


@dataclass(frozen=True)
class Tolerance:
    """How much less likely than the model's own choice an accepted token may be."""

    tau: float = 1.0
    """1: not at all, and the text is plain decoding's."""
    rule: str = ToleranceRule.LOG_RATIO

    @property
    def is_lossy(self) -> bool:
        """The text may be another one than the model's own."""
        return self.tau < 1

    def check(self) -> "Tolerance":
        """Itself. Raises `InvalidRequest` for values that there are not."""
        if not 0.0 < self.tau <= 1.0:
            raise InvalidRequest(f"tolerance is above 0 to 1 (tau of eq. 10), not {self.tau}")
        if self.rule not in tuple(ToleranceRule):
            known = ", ".join(ToleranceRule)
            raise InvalidRequest(f"tolerance_rule {self.rule!r} is unknown; choose one of {known}")
        return self

    def accepts(self, own_log_p: float, candidate_log_p: float) -> bool:
        """Whether a candidate that is not the model's own choice is taken for it. Natural logarithms."""
        if not self.is_lossy or candidate_log_p == -math.inf:
            return False
        if self.rule == ToleranceRule.PROBABILITY_RATIO:
            return candidate_log_p - own_log_p >= math.log(self.tau)
        return candidate_log_p == 0.0 or own_log_p / candidate_log_p >= self.tau


EXACT = Tolerance()


@dataclass(frozen=True)
class Hints:
    """What a drafter that makes trees of texts is told when its session is opened."""

    texts: tuple[str, ...] = ()
    """What the answer may be like. More may come later."""
    max_rows: int = 0
    """Of one tree."""
    tolerance: Tolerance = EXACT


@dataclass(frozen=True)
class Rating:
    """What the model thinks behind some text: its own choice, and candidates in its eyes."""

    own_token: int
    own_log_p: float
    candidate_log_ps: Sequence[float]


def accept_tolerantly(
    tree: TokenTree, rate: Callable[[int, tuple[int, ...], Sequence[int]], Rating], tolerance: Tolerance
) -> tuple[tuple[int, ...], int]:
    """The path of a tree that is accepted, and the model's own next token (section 3.2 of that paper).

    At every node the likeliest of the candidates behind it is compared with the model's own choice by eq. 10.
    `rate(row, path, candidates)` is asked once a step, as `choose` of `accept_tree` is.
    """
    path: tuple[int, ...] = ()
    while True:
        last = path[-1] if path else ROOT
        children = tree.children(last)
        candidates = [tree.token_ids[child] for child in children]
        rating = rate(last + 1, path, candidates)
        if rating.own_token in candidates:
            path = (*path, children[candidates.index(rating.own_token)])
            continue
        best = max(range(len(children)), key=lambda each: rating.candidate_log_ps[each], default=None)
        if best is None or not tolerance.accepts(rating.own_log_p, rating.candidate_log_ps[best]):
            return path, rating.own_token
        path = (*path, children[best])
