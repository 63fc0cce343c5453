"""What a pass that serves several sessions costs, and what it would cost if all of them decoded plainly.

Pure arithmetic, no clock. Only a target sees what all its sessions bring to a pass; it tells each of them with every
verdict. A session that went by its own seconds would hold the rows of the others for its own, and where sessions take
turns in two groups, it would hold half of them for all.
"""

import statistics
from dataclasses import dataclass

DECAY = 0.99
"""Weight that a pass keeps when the next one arrives: a memory of about 100 passes."""
PRIOR_WEIGHT = 5.0
"""Strength of the notion that a session costs nothing beside the pass, and a row 5% of a session's share."""
PRIOR_SLOPE = 0.05
"""Before anything is measured, a draft token in the window is taken to cost this share of a plain pass."""
STALL, KNOWN_WEIGHT = 4.0, 8.0
"""Once so many passes are known, one that takes longer than `STALL` times what is known of them counts as that: the
machine stood still, which says nothing of the next pass. A cost that did rise is followed at some percent a pass."""
SHORTEST_PASS_S, LONGEST_PASS_S = 1e-9, 3600.0
MOST_SESSIONS = 4096
"""What a target can tell; anything else is not believed."""


@dataclass(frozen=True)
class Company:
    """Whom a pass kept waiting, and what that costs them; seconds are 0 where the target does not know yet."""

    num_sessions: int = 1
    """Those that the pass ran, and those that waited for their turn meanwhile."""
    plain_s: float = 0.0
    """A pass in which each of them has one row and no window, or as many passes as that takes, at the speed that the
    machine has now."""
    row_s: float = 0.0
    """One more row of a window, whoever brings it."""

    @property
    def is_shared(self) -> bool:
        """Others are there, and it is known what they would cost without windows."""
        return self.num_sessions > 1 and self.plain_s > 0

    @property
    def believed(self) -> "Company":
        """This, or `ALONE` where passes cannot be so (or what they cost is no number): it would be remembered."""
        is_plain = self.plain_s == 0 or SHORTEST_PASS_S <= self.plain_s <= LONGEST_PASS_S
        is_possible = 0 < self.num_sessions <= MOST_SESSIONS and is_plain and 0 <= self.row_s <= LONGEST_PASS_S
        return self if is_possible else ALONE


ALONE = Company()


class CompanyCosts:
    """Seconds of a pass over n sessions with r rows of windows, as a + b n + c r: decayed least squares with a ridge.

    On a GPU b is about 0 as long as a pass waits for its weights; on a CPU every session's KV is read anew.
    """

    def __init__(self, most_sessions: int) -> None:
        """`most_sessions`: of one pass; others have theirs after it."""
        self._most_sessions = most_sessions
        self._first: list[tuple[int, int, float]] = []
        """Passes that are not told of yet."""
        self._weight = 0.0
        self._mean_s = self._mean_n = self._mean_r = 0.0
        self._nn = self._nr = self._rr = self._ns = self._rs = 0.0

    def observe(self, num_sessions: int, num_rows: int, seconds: float) -> None:
        """A pass over so many sessions, whose windows had so many rows together."""
        if self.is_known:
            self._add(num_sessions, num_rows, min(seconds, STALL * self(num_sessions, num_rows)))
            return
        self._first.append((num_sessions, num_rows, seconds))
        if len(self._first) >= KNOWN_WEIGHT:
            longest_s = STALL * statistics.median(seconds for *_, seconds in self._first)
            for passed in self._first:
                if passed[-1] <= longest_s:  # else it prepared what all others use
                    self._add(*passed)
            self._first.clear()

    def _add(self, num_sessions: int, num_rows: int, seconds: float) -> None:
        kept = self._weight * DECAY
        self._weight = kept + 1.0
        off_n, off_r, off_s = num_sessions - self._mean_n, num_rows - self._mean_r, seconds - self._mean_s
        share = kept / self._weight  # of a squared distance from the old mean: decayed covariances after Welford
        self._nn = self._nn * DECAY + share * off_n * off_n
        self._nr = self._nr * DECAY + share * off_n * off_r
        self._rr = self._rr * DECAY + share * off_r * off_r
        self._ns = self._ns * DECAY + share * off_n * off_s
        self._rs = self._rs * DECAY + share * off_r * off_s
        self._mean_n += off_n / self._weight
        self._mean_r += off_r / self._weight
        self._mean_s += off_s / self._weight

    def __call__(self, num_sessions: int, num_rows: int) -> float:
        """Seconds of a pass over so many sessions with so many rows of windows."""
        session_s, row_s = self._slopes()
        seconds = self._mean_s + session_s * (num_sessions - self._mean_n) + row_s * (num_rows - self._mean_r)
        return max(seconds, 0.1 * self._mean_s, SHORTEST_PASS_S)

    @property
    def is_known(self) -> bool:
        """Enough passes have been seen."""
        return self._weight > 0

    def company(self, num_sessions: int, speed: float = 1.0) -> Company:
        """What a pass tells so many sessions. `speed`: its seconds over those that were foreseen for it."""
        if not self.is_known:
            return Company(num_sessions)
        num_full, num_others = divmod(num_sessions, self._most_sessions)
        plain_s = num_full * self(self._most_sessions, 0) + (self(num_others, 0) if num_others else 0.0)
        return Company(num_sessions, speed * plain_s, speed * self._slopes()[1])

    def _slopes(self) -> tuple[float, float]:
        """Seconds a session and seconds a row, neither below 0."""
        prior_row_s = PRIOR_SLOPE * self._mean_s / max(self._mean_n, 1.0)
        nn, rr = self._nn + PRIOR_WEIGHT, self._rr + PRIOR_WEIGHT
        ns, rs = self._ns, self._rs + PRIOR_WEIGHT * prior_row_s
        determinant = nn * rr - self._nr * self._nr
        session_s = (ns * rr - rs * self._nr) / determinant
        row_s = (rs * nn - ns * self._nr) / determinant
        if row_s < 0:
            return max(ns / nn, 0.0), 0.0
        if session_s < 0:
            return 0.0, max(rs / rr, 0.0)
        return session_s, row_s
