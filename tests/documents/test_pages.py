"""Which pages are meant, and how large their pictures are."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.documents.messages import DocumentLimits, DocumentRequest
from slipstream.documents.pages import (
    MAX_RANGE_CHARS,
    check_image,
    check_request,
    first_ranges,
    page_ranges,
    parse_pages,
    picture_scale,
)
from slipstream.errors import InvalidRequest, LimitExceeded


@pytest.mark.parametrize(
    ("asked", "pages"),
    [
        ("", (1, 2, 3, 4, 5)),
        (" ", (1, 2, 3, 4, 5)),
        ("3", (3,)),
        ("1-2,5", (1, 2, 5)),
        ("4-", (4, 5)),
        ("5, 1 - 2", (5, 1, 2)),
        ("2,1-3,2", (2, 1, 3)),
    ],
)
def test_pages_that_are_meant(asked: str, pages: tuple[int, ...]) -> None:
    assert parse_pages(asked, 5, 100) == pages


@given(st.lists(st.integers(1, 40), unique=True, min_size=1))
def test_pages_written_as_ranges_are_the_same_pages(pages: list[int]) -> None:
    assert parse_pages(page_ranges(pages), 40, 100) == tuple(pages)


def test_ranges_are_short() -> None:
    assert page_ranges([1, 2, 3, 7, 9, 8, 5, 6]) == "1-3,7,9,8,5-6"


@pytest.mark.parametrize(
    "asked", ["0", "6", "4-6", "3-2", "-3", "a", "1,", ",", "1;2", "1--2", "٣", "9" * 8, "1," * 999]
)
def test_what_names_no_pages_is_refused(asked: str) -> None:
    with pytest.raises(InvalidRequest, match="pages"):
        parse_pages(asked, 5, 100)


def test_a_range_the_wrong_way_round_is_told_from_one_that_is_not_there() -> None:
    with pytest.raises(InvalidRequest, match='ends before it begins; write "3-5"'):
        parse_pages("5-3", 9, 100)
    for asked in ("5-", "3-5"):
        with pytest.raises(InvalidRequest, match="pages 1 to 4"):
            parse_pages(asked, 4, 100)


def test_more_pages_than_are_read_are_refused_with_what_to_do() -> None:
    with pytest.raises(LimitExceeded, match='"1-10"'):
        parse_pages("", 1000, 10)
    assert parse_pages("991-1000", 1000, 10) == tuple(range(991, 1001))


@given(st.text(alphabet="0123456789-, ", max_size=20), st.integers(1, 50))
def test_pages_are_of_the_document_and_named_once_whatever_is_asked(asked: str, num_pages: int) -> None:
    try:
        pages = parse_pages(asked, num_pages, 50)
    except InvalidRequest:
        return
    assert pages and len(set(pages)) == len(pages) and set(pages) <= set(range(1, num_pages + 1))


@given(st.floats(0.01, 20_000), st.floats(0.01, 20_000), st.integers(20, 600), st.integers(1000, 20_000_000))
def test_a_picture_is_never_larger_than_allowed(width: float, height: float, dpi: int, most: int) -> None:
    try:
        scale = picture_scale(width, height, dpi, most)
    except LimitExceeded:
        return
    assert math.ceil(width * scale) * math.ceil(height * scale) <= most
    assert min(width, height) * scale >= 1 and scale <= dpi / 72


def test_ordinary_pages_get_the_resolution_that_was_asked_for_and_posters_less() -> None:
    assert picture_scale(595, 842, 144, 16_000_000) == 2
    assert picture_scale(8400, 8400, 150, 16_000_000) == pytest.approx(4000 / 8400, rel=0.02)


@pytest.mark.parametrize("size", [(0, 10), (-5, 10), (math.nan, 10), (math.inf, 10), (1, 1e9)])
def test_a_page_that_cannot_be_drawn_is_refused(size: tuple[float, float]) -> None:
    with pytest.raises(LimitExceeded, match=r"cannot be drawn|long and thin"):
        picture_scale(*size, 150, 16_000_000)


def test_requests_and_images_beyond_the_limits() -> None:
    for request in (DocumentRequest(dpi=5), DocumentRequest(dpi=5000), DocumentRequest(ocr_dpi=1)):
        with pytest.raises(InvalidRequest, match="dpi"):
            check_request(request)
    check_request(DocumentRequest(ocr_dpi=60))
    with pytest.raises(LimitExceeded, match="scale it down"):
        check_image(100_000, 100_000, DocumentLimits())


def test_pages_are_counted_range_by_range() -> None:
    """A thousand characters may name a hundred thousand pages hundreds of times; no more than needed are looked at."""
    with pytest.raises(LimitExceeded):
        parse_pages("1-,nonsense", 100_000, 10)


@given(st.lists(st.integers(1, 5000), unique=True, min_size=1, max_size=400))
def test_as_many_first_pages_as_can_be_named(pages: list[int]) -> None:
    asked = first_ranges(pages)
    found = parse_pages(asked, 5000, 5000)
    assert found == tuple(pages[: len(found)]) and len(asked) <= MAX_RANGE_CHARS
    assert len(found) == len(pages) or len(asked) + len(f",{pages[len(found)]}-5000") > MAX_RANGE_CHARS
