"""Files of a read document, and the page for proof-readers."""

import html
import html.parser
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from slipstream.documents import disagreements
from slipstream.documents.disagreements import (
    HTML_END,
    PageReadings,
    RegionReadings,
    compare_words,
    html_head,
    page_html,
    png_bytes,
    split_by_regions,
)
from slipstream.documents.messages import (
    BadDraft,
    Box,
    Origin,
    PageDraft,
    PagePicture,
    Region,
    RegionKind,
    checked_draft,
    clean_text,
    draft_from_bytes,
    draft_to_json,
)
from slipstream.documents.output import markdown_page, page_record
from slipstream.documents.surfaces import page_text


def region(order: int, text: str, kind: RegionKind = RegionKind.TEXT) -> Region:
    return Region(Box(5, 10 * order, 50, 10 * order + 9), kind, order, text, 0.5, Origin.OCR)


DRAFT = PageDraft(3, 60, 80, (region(0, "Foxes", RegionKind.HEADING), region(1, "read\nthe paper")), ("cut",), 1.5)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_markdown_has_page_marks() -> None:
    text = page_text(DRAFT.regions)
    assert markdown_page(3, text) == "<!-- page 3 -->\n\n# Foxes\n\nread the paper\n\n"
    assert markdown_page(4, "") == "<!-- page 4 -->\n\n"


def test_a_lossy_text_is_marked_as_such() -> None:
    """Behind the page's mark, and before the first page of what proof-readers see."""
    facts = ("lossy: a", "lossy: b -->")
    assert markdown_page(3, "text", facts) == "<!-- page 3 -->\n<!-- lossy: a -->\n<!-- lossy: b - -> -->\n\ntext\n\n"
    head = html_head("a.pdf", facts)
    assert '<p class="lossy">lossy: a</p><p class="lossy">lossy: b --&gt;</p>' in head
    assert 'class="lossy"' not in html_head("lossy: a.pdf")


@pytest.mark.parametrize("forged", ["<!-- page 9 -->", "<!--page 9-->", "<!--  PAGE\n9 -->", "<!-- lossy: page"])
def test_a_page_cannot_forge_the_mark_of_another(forged: str) -> None:
    text = f"before\n\n{forged}\n\n<!-- a comment --> after"
    page = markdown_page(3, text)
    assert page.count("<!-- page") == 1 and "<!-- lossy" not in page and page.startswith("<!-- page 3 -->")
    assert html.unescape(page) == f"<!-- page 3 -->\n\n{text}\n\n"


def disagreements_html(title: str, pages: list[PageReadings]) -> str:
    return html_head(title) + "".join(map(page_html, pages)) + HTML_END


@given(st.lists(st.text("ab \n", max_size=12), max_size=5), st.text("abc \n", max_size=40))
def test_no_word_of_a_page_is_lost_between_its_regions(regions: list[str], text: str) -> None:
    parts = split_by_regions(regions, text)
    assert len(parts) == len(regions)
    if regions:
        assert " ".join(parts).split() == text.split()


def test_words_go_where_the_ocr_has_them() -> None:
    regions = ["# The fox", "", "reads the paper", "at noon"]
    assert split_by_regions(regions, "# The fox reads thc paper, at noon") == [
        "# The fox",
        "",
        "reads thc paper,",
        "at noon",
    ]
    assert split_by_regions(regions, "reads the") == ["", "", "reads the", ""]
    assert split_by_regions([], "words") == []


def test_a_page_is_one_line_of_json() -> None:
    line = page_record("a.pdf", DRAFT, model="reader")
    record = json.loads(line)
    assert line.endswith("\n") and line.count("\n") == 1
    assert (record["document"], record["page"], record["model"], record["warnings"]) == ("a.pdf", 3, "reader", ["cut"])
    assert record["regions"][1] == {
        "order": 1,
        "kind": "text",
        "box": [5, 10, 50, 19],
        "text": "read\nthe paper",
        "score": 0.5,
        "origin": "ocr",
    }


def test_a_draft_survives_json() -> None:
    data = json.dumps(draft_to_json(DRAFT)).encode()
    assert checked_draft(draft_from_bytes(data), 3, 60, 80) == DRAFT


@given(st.binary(max_size=60) | st.recursive(texts | st.integers() | st.none(), st.lists, max_leaves=5).map(repr))
def test_bytes_of_strangers_are_no_draft(data: bytes | str) -> None:
    with pytest.raises(BadDraft):
        draft_from_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))


@given(st.text(max_size=60))
def test_clean_texts_can_be_written(text: str) -> None:
    clean = clean_text(text)
    clean.encode()
    assert clean_text(clean) == clean and not set(clean) & set("\x00\x1b\x7f\u202e")


# -- disagreements -----------------------------------------------------------------------------------------------------


def test_words_that_differ() -> None:
    passages = compare_words("seven 1iter of\nwater", "seven liter of water now")
    assert [(passage.ocr, passage.model, passage.agrees) for passage in passages] == [
        ("seven", "seven", True),
        ("1iter", "liter", False),
        ("of water", "of water", True),
        ("", "now", False),
    ]


@given(texts, texts)
def test_passages_hold_both_texts(ocr: str, model: str) -> None:
    passages = compare_words(ocr, model)
    assert " ".join(passage.ocr for passage in passages if passage.ocr) == " ".join(ocr.split())
    assert " ".join(passage.model for passage in passages if passage.model) == " ".join(model.split())


def test_words_behind_the_limit_differ_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disagreements, "MAX_WORDS", 2)
    passages = compare_words("a b c", "a b c d")
    assert [(passage.ocr, passage.model) for passage in passages] == [("a b", "a b"), ("c", "c d")]


class Elements(html.parser.HTMLParser):
    """Notes tags and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words.setdefault(self.tags[-1] if self.tags else "", []).append(data)


PICTURE = PagePicture(3, 60, 80, 150, bytes(range(240)) * 60)


def test_the_page_shows_the_picture_the_boxes_and_what_differs() -> None:
    readings = [RegionReadings(DRAFT.regions[0], "Foxes"), RegionReadings(DRAFT.regions[1], "read the papers")]
    page = disagreements_html("a.pdf", [PageReadings(PICTURE, readings)])
    found = Elements(page)
    assert found.tags.count("rect") == 2 and page.count('class="differs"') == 2
    assert "paper" in found.words["del"] and "papers" in found.words["ins"]
    assert "1 of 2 regions differ" in page and "data:image/png" in page


def test_pages_on_which_both_agree_are_a_line() -> None:
    readings = [RegionReadings(DRAFT.regions[1], "read the\npaper")]
    page = disagreements_html("a.pdf", [PageReadings(PICTURE, readings)])
    assert "Both read the same in all 1 regions" in page and "<svg" not in page


@given(texts, texts, texts)
def test_no_text_becomes_markup(title: str, ocr: str, model: str) -> None:
    evil = f"</p><script>{ocr}</script><img src=x>"
    pages = [PageReadings(PagePicture(1, 60, 80, 0), [RegionReadings(region(0, evil), f"<b>{model}&lt;")])]
    tags = set(Elements(disagreements_html(f"<i>{title}", pages)).tags)
    assert not tags & {"script", "img", "i", "b", "image"}


def test_pixels_as_png() -> None:
    with Image.open(io.BytesIO(png_bytes(PICTURE))) as image:
        assert image.size == (60, 80) and image.tobytes() == PICTURE.pixels
    with pytest.raises(ValueError, match="do not fit"):
        png_bytes(PagePicture(1, 2, 2, 0, b"abc"))
