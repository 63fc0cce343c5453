"""Who may use a model next: decoding and prefill share its time evenly, prefills go first come, first served.

Pure: jobs in, the next job out, the clock is the caller's. Every lane has a virtual time, the seconds it has used, and
the lane that has used less goes first (start-time fair queueing). Jobs are not interrupted, so a lane may be owed time,
but not more than for `CREDIT_S` or one job: who was away for long does not push the others out when it comes back.
"""

import enum
import heapq
import itertools
from typing import Generic, TypeVar

JobT = TypeVar("JobT")
CREDIT_S = 0.5
"""Most seconds that a lane can be owed, unless the other lane's last job took longer still."""
PATIENCE_S = 0.003
"""A decoding session needs a round trip between two passes. So long the lane is waited for while it is owed time,
and at its own cost; a prefill's next layer, which may take much longer than a pass, would else always slip in."""


class Lane(enum.Enum):
    """Two kinds of work that share the time, and one that takes what is left."""

    DECODE = "decode"
    PREFILL = "prefill"
    IDLE = "idle"
    """Waits until neither of the others has work, and decoding has none for as long as its last job took."""


class FairQueue(Generic[JobT]):
    """Jobs that wait. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[Lane, list[tuple[int, int, JobT]]] = {lane: [] for lane in Lane}
        self._used_s = dict.fromkeys(Lane, 0.0)
        self._last_job_s = dict.fromkeys(Lane, 0.0)
        self._arrivals = itertools.count()
        self._decode_ended_at = float("-inf")
        self._lingering_since: float | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, lane: Lane, job: JobT, order: int = 0) -> None:
        """Adds a job. In its lane, lower `order` goes first, then who came first: work without end must have an order
        that others share."""
        other = Lane.PREFILL if lane is Lane.DECODE else Lane.DECODE
        if lane is not Lane.IDLE and not self._waiting[lane]:
            credit_s = max(CREDIT_S, self._last_job_s[other])
            self._used_s[lane] = max(self._used_s[lane], self._used_s[other] - credit_s)
        heapq.heappush(self._waiting[lane], (order, next(self._arrivals), job))

    def pop(self, now_s: float) -> tuple[Lane, JobT] | float:
        """The next job and its lane; or the seconds after which to ask again, if nothing is pushed before: infinity
        when nothing waits."""
        if self._lingering_since is not None:
            self._used_s[Lane.DECODE] += now_s - self._lingering_since
            self._lingering_since = None
        lanes = [lane for lane in (Lane.DECODE, Lane.PREFILL) if self._waiting[lane]]
        if not lanes:
            return self._pop_idle(now_s)
        linger_s = self._decode_ended_at + PATIENCE_S - now_s
        if lanes == [Lane.PREFILL] and linger_s > 0 and self._used_s[Lane.DECODE] < self._used_s[Lane.PREFILL]:
            self._lingering_since = now_s
            return linger_s
        lane = min(lanes, key=self._used_s.__getitem__)
        return lane, heapq.heappop(self._waiting[lane])[-1]

    def _pop_idle(self, now_s: float) -> tuple[Lane, JobT] | float:
        if not self._waiting[Lane.IDLE]:
            return float("inf")
        patience_s = min(max(PATIENCE_S, self._last_job_s[Lane.DECODE]), CREDIT_S)
        wait_s = self._decode_ended_at + patience_s - now_s
        return wait_s if wait_s > 0 else (Lane.IDLE, heapq.heappop(self._waiting[Lane.IDLE])[-1])

    def charge(self, lane: Lane, seconds: float, now_s: float) -> None:
        """Tells that a job of `lane` has taken `seconds` and ended now."""
        self._used_s[lane] += seconds
        self._last_job_s[lane] = seconds
        if lane is Lane.DECODE:
            self._decode_ended_at = now_s
