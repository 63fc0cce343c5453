"""Opens a document's bytes, draws its pages, takes its text layer. Runs in a confined process; reads hostile files."""

import ctypes
import io
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np
import pypdfium2 as pdfium
import pypdfium2.raw as pdfium_c
from PIL import ExifTags, Image, ImageOps
from PIL.TiffImagePlugin import PHOTOMETRIC_INTERPRETATION, X_RESOLUTION, Y_RESOLUTION

from slipstream.documents.layout import around
from slipstream.documents.messages import Box, DocumentLimits, TextLine
from slipstream.documents.page_reader import Picture
from slipstream.documents.pages import check_image, picture_scale
from slipstream.errors import LimitExceeded, UnreadableDocument

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "TIFF")
MAX_LAYER_LINES = 3000
"""Of a page's text layer; a page that has more is read by OCR."""
_HYPHEN = str.maketrans({"\x02": "-", "\ufffe": "-"})
"""What PDFium gives for one at a line's end."""
_PDF_MARK, _PDF_MARK_WITHIN = b"%PDF-", 1024
_MAX_PAGES_SEEN = 100_000
"""A document that claims more pages is not believed."""


class OpenDocument(Protocol):
    """A document whose bytes have been understood."""

    num_pages: int

    def draw(self, page: int, dpi: float, max_pixels: int) -> tuple[Picture, float]:
        """The picture of a page (from 1), and its resolution (0: it has none)."""

    def text_lines(self, page: int, picture: Picture) -> list[TextLine]:
        """What the text layer says, in pixels of that picture; empty without one."""


def open_document(data: bytes, limits: DocumentLimits) -> OpenDocument:
    """Raises UnreadableDocument, or LimitExceeded for an image of far too many pixels."""
    if _PDF_MARK in data[:_PDF_MARK_WITHIN]:
        return _Pdf(data)
    return _Images(data, limits)


# -- PDF ---------------------------------------------------------------------------------------------------------------


class _Pdf:
    def __init__(self, data: bytes) -> None:
        try:
            self._document = pdfium.PdfDocument(data)
        except pdfium.PdfiumError as error:
            raise _not_opened(getattr(error, "err_code", None)) from None
        self.num_pages = len(self._document)
        if not 1 <= self.num_pages <= _MAX_PAGES_SEEN:
            raise UnreadableDocument("the PDF has no page that can be found; it is damaged, export it again")
        with suppress(pdfium.PdfiumError):  # a form whose fields cannot be drawn
            self._document.init_forms()
        self._rotations: dict[int, int] = {}
        """Of pages that were opened, in degrees clockwise."""

    def draw(self, page: int, dpi: float, max_pixels: int) -> tuple[Picture, float]:
        with self._page(page) as opened:
            width_pt, height_pt = opened.get_size()
            scale = picture_scale(width_pt, height_pt, dpi, max_pixels)
            bitmap = opened.render(scale=scale, rev_byteorder=True)
            picture = np.ascontiguousarray(bitmap.to_numpy()[:, :, :3])
        return picture, 72 * scale

    def text_lines(self, page: int, picture: Picture) -> list[TextLine]:
        height, width = picture.shape[:2]
        with self._page(page) as opened:
            # What is filled into forms and noted on the page becomes text of the page, whose edges may move by that.
            pdfium_c.FPDFPage_Flatten(opened, pdfium_c.FLAT_NORMALDISPLAY)
            found: list[TextLine] = []
            for run in self._runs(page):
                box = _clipped([_to_picture(opened, x, y, width, height) for x, y in run.corners], width, height)
                if box is None:
                    continue
                line = TextLine(box, run.words)
                if found and (between := _between(found[-1].box, box, run)) is not None:
                    last = found.pop()
                    line = TextLine(around([last, line]), last.text + between + line.text)
                found.append(line)
                if len(found) > MAX_LAYER_LINES:
                    return []
        return found

    def _runs(self, page: int) -> list["_Run"]:
        with self._page(page) as opened:
            return _runs(opened.get_textpage())

    @contextmanager
    def _page(self, page: int) -> Iterator[Any]:
        try:
            opened = self._document[page - 1]
        except pdfium.PdfiumError:
            raise UnreadableDocument(
                f"page {page} of the PDF cannot be read; it is damaged, leave it out by `pages`"
            ) from None
        try:
            if page not in self._rotations:
                self._rotations[page] = _upright(opened)
            opened.set_rotation(self._rotations[page])
            yield opened
        finally:
            opened.close()


def _not_opened(code: int | None) -> UnreadableDocument:
    if code in (pdfium_c.FPDF_ERR_PASSWORD, pdfium_c.FPDF_ERR_SECURITY):
        return UnreadableDocument(
            "the PDF is encrypted and needs a password; documents with one are not taken, save it without"
        )
    return UnreadableDocument("this is no PDF that can be read: it is damaged, cut off or empty; export it again")


_MOST_LETTERS, _FEWEST_LETTERS = 2000, 20
_SAME_WAY = 0.9


def _upright(page: Any) -> int:
    """The rotation of a page, in degrees clockwise, by which it is to be read: its own, or that of nearly all letters
    that are seen on it, as on one with a table that lies on its side. What is not seen, as the text layer of a scan, is
    not asked."""
    try:
        text = page.get_textpage()
    except pdfium.PdfiumError:
        return int(page.get_rotation())
    turns: Counter[int] = Counter()
    for place in range(min(text.count_chars(), _MOST_LETTERS)):
        letter = pdfium_c.FPDFText_GetTextObject(text, place)
        is_seen = pdfium_c.FPDFTextObj_GetTextRenderMode(letter) != pdfium_c.FPDF_TEXTRENDERMODE_INVISIBLE
        if is_seen and not chr(pdfium_c.FPDFText_GetUnicode(text, place)).isspace():
            turns[round(-math.degrees(pdfium_c.FPDFText_GetCharAngle(text, place)) / 90) % 4 * 90] += 1
    ((turn, count),) = turns.most_common(1) or [(0, 0)]
    is_clear = count >= max(_FEWEST_LETTERS, _SAME_WAY * turns.total())
    return turn if is_clear else int(page.get_rotation())


class _Run:
    """Letters that were set at once, or have no blank between them: a word whose font changes is one."""

    def __init__(self, text: Any, first: int, *, is_new_line: bool) -> None:
        self.is_new_line = is_new_line
        """PDFium sees the end of a line before it, which it also does at raised and lowered letters."""
        self.last = first
        """Place of its last letter."""
        self._text = text
        self._letters = ""
        self._box = (math.inf, math.inf, -math.inf, -math.inf)

    @property
    def words(self) -> str:
        """What they say. PDFium gives halves of letters that UTF-16 has two of."""
        whole = self._letters.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return " ".join(whole.translate(_HYPHEN).split())

    @property
    def corners(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """In points of the page."""
        return self._box[:2], self._box[2:]

    @property
    def has_area(self) -> bool:
        """Whether anything can be seen of them."""
        (left, bottom), (right, top) = self.corners
        return left < right and bottom < top

    def add(self, letters: str, place: int) -> None:
        """One more letter, with the blanks before it."""
        left, bottom, right, top = self._text.get_charbox(place)
        box = self._box
        self._box = (min(box[0], left), min(box[1], bottom), max(box[2], right), max(box[3], top))
        self._letters += letters
        self.last = place

    def is_set_with(self, place: int) -> bool:
        """Whether the letter there is of the same operation as the last one."""
        one, other = (pdfium_c.FPDFText_GetTextObject(self._text, index) for index in (self.last, place))
        return ctypes.cast(one, ctypes.c_void_p).value == ctypes.cast(other, ctypes.c_void_p).value


def _runs(text: Any) -> list[_Run]:
    """What a text layer says, in its order. PDFium's own way to it, by rectangles, parts words where their font changes
    and says letters twice that reach into the rectangle of another."""
    runs: list[_Run] = []
    blanks = ""
    for place in range(text.count_chars()):
        letter = chr(pdfium_c.FPDFText_GetUnicode(text, place))
        if letter.isspace():
            blanks += letter
            continue
        if not runs or (blanks and not runs[-1].is_set_with(place)):
            runs.append(_Run(text, place, is_new_line="\n" in blanks))
            blanks = ""
        runs[-1].add(blanks + letter, place)
        blanks = "\n" if ord(letter) in _HYPHEN else ""
    return [run for run in runs if run.has_area]


_SAME_LINE, _SAME_WORD = 0.7, 0.2
"""Between words of a line there is less than so many of their heights, and between letters of a word."""


def _between(box: Box, after: Box, run: _Run) -> str | None:
    """What parts a run from the one before it, whose boxes these are: None where they are not of one line."""
    height = min(box.height, after.height)
    common = min(box.bottom, after.bottom) - max(box.top, after.top)
    gap = abs(after.left - box.right)
    is_sideways = len(run.words) > 1 and after.height > 2 * after.width
    if is_sideways or 2 * common <= height or gap >= _SAME_LINE * height:
        return None
    return "" if run.is_new_line and gap < _SAME_WORD * height else " "


def _to_picture(page: Any, x: float, y: float, width: int, height: int) -> tuple[int, int]:
    """From points of the page, which may be cropped or turned, to pixels."""
    across, down = ctypes.c_int(), ctypes.c_int()
    pdfium_c.FPDF_PageToDevice(page, 0, 0, width, height, 0, x, y, across, down)
    return across.value, down.value


def _clipped(corners: list[tuple[int, int]], width: int, height: int) -> Box | None:
    (x, y), (other_x, other_y) = corners
    left, right = max(0, min(x, other_x)), min(width, max(x, other_x) + 1)
    top, bottom = max(0, min(y, other_y)), min(height, max(y, other_y) + 1)
    return Box(left, top, right, bottom) if left < right and top < bottom else None


# -- images ------------------------------------------------------------------------------------------------------------


class _Images:
    """The pictures of one file: a TIFF may have many, each a page. Further ones of another kind are none: they are a
    camera's depth map or preview, or move."""

    def __init__(self, data: bytes, limits: DocumentLimits) -> None:
        self._limits = limits
        self._shapes: dict[int, float] = {}
        """Of the pixels of pages; once one is drawn, Pillow has turned it and forgotten that."""
        try:
            self._image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
            self.num_pages = getattr(self._image, "n_frames", 1) if self._image.format == "TIFF" else 1
        except Image.DecompressionBombError:
            raise LimitExceeded("the image has far more pixels than are decoded; scale it down") from None
        except (OSError, SyntaxError, ValueError, TypeError, EOFError) as error:
            raise UnreadableDocument(
                "this is neither a PDF nor a PNG, JPEG, WebP or TIFF image that can be read; it is damaged, empty or"
                " of another kind"
            ) from error

    def draw(self, page: int, dpi: float, max_pixels: int) -> tuple[Picture, float]:
        try:
            self._image.seek(page - 1)
            check_image(*self._image.size, self._limits)
            shape = self._shapes.setdefault(page, _pixel_shape(self._image))
            upright = _as_rgb(ImageOps.exif_transpose(self._image), is_white_zero=_is_white_zero(self._image))
        except (OSError, SyntaxError, ValueError, TypeError, EOFError) as error:
            raise UnreadableDocument(f"image {page} of the file is damaged or cut off; export it again") from error
        width, height = upright.width * max(1.0, shape), upright.height * max(1.0, 1 / shape)
        shrink = min(1.0, math.sqrt(max_pixels / (width * height)))
        if 0 in (size := (int(width * shrink), int(height * shrink))):
            raise LimitExceeded(
                f"an image of {upright.width} x {upright.height} pixels is too long and thin to be drawn in"
                f" {max_pixels} pixels"
            )
        if size != upright.size:
            upright = upright.resize(size, Image.Resampling.BOX if shape == 1 else Image.Resampling.BICUBIC)
        return np.asarray(upright), 0.0

    def text_lines(self, page: int, picture: Picture) -> list[TextLine]:
        return []


def _is_white_zero(image: Image.Image) -> bool:
    """Whether a TIFF says that 0 is white."""
    return getattr(image, "tag_v2", {}).get(PHOTOMETRIC_INTERPRETATION) == 0


_SQUARE, _MOST_OBLONG = 0.011, 4.0
_LAST_NOT_TURNED = 4
"""EXIF's orientations behind it are a quarter turn from upright."""


def _pixel_shape(image: Image.Image) -> float:
    """How much wider than high the pixels of a TIFF are on paper, where it stands upright; those of a coarse fax are
    about half as wide as high. Less than 1.1 % is none, and more than 4 to 1 is not believed."""
    tags: Any = getattr(image, "tag_v2", {})
    across, down = (float(tags.get(tag) or 1) for tag in (X_RESOLUTION, Y_RESOLUTION))
    shape = down / across if across and down else 1.0
    if not 1 / _MOST_OBLONG <= shape <= _MOST_OBLONG or abs(shape - 1) < _SQUARE:
        return 1.0
    return 1 / shape if tags.get(ExifTags.Base.Orientation, 1) > _LAST_NOT_TURNED else shape


def _as_rgb(image: Image.Image, *, is_white_zero: bool) -> Image.Image:
    """RGB on white: an OCR sees nothing in 1-bit and palette pictures as they are. Pillow gives samples of more than 8
    bits as they are stored: the largest is one end of what is shown, or 1 where that is larger."""
    if image.mode in ("I;16", "I;16B", "I;16L", "I", "F"):
        samples = np.nan_to_num(np.asarray(image).astype(np.float64), copy=False, posinf=0).clip(0)
        shown = (samples / max(1.0, samples.max(initial=0)) * 255).astype(np.uint8)
        return Image.fromarray(255 - shown if is_white_zero else shown).convert("RGB")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        ground = Image.new("RGBA", seen.size, "white")
        return Image.alpha_composite(ground, seen).convert("RGB")
    return image.convert("RGB")
