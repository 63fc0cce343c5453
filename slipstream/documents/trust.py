"""Whether the text that a document brings along is what its pages show. Pure.

A text layer may be another document's, shifted, empty of sense (fonts without a mapping to characters) or made to
deceive. So a few of its lines are compared with what the OCR sees in their places.
"""

import unicodedata
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from enum import Enum
from itertools import pairwise

from slipstream.documents.messages import TextLine

NUM_SAMPLES = 3
MIN_CHARS = 6
"""Letters and digits of a line that is worth comparing."""
MAX_CHARS = 120
"""Of a line that are compared."""
ALIKE = 0.6
"""Similarity (0 to 1) of a line of the layer and what the OCR reads in its place: a clean line has 0.95 and more."""
MIN_KNOWN_SHARE = 0.5
"""Letters that the OCR must know, of all of a layer, for its reading to say anything."""
MAX_ODD_SHARE = 0.1
"""Characters that no page shows, of all of a layer."""


class LayerVerdict(Enum):
    """What a comparison says of a text layer."""

    GENUINE = "genuine"
    FAKE = "fake"
    UNKNOWN_SCRIPT = "unknown script"
    """It is of letters that the OCR cannot read, so there is nothing to compare it with."""


def judge_layer(
    lines: Sequence[TextLine], read: Callable[[TextLine], str], knows: Callable[[str], bool]
) -> LayerVerdict:
    """Whether most of the sampled lines are what `read` sees in their places; `knows` tells which letters it can read.
    A layer without a line that is worth comparing counts as fake."""
    text = "".join(line.text for line in lines)
    if _odd_share(text) > MAX_ODD_SHARE:
        return LayerVerdict.FAKE
    samples = [(line.text, read(line)) for line in sample_lines(lines)]
    is_known = sum(map(knows, _plain(text))) >= MIN_KNOWN_SHARE * len(_plain(text))
    if is_known:
        num_right = sum(similarity(said, seen) >= ALIKE for said, seen in samples)
    else:  # the OCR is to see nothing there that it can read
        num_right = sum(len(_plain(seen)) < MIN_CHARS for _, seen in samples)
    if 2 * num_right <= len(samples):
        return LayerVerdict.FAKE
    return LayerVerdict.GENUINE if is_known else LayerVerdict.UNKNOWN_SCRIPT


def sample_lines(lines: Sequence[TextLine]) -> list[TextLine]:
    """At most `NUM_SAMPLES` lines, spread over the page: of each part of it the one with most letters and digits."""
    worthy = [line for line in lines if len(_plain(line.text)) >= MIN_CHARS]
    if len(worthy) <= NUM_SAMPLES:
        return worthy
    bounds = [index * len(worthy) // NUM_SAMPLES for index in range(NUM_SAMPLES + 1)]
    parts = [worthy[first:last] for first, last in pairwise(bounds)]
    return [max(part, key=lambda line: min(MAX_CHARS, len(_plain(line.text)))) for part in parts]


def similarity(text: str, other: str) -> float:
    """0 to 1 (Ratcliff and Obershelp), over letters and digits alone: spaces, cases and accents say nothing here."""
    return SequenceMatcher(None, _plain(text)[:MAX_CHARS], _plain(other)[:MAX_CHARS], autojunk=False).ratio()


def _plain(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(char for char in decomposed if char.isalnum())


def _odd_share(text: str) -> float:
    """Of characters that are controls, of private use, or stand for what could not be decoded."""
    odd = sum(unicodedata.category(char) in ("Cc", "Co", "Cn", "Cs") or char == "�" for char in text)
    return odd / len(text) if text else 1.0
