"""The size that frames are given is the one that the checkpoint's own processor would give them."""

from inspect import signature
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers.image_utils import SizeDict

from slipstream.errors import InvalidRequest
from slipstream.frame_size import ANY_SIZE, MAX_ASPECT_RATIO, FrameSize

QWEN = FrameSize(multiple=28, min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28)
SHARED = FrameSize(multiple=28, min_pixels=16 * 28 * 28, max_pixels=16384 * 28 * 28, shares_most=True)
PIXTRAL = FrameSize(multiple=28, max_pixels=1540 * 1540, longest_edge=1540)
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


@given(SIDES, SIDES, st.integers(2, 200), st.sampled_from([0, 4, 64, 768]), st.integers(5, 50_000))
@settings(deadline=None)
def test_the_size_of_a_whole_video_is_upstreams(height: int, width: int, frames: int, cap: int, budget: int) -> None:
    """Bounds of all frames together; and with a cap, tokens of a frame, of each."""
    upstream = pytest.importorskip("transformers.models.qwen3_vl.video_processing_qwen3_vl").Qwen3VLVideoProcessor
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    assume("cap_pixels_per_frame" in signature(upstream.resize).parameters or not cap)
    token = 32 * 32
    rule = FrameSize(
        multiple=32, min_pixels=4 * token, max_pixels=budget * token, frames_per_step=2, capped_pixels=cap * token
    )
    processor = object.__new__(upstream)
    processor.max_video_tokens = cap
    inherited = next(parent for parent in upstream.__mro__[1:] if "resize" in vars(parent))
    with mock.patch.object(inherited, "resize", lambda self, image, size, resample: (size.height, size.width)):
        wanted = processor.resize(
            SimpleNamespace(shape=(1, frames, 3, height, width)),
            SizeDict(shortest_edge=rule.min_pixels, longest_edge=rule.max_pixels),
            resample=None,
            factor=32,
            temporal_factor=2,
            **({"cap_pixels_per_frame": True} if cap else {}),
        )
    assert rule.of(height, width, frames) in (wanted, (height, width)), "what has such a size already keeps it"


@given(SIDES, SIDES, st.integers(1, 256))
@example(720, 1280, 180)
@settings(deadline=None)
def test_the_size_of_frames_that_share_a_bound_is_upstreams(height: int, width: int, frames: int) -> None:
    """By the published settings of VideoLLaMA 3, whose processor calls this function with an even share."""
    upstream = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    wanted = upstream.smart_resize(height, width, 28, SHARED.min_pixels, SHARED.max_pixels // frames)
    assert SHARED.of(height, width, frames) == wanted


@given(SIDES, SIDES)
@example(1540, 1540)
@settings(deadline=None)
def test_the_size_by_the_longest_edge_is_upstreams(height: int, width: int) -> None:
    """By the published settings of Mistral Small 3.1 and Ministral 3."""
    upstream = pytest.importorskip("transformers.models.pixtral.image_processing_pil_pixtral")
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    picture = SimpleNamespace(shape=(height, width, 3))
    with mock.patch.object(upstream, "get_image_size", lambda image, _: image.shape[:2]):
        wanted = upstream.get_resize_output_image_size(picture, 1540, 28)
    assert PIXTRAL.of(height, width, 1) == wanted


@given(SIDES, SIDES, st.integers(28 * 28, 3_000_000))
@settings(deadline=None)
def test_a_servers_limit_bounds_frames_of_a_longest_edge(height: int, width: int, limit: int) -> None:
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    rule = PIXTRAL.within(limit)
    rows, columns = rule.of(height, width, 1)
    assert rows % 28 == columns % 28 == 0 and max(rows, columns) <= 1540 and rows * columns <= rule.most_pixels(1)
    if min(rows, columns) > 28:
        assert rows * columns <= limit
        assert rule.of(rows, columns, 1) == PIXTRAL.of(rows, columns, 1) == (rows, columns), "it is resized once"


@given(SIDES, SIDES, st.integers(1, 5000), st.sampled_from([0, 602_112]))
@settings(deadline=None)
def test_frames_that_share_a_bound_are_resized_once(height: int, width: int, frames: int, limit: int) -> None:
    """Also where there are so many that each share is less than the least size."""
    assume(max(height, width) <= MAX_ASPECT_RATIO * min(height, width))
    rule = SHARED.within(limit) if limit else SHARED
    rows, columns = rule.of(height, width, frames)
    assert rows % 28 == columns % 28 == 0 and rows * columns <= rule.most_pixels(frames)
    is_thin = max(rows, columns) > MAX_ASPECT_RATIO * min(rows, columns)
    if not is_thin and rows * columns <= rule.max_pixels // frames:
        assert rule.of(rows, columns, frames) == (rows, columns)
        if frames < 256:
            assert rule.of(rows, columns, max(1, frames - 3)) == (rows, columns), "some may be too damaged to be there"


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


@given(st.integers(200, 5000), st.floats(0.3, 3), st.integers(1, 40), st.integers(128 * 128, 602_112))
@example(1080, 1920 / 1080, 15, 602_112)
@settings(deadline=None)
def test_a_servers_limit_is_of_each_frame_of_a_whole_video(height: int, ratio: float, frames: int, limit: int) -> None:
    whole = FrameSize(multiple=32, min_pixels=64 * 64, max_pixels=25_165_824, frames_per_step=2)
    rows, columns = whole.within(limit).of(height, round(height * ratio), frames)
    assert rows * columns <= limit
    assert whole.within(limit).of(rows, columns, frames) == (rows, columns)
    if rows * columns * frames <= whole.max_pixels:
        assert whole.of(rows, columns, frames) == (rows, columns), "the model leaves it as it is"


@pytest.mark.parametrize("size", [(1, 201), (5000, 3)])
def test_frames_too_narrow_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="narrow"):
        QWEN.of(*size, 1)
