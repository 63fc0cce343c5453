"""What captioning a whole archive will take, from a sample of it that was captioned. Pure: figures in, intervals out.

The sample is stratified by the size of the files, where that is known, within their formats: long videos are rare and
cost most, and how long so many bytes are depends on the format. A listing of a bucket says both. A total is the sum
over strata of the number of items times the mean of the sampled ones. Its interval is of a bootstrap within the strata,
each resampled with one less than it has, so that small strata do not look too certain, and drawn towards its mean by
the share of it that was sampled, of which nothing is open (Rao and Wu, 1988). It covers the choice of the sample; not
that the machine will be busier, or that the archive is not what was listed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STRATA = 5
LEAST_OF_STRATUM = 2
RESAMPLES = 2000
LEVEL = 0.9
"""Of the intervals."""
UNKNOWN_SIZE = -1
UNSIZED = 0
"""The stratum of items of that size."""


@dataclass(frozen=True)
class Span:
    """When one job was worked at, in seconds by any one clock."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long that was."""
        return max(self.end_s - self.start_s, 0.0)


NO_WORK = Span(0.0, 0.0)


@dataclass(frozen=True)
class Sampled:
    """One item of the sample: what it took, which is `NO_WORK` for one that has no result."""

    stratum: int
    span: Span
    tokens: int = 0
    result_bytes: int = 0
    video_s: float = 0.0


@dataclass(frozen=True)
class Interval:
    """A figure, and between what it lies at `LEVEL`."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> "Interval":
        """The same in other units."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Estimate:
    """Of all items together."""

    num_items: int
    seconds: Interval
    """Of wall time, with as many at once as in the sample."""
    at_once: float
    """Jobs that were worked at together while there were enough of them."""
    tokens: Interval
    result_bytes: Interval
    """As JSON lines."""
    video_s: Interval


def strata_of(
    sizes: Sequence[int], formats: Sequence[int] | None = None, num_strata: int = STRATA
) -> NDArray[np.int64]:
    """[num_items] the stratum of each item: equal numbers of them, by size in bytes. Those of `UNKNOWN_SIZE` are
    `UNSIZED`, one of their own.

    Args:
        formats: a number for the format of each. One that enough items have is parted by itself, the rest together.
        num_strata: of items of one format; of several there may be up to twice as many, and one more.
    """
    size = np.asarray(sizes, dtype=np.int64)
    format_ = np.zeros(len(size), dtype=np.int64) if formats is None else np.asarray(formats, dtype=np.int64)
    strata = np.full(len(size), UNSIZED, dtype=np.int64)
    known = np.flatnonzero(size != UNKNOWN_SIZE)
    first = UNSIZED + 1
    for group in _of_one_format(known, format_, num_strata):
        number = max(round(num_strata * len(group) / len(known)), 1)
        order = group[np.argsort(size[group], kind="stable")]
        strata[order] = first + np.arange(len(order)) * number // len(order)
        first += number
    return strata


def _of_one_format(
    items: NDArray[np.int64], formats: NDArray[np.int64], num_strata: int
) -> Iterator[NDArray[np.int64]]:
    """Items whose format half a stratum or more have; and the rest."""
    found, counts = np.unique(formats[items], return_counts=True)
    common = found[2 * num_strata * counts >= len(items)]
    for one in common:
        yield items[formats[items] == one]
    if len(rest := items[~np.isin(formats[items], common)]):
        yield rest


def choose(strata: NDArray[np.int64], num_sampled: int, seed: int) -> list[int]:
    """Which items are the sample, ascending: of each stratum its share, and two where it has them; about `num_sampled`,
    all where there are no more."""
    if len(strata) <= num_sampled:
        return list(range(len(strata)))
    chance = np.random.default_rng(seed)
    chosen: list[int] = []
    for stratum in np.unique(strata):
        of_it = np.flatnonzero(strata == stratum)
        share = max(round(num_sampled * len(of_it) / len(strata)), LEAST_OF_STRATUM)
        chosen += chance.choice(of_it, size=min(share, len(of_it)), replace=False).tolist()
    return sorted(chosen)


def estimate(sample: Sequence[Sampled], counts: Mapping[int, int], seed: int = 0) -> Estimate:
    """Of as many items as `counts` has of each stratum. One without a sample is taken to be like all others."""
    figures = np.array([[one.span.seconds, one.tokens, one.result_bytes, one.video_s] for one in sample], dtype=float)
    at_once = together([one.span for one in sample if one.span.seconds] or [NO_WORK])
    totals = _intervals(figures, np.array([one.stratum for one in sample]), counts, seed)
    seconds, *others = totals
    return Estimate(sum(counts.values()), seconds.times(1 / at_once), at_once, *others)


def together(spans: Sequence[Span]) -> float:
    """How many jobs are worked at at once while more wait: until the last of them begins. At least 1."""
    first, last = min(span.start_s for span in spans), max(span.start_s for span in spans)
    if last <= first:  # all began at once: none has waited
        last = max(span.end_s for span in spans)
    busy_s = sum(max(min(span.end_s, last) - span.start_s, 0.0) for span in spans)
    return max(busy_s / (last - first), 1.0) if last > first else 1.0


def _intervals(
    figures: NDArray[np.float64], strata: NDArray[np.int64], counts: Mapping[int, int], seed: int
) -> list[Interval]:
    """[num_sampled, num_figures] -> the interval of each figure's total."""
    chance = np.random.default_rng(seed)
    value = np.zeros(figures.shape[1])
    resampled = np.zeros((RESAMPLES, figures.shape[1]))
    for stratum, number in counts.items():
        is_of_it = strata == stratum
        of_it = figures[is_of_it] if is_of_it.any() else figures
        left_open = math.sqrt(max(number - int(is_of_it.sum()), 0) / number)
        mean = of_it.mean(axis=0)
        value += number * mean
        drawn = chance.integers(len(of_it), size=(RESAMPLES, max(len(of_it) - 1, 1)))
        resampled += number * (mean + left_open * (of_it[drawn].mean(axis=1) - mean))
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    ends = zip(value, np.minimum(low, value), np.maximum(high, value), strict=True)
    return [Interval(*map(float, each)) for each in ends]
