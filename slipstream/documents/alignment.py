"""Which words of a page's text belong to which of its regions: a model's text beside the OCR's. Pure."""

from collections.abc import Sequence
from difflib import SequenceMatcher

MAX_WORDS = 3000
"""Of a page, which take a second or two at worst; what is behind them goes to its last region."""


def split_by_regions(regions: Sequence[str], text: str) -> list[str]:
    """The words of `text` by region, as many texts as `regions` has: words that both have go where the OCR has them,
    others to where their neighbours go. Where there is a region no word is lost, and their order stays; spaces and line
    ends do not. Takes time: not for an event loop."""
    if not regions:
        return []
    owners = [index for index, region in enumerate(regions) for _ in region.split()][:MAX_WORDS]
    ocr = [word for region in regions for word in region.split()][:MAX_WORDS]
    words = text.split()
    matcher = SequenceMatcher(None, ocr, words[:MAX_WORDS], autojunk=False)
    parts: list[list[str]] = [[] for _ in regions]
    last = 0
    for _, ocr_start, ocr_end, start, end in matcher.get_opcodes():
        num_ocr, num_words = ocr_end - ocr_start, end - start
        for index in range(num_words):
            if num_ocr:
                last = max(last, owners[ocr_start + index * num_ocr // num_words])
            parts[last].append(words[start + index])
    parts[-1] += words[MAX_WORDS:]
    return [" ".join(part) for part in parts]
