"""Which regions of a page are worth a reading of their own, and what each looks like alone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.documents.messages import Box, PageDraft, PagePicture
from slipstream.frame_size import FrameSize

LEAST_SIDE = 8
"""In pixels; below it there is nothing to read."""
MAX_READ = 64
MAX_PAGES = 2.0
"""Of one page: how many regions are read, and how many times its own area they have together. A reader that lies can
make no more work than that."""
WORTH_CUTTING = 0.9
"""A part of a page is cut out where the target then sees less than this share of the page's pixels."""


@dataclass(frozen=True)
class ReadableRegion:
    """A region that the target is to read."""

    place: int
    """Of its text among those of the page's regions."""
    text: str
    """What it seems to say, as the target would write it."""
    box: Box
    """In pixels of the page's picture."""


def readable_regions(draft: PageDraft, texts: Sequence[str], picture: PagePicture) -> list[ReadableRegion]:
    """In reading order; without those that say nothing, are too small, or would be too many.

    Args:
        draft: of that page, perhaps made of a picture of another size.
        texts: of its regions, one each, as the target would write them; "" for one that it leaves out.
    """
    found: list[ReadableRegion] = []
    area_left = MAX_PAGES * picture.width * picture.height
    for place, (region, text) in enumerate(zip(draft.regions, texts, strict=True)):
        box = _on_picture(region.box, draft, picture)
        if text and min(box.width, box.height) >= LEAST_SIDE and box.area <= area_left:
            area_left -= box.area
            found.append(ReadableRegion(place, text, box))
    return found[:MAX_READ]


def shown_alone(picture: PagePicture, box: Box, size: FrameSize) -> PagePicture:
    """What that box of the page looks like alone, for a target that takes frames of `size`.

    It is cut out. A target whose frames have one size would enlarge that to a page of huge letters, which saves nothing
    and which it may never have seen: it gets the page, blank but for the box.

    Raises:
        InvalidRequest: the target takes no pictures that are so narrow.
    """
    page = np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.height, picture.width, 3)
    inside = (slice(box.top, box.bottom), slice(box.left, box.right))
    shown = page[inside]
    if _num_seen(shown, size) >= WORTH_CUTTING * _num_seen(page, size):
        shown = np.empty_like(page)
        shown[:] = np.median(page[::8, ::8], axis=(0, 1))  # most of a page is its paper
        shown[inside] = page[inside]
    height, width, _ = shown.shape
    return PagePicture(picture.page, width, height, picture.dpi, shown.tobytes())


def _on_picture(box: Box, draft: PageDraft, picture: PagePicture) -> Box:
    """The part of the box that is on the picture, in its pixels; without any it has no area."""
    across, down = picture.width / draft.width, picture.height / draft.height
    left, right = (min(max(round(side * across), 0), picture.width) for side in (box.left, box.right))
    top, bottom = (min(max(round(side * down), 0), picture.height) for side in (box.top, box.bottom))
    return Box(left, top, right, bottom)


def _num_seen(pixels: NDArray[np.uint8], size: FrameSize) -> int:
    """Pixels that the target has of a picture [height, width, 3]."""
    height, width = size.of(pixels.shape[0], pixels.shape[1], 1)
    return height * width
