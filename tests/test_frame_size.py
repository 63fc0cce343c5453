"""The size that frames are given is the one that the checkpoint's own processor would give them."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.frame_size import ANY_SIZE, MAX_ASPECT_RATIO, FrameSize

QWEN = FrameSize(multiple=28, min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28)
SIDES = st.integers(1, 5000)
RULES = st.builds(
    lambda multiple, least, factor: FrameSize(multiple=multiple, min_pixels=least, max_pixels=least * factor),
    st.sampled_from([8, 28, 32]),
    st.integers(100 * 32 * 32, 400_000),
    st.integers(3, 8),
)


def test_any_size_and_one_size() -> None:
    assert ANY_SIZE.of(480, 854, 1) == (480, 854) and not ANY_SIZE.is_known and ANY_SIZE.most_pixels(1) == 0
    exact = FrameSize(384, 384)
    assert exact.of(480, 854, 1) == exact.of(1, 1, 1) == (384, 384) and exact.most_pixels(1) == 384 * 384
    assert exact.within(100) == exact, "a model that takes one size takes no other"


@given(SIDES, SIDES)
@settings(deadline=None)
def test_the_size_is_upstreams(height: int, width: int) -> None:
    upstream = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    assert QWEN.of(height, width, 1) == upstream.smart_resize(height, width, 28, QWEN.min_pixels, QWEN.max_pixels)


@given(RULES, SIDES, SIDES)
@settings(deadline=None)
def test_what_was_resized_stays_as_it_is(rule: FrameSize, height: int, width: int) -> None:
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    rows, columns = rule.of(height, width, 1)
    assert rows % rule.multiple == columns % rule.multiple == 0
    assert rows * columns <= rule.most_pixels(1)
    if max(rows, columns) <= MAX_ASPECT_RATIO * min(rows, columns) and rows * columns <= rule.max_pixels:
        assert rule.of(rows, columns, 1) == (rows, columns)


@given(RULES, SIDES, SIDES, st.integers(64 * 64, 600_000))
@settings(deadline=None)
def test_a_servers_limit_leaves_the_rule_in_force(rule: FrameSize, height: int, width: int, limit: int) -> None:
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    bounded = rule.within(limit)
    rows, columns = bounded.of(height, width, 1)
    assert rows % rule.multiple == columns % rule.multiple == 0 and rows * columns <= bounded.most_pixels(1)
    if limit >= rule.max_pixels:
        assert (rows, columns) == rule.of(height, width, 1)


@pytest.mark.parametrize("size", [(1, 201), (5000, 3)])
def test_frames_too_narrow_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="narrow"):
        QWEN.of(*size, 1)
