"""Which regions of a page are read apart, and what is shown of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.documents.messages import Box, Origin, PageDraft, PagePicture, Region, RegionKind
from slipstream.documents.regions import LEAST_SIDE, MAX_PAGES, MAX_READ, readable_regions, shown_alone
from slipstream.errors import InvalidRequest
from slipstream.frame_size import ANY_SIZE, FrameSize

WIDTH, HEIGHT = 200, 120
NEAR = FrameSize(multiple=4, min_pixels=16, max_pixels=10**6)
"""Frames keep about their own size."""
ONE_SIZE = FrameSize(multiple=4, min_pixels=20_000, max_pixels=21_000)
SQUARE = FrameSize(height=64, width=64)


def picture_of(width: int = WIDTH, height: int = HEIGHT) -> PagePicture:
    """Grey paper with a pattern of its own in every pixel of the left half."""
    pixels = np.full((height, width, 3), 200, dtype=np.uint8)
    half = pixels[:, : width // 4]
    half[:] = np.arange(half.size).reshape(half.shape) % 251
    return PagePicture(1, width, height, 72, pixels.tobytes())


def draft_of(*boxes: Box, width: int = WIDTH, height: int = HEIGHT) -> PageDraft:
    regions = tuple(Region(box, RegionKind.TEXT, order, "x", 1.0, Origin.OCR) for order, box in enumerate(boxes))
    return PageDraft(1, width, height, regions)


def pixels_of(picture: PagePicture) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)


def test_what_says_nothing_or_is_too_small_is_left_out() -> None:
    boxes = [Box(0, 0, 90, 30), Box(0, 30, 90, 60), Box(0, 60, LEAST_SIDE - 1, 90), Box(0, 90, 90, 90 + LEAST_SIDE)]
    found = readable_regions(draft_of(*boxes), ["a", "", "c", "d"], picture_of())
    assert [(region.place, region.text, region.box) for region in found] == [(0, "a", boxes[0]), (3, "d", boxes[3])]


def test_boxes_are_those_of_the_picture_that_is_shown() -> None:
    """The reader may have had the page in another resolution."""
    draft = draft_of(Box(100, 50, 300, 200), width=2 * WIDTH, height=2 * HEIGHT)
    (region,) = readable_regions(draft, ["a"], picture_of())
    assert region.box == Box(50, 25, 150, 100)


def test_a_reader_that_lies_makes_no_more_work_than_so_many_regions_and_pages() -> None:
    small, whole = Box(0, 0, 10, 10), Box(0, 0, WIDTH, HEIGHT)
    assert len(readable_regions(draft_of(*[small] * 500), ["a"] * 500, picture_of())) == MAX_READ
    found = readable_regions(draft_of(*[whole] * 500, small), ["a"] * 501, picture_of())
    assert len(found) == MAX_PAGES and {region.box for region in found} == {whole}


sides = st.integers(-3 * WIDTH, 3 * WIDTH)


@given(st.lists(st.tuples(st.builds(Box, sides, sides, sides, sides), st.text(max_size=3)), max_size=20), st.data())
def test_whatever_boxes_are_said_what_is_shown_is_a_part_of_the_page(
    said: list[tuple[Box, str]], data: st.DataObject
) -> None:
    picture, size = picture_of(), data.draw(st.sampled_from([NEAR, ONE_SIZE, SQUARE, ANY_SIZE]))
    found = readable_regions(draft_of(*[box for box, _ in said]), [text for _, text in said], picture)
    assert [region.place for region in found] == sorted({region.place for region in found})
    page = pixels_of(picture)
    for region in found:
        left, top, right, bottom = region.box
        assert 0 <= left < right <= WIDTH and 0 <= top < bottom <= HEIGHT and region.text == said[region.place][1]
        shown = shown_alone(picture, region.box, size)
        part = page[top:bottom, left:right]
        if (shown.width, shown.height) == (region.box.width, region.box.height):
            assert np.array_equal(pixels_of(shown), part)
        else:
            assert (shown.width, shown.height) == (WIDTH, HEIGHT)
            assert np.array_equal(pixels_of(shown)[top:bottom, left:right], part)


def test_a_target_that_sees_less_of_a_part_than_of_a_page_gets_the_part() -> None:
    picture, box = picture_of(), Box(20, 10, 60, 40)
    for size in (NEAR, ANY_SIZE):
        assert (shown_alone(picture, box, size).width, shown_alone(picture, box, size).height) == (40, 30)


@pytest.mark.parametrize("size", [ONE_SIZE, SQUARE])
def test_a_target_of_one_size_gets_the_page_blank_but_for_the_part(size: FrameSize) -> None:
    picture, box = picture_of(), Box(20, 10, 60, 40)
    shown = pixels_of(shown_alone(picture, box, size)).copy()
    assert np.array_equal(shown[10:40, 20:60], pixels_of(picture)[10:40, 20:60])
    shown[10:40, 20:60] = 200
    assert (shown == 200).all(), "what is blank has the paper's colour"


def test_a_part_that_is_too_narrow_for_the_target_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too narrow"):
        shown_alone(picture_of(4000, 20), Box(0, 0, 4000, 9), NEAR)
