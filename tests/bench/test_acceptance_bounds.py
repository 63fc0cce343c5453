"""The bounds that acceptance lies between, and the measurement of joint distributions in small."""

import pytest
import torch

from bench.guarantees.acceptance import acceptance_bounds, joint_chi2
from tests.sampling.statistics import P_FLOOR


def test_bounds_of_distributions_with_known_distance() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    draft = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]])
    assert acceptance_bounds(target[:1], target[:1]) == (1.0, 1.0)
    assert acceptance_bounds(target[:1], draft[:1]) == pytest.approx((0.75 / 1.25, 0.75))
    assert acceptance_bounds(target[1:], draft[1:]) == (0.0, 0.0)
    assert acceptance_bounds(target, draft) == pytest.approx((0.3, 0.375))


def test_one_p_value_for_each_rule() -> None:
    measured = joint_chi2(1)
    assert min(measured["coupled"], measured["rejection"]) > P_FLOOR
    assert (measured["tests_per_rule"], measured["captions_per_test"]) == (72, 1)
