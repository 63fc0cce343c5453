"""How many rows of a prompt the next pass carries along: from what passes were seen to take, within a share of time.

Pure: rows and seconds in, rows out.
"""

from dataclasses import dataclass, field

from slipstream.speculation.pacing import WindowCosts

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Of rows that ride: few enough that each is measured, close enough that the budget is not left half empty."""
ALONE_ROWS = 512
"""Of a chunk that runs while nobody decodes: enough to keep a device busy, and done before a caller wonders."""
PEOPLE_SHARE = 0.1
"""What rides may add to passes in which somebody waits for the text, on the average."""
LEARNT = 3
"""Passes without a ride that are seen first."""
REST_EVERY = 32
"""So many passes with a ride, then one without: what a pass takes by itself changes, too."""
SAVING = 24
"""So many passes save for a ride that takes more than the budget of one: fewer than 5% of all take that much longer."""
DEAR = 1.1
"""A ride that takes so many times what its rows take alone is put off, for more rows at once."""
FORGET_AFTER = 256
"""Rides after which a number that took too long is tried again: late rows of a prompt look at more than early ones."""
FRESH_SHARE = 0.25
"""Of the newest measurement in what is known."""


@dataclass(frozen=True)
class RideCounts:
    """Rows of a prompt in each stage of its layers: up to layer L, and behind it."""

    first: int
    second: int

    @property
    def most(self) -> int:
        return max(self.first, self.second)


@dataclass
class _Measured:
    extra_s: float
    ride: int
    """When, counted in rides."""


@dataclass
class RidePlanner:
    """What passes of one model take, with and without rows that ride along.

    Args:
        share: how much longer a pass may become, as a share of its time, where all who decode are in the background.
    """

    share: float
    _plain: WindowCosts = field(default_factory=WindowCosts)
    _num_plain: int = 0
    _extra: dict[int, _Measured] = field(default_factory=dict)
    """Seconds that a number of rows adds to a pass."""
    _alone_row_s: float | None = None
    _num_rides: int = 0
    _since_rest: int = 0
    _num_saved: int = 0
    """Passes since the last ride."""

    def next_counts(self, num_rows: int, done: RideCounts, prompt_rows: int, *, beside_people: bool) -> RideCounts:
        """Rows that the next pass carries along; none where that would take too long.

        Both stages get as many: a layer has the same time to hide rows in wherever it is. On a GPU the first rows are
        free in every pass; on a CPU the first ones are dear, so that a few passes save for one with more.

        Args:
            num_rows: that the pass decodes.
            done: what has run of the prompt, which has `prompt_rows`.
            beside_people: somebody waits for the text of a session in the pass.
        """
        if self._num_plain < LEARNT or self._since_rest >= REST_EVERY:
            return RideCounts(0, 0)
        share = min(self.share, PEOPLE_SHARE) if beside_people else self.share
        number = self._next_number(share * self._plain(num_rows - 1))
        first = min(number, prompt_rows - done.first)
        return RideCounts(first, min(number, done.first + first - done.second))

    def observe(self, num_rows: int, counts: RideCounts, seconds: float) -> float:
        """Tells what a pass over so many rows took, and those that rode along. Returns the seconds that these added."""
        if not counts.most:
            self._plain.observe(num_rows - 1, seconds)
            self._num_plain += 1
            self._since_rest = 0
            return 0.0
        self._num_rides += 1
        self._since_rest += 1
        self._num_saved = 0
        extra_s = max(seconds - self._plain(num_rows - 1), 0.0)
        number = max(number for number in NUMBERS if number <= counts.most)
        known = self._extra.get(number)
        self._extra[number] = _Measured(_fresher(known.extra_s if known else None, extra_s), self._num_rides)
        return extra_s

    def observe_alone(self, num_rows: float, seconds: float) -> None:
        """Tells what so many rows took, all layers of each, while nobody decoded; none where no layer is behind L."""
        if num_rows:
            self._alone_row_s = _fresher(self._alone_row_s, seconds / num_rows)

    def _next_number(self, limit_s: float) -> int:
        """How many rows ride: as many as fit the budget of this pass, or that of all passes since the last ride."""
        self._num_saved += 1
        number = self._largest_within(limit_s)
        if number and not self._is_dear(number):
            return number
        return self._largest_within(self._num_saved * limit_s) if self._num_saved >= SAVING else 0

    def _is_dear(self, number: int) -> bool:
        """A ride with so many takes much more than the same rows alone."""
        if self._alone_row_s is None:
            return False
        return (self._foreseen(NUMBERS.index(number)) or 0.0) > DEAR * number * self._alone_row_s

    def _largest_within(self, seconds: float) -> int:
        best = 0
        for place, number in enumerate(NUMBERS):
            extra_s = self._foreseen(place)
            if extra_s is None or extra_s > seconds:
                break
            best = number
        return best

    def _foreseen(self, place: int) -> float | None:
        """Seconds that the number of rows there adds. Of one that was not measured: as much a row as the one below; a
        number further up takes at least what it takes alone, or cannot be known before those below are."""
        known = self._known(place)
        if known is not None or place == 0:
            return known or 0.0
        if (below_s := self._known(place - 1)) is not None:
            return below_s * NUMBERS[place] / NUMBERS[place - 1]
        below_s = self._foreseen(place - 1)
        if below_s is None or self._alone_row_s is None:
            return None
        return max(below_s * NUMBERS[place] / NUMBERS[place - 1], NUMBERS[place] * self._alone_row_s)

    def _known(self, place: int) -> float | None:
        measured = self._extra.get(NUMBERS[place])
        if measured is None or measured.ride + FORGET_AFTER < self._num_rides:
            return None
        return measured.extra_s


def _fresher(known: float | None, sample: float) -> float:
    return sample if known is None else known + FRESH_SHARE * (sample - known)


def alone_counts(done: RideCounts, prompt_rows: int) -> RideCounts:
    """Rows of a chunk while nobody decodes: guidance first, as a draft waits for it."""
    if done.first < prompt_rows:
        return RideCounts(min(ALONE_ROWS, prompt_rows - done.first), 0)
    return RideCounts(0, min(ALONE_ROWS, prompt_rows - done.second))
