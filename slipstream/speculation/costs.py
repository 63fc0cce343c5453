"""What a session has measured of itself: T_p(k), T_q, tau and the cost of a restart. Pure arithmetic; no clock.

Everything is an exponentially decayed average, so that the estimates follow the video. A session starts from a copy
of the process's own running average.
"""

import copy
from dataclasses import dataclass, field

DECAY = 0.97
"""Weight that an observation keeps when the next one arrives: a memory of about 33 observations."""
PRIOR_SLOPE = 0.05
"""Before anything is measured, a draft token in the window is taken to cost this share of a plain pass."""
PRIOR_SLOPE_WEIGHT = 20.0
"""Strength of that prior, in units of squared window lengths."""
MIN_TAU, MAX_TAU = 0.02, 0.995
FORGOTTEN_TAU, FORGOTTEN_WEIGHT = 0.5, 4.0


@dataclass
class DecayedMean:
    """An exponentially decayed mean; before the first observation it is `value`."""

    value: float
    weight: float = 0.0

    def observe(self, sample: float) -> None:
        self.weight = self.weight * DECAY + 1.0
        self.value += (sample - self.value) / self.weight


@dataclass
class WindowCosts:
    """Seconds of a target pass as a function of the window length k: T_p(0), and a + b k for k >= 1.

    A single row takes another kernel than several, so k = 0 is kept apart; from k = 1 on the measured cost is close to
    a straight line (flat on a GPU, rising on a CPU). b is a ridge regression around PRIOR_SLOPE.
    """

    plain: DecayedMean = field(default_factory=lambda: DecayedMean(0.05))
    _weight: float = 0.0
    _k: float = 0.0
    _t: float = 0.0
    _kk: float = 0.0
    _kt: float = 0.0

    def observe(self, window_len: int, seconds: float) -> None:
        if window_len == 0:
            self.plain.observe(seconds)
            return
        for name, sample in (("_weight", 1.0), ("_k", window_len), ("_t", seconds)):
            setattr(self, name, getattr(self, name) * DECAY + sample)
        self._kk = self._kk * DECAY + window_len**2
        self._kt = self._kt * DECAY + window_len * seconds

    def __call__(self, window_len: int) -> float:
        mean_k, mean_t = (self._k / self._weight, self._t / self._weight) if self._weight else (0.0, self.plain.value)
        # A line that never died has run no plain pass; then the windows say what one would take.
        plain_s = self.plain.value if self.plain.weight else mean_t / (1 + PRIOR_SLOPE * mean_k)
        if window_len == 0:
            return plain_s
        covariance = self._kt - self._weight * mean_k * mean_t
        variance = self._kk - self._weight * mean_k**2
        slope = (covariance + PRIOR_SLOPE_WEIGHT * PRIOR_SLOPE * plain_s) / (variance + PRIOR_SLOPE_WEIGHT)
        return max(mean_t + max(slope, 0.0) * (window_len - mean_k), 0.2 * min(plain_s, mean_t))


@dataclass
class CostModel:
    """The measured quantities that pacing decides from."""

    target_pass_s: WindowCosts = field(default_factory=WindowCosts)
    """T_p(k), as the gateway sees it: model pass and round trip."""
    draft_pass_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.005))
    """T_q."""
    restart_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.002))
    """What a restart costs beside the draft's passes: two messages and the rollback."""
    plain_token_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.05))
    """What one more plain pass costs where several are asked for at once, without a round trip, and no draft works."""
    _accepted: float = 8.0
    _judged: float = 10.0

    def observe_window(self, num_accepted: int, window_len: int) -> None:
        """Counts draft tokens that the target judged: those accepted and at most one rejected; the rest are unknown."""
        for _ in range(num_accepted):
            self._count(1.0)
        if num_accepted < window_len:
            self._count(0.0)

    def observe_match(self, matched: bool) -> None:
        """Counts a draft token that was compared with the target's own token."""
        self._count(float(matched))

    def _count(self, accepted: float) -> None:
        self._accepted = self._accepted * DECAY + accepted
        self._judged = self._judged * DECAY + 1.0

    def forget_acceptance(self) -> None:
        """What is known of tau is long past: an even chance, to be corrected by the next few tokens."""
        self._accepted, self._judged = FORGOTTEN_TAU * FORGOTTEN_WEIGHT, FORGOTTEN_WEIGHT

    @property
    def tau(self) -> float:
        """Acceptance rate per draft token, kept away from 0 and 1."""
        return min(max(self._accepted / self._judged, MIN_TAU), MAX_TAU)

    @property
    def speed_ratio(self) -> float:
        """c = T_p / T_q."""
        return self.target_pass_s(0) / self.draft_pass_s.value

    def fork(self) -> "CostModel":
        """A copy that another session may change."""
        return copy.deepcopy(self)
