"""A reader's process that loads no model: it draws pages, and takes the text that a document brings along unchecked."""

import sys
from collections.abc import Sequence
from typing import Any

from slipstream.documents import child
from slipstream.documents.layout import make_regions
from slipstream.documents.messages import Origin, Region, TextLine
from slipstream.documents.page_reader import Picture
from tests.support.bad_reader import NoEyes


def take_layer(
    picture: Picture, layer: Sequence[TextLine], reads: Any, *, ocr: bool = True
) -> tuple[list[Region], list[str]]:
    return make_regions([], layer, Origin.TEXT_LAYER), []


if __name__ == "__main__":
    child.Recogniser = NoEyes  # type: ignore[misc, assignment]
    child.read_page = take_layer  # type: ignore[assignment]
    child.main(*map(int, sys.argv[1:]))
