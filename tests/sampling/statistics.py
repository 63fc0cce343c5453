"""Chi-square tests for samples that a seed fixes: a failure is a change of the code, never bad luck."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

P_FLOOR = 1e-4
"""Smallest p-value that passes. With fixed seeds a true hypothesis was seen to pass once and for all; a broken one of
the kinds that the mutation tests build falls below 1e-12."""
MIN_EXPECTED = 5.0


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with that many degrees of freedom >= statistic); 1 where there were too few samples to compare."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; cells that expect fewer than 5 count as one."""
    statistic, degrees, rare_observed, rare_expected = 0.0, -1, 0.0, 0.0
    for seen, mean in zip(observed, expected, strict=True):
        if mean < MIN_EXPECTED:
            rare_observed, rare_expected = rare_observed + seen, rare_expected + mean
        else:
            statistic, degrees = statistic + (seen - mean) ** 2 / mean, degrees + 1
    if rare_expected >= MIN_EXPECTED:
        statistic, degrees = statistic + (rare_observed - rare_expected) ** 2 / rare_expected, degrees + 1
    return statistic, degrees


def fit(samples: Sequence[Hashable], probabilities: Mapping[Any, float]) -> tuple[float, int]:
    """Chi-square statistic and degrees of freedom of samples against their exact distribution.

    A sample of probability 0 is an error at once.
    """
    counts = Counter(samples)
    impossible = [sample for sample in counts if probabilities.get(sample, 0.0) == 0.0]
    assert not impossible, f"samples of probability 0: {impossible[:3]}"
    cells = list(probabilities)
    return chi_square([counts[cell] for cell in cells], [probabilities[cell] * len(samples) for cell in cells])
