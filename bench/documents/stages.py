"""The two stages of hierarchical speculative decoding: what reading a page's regions first is worth, and what it costs.

The gateway's own code reads pages whose pictures and drafts are at hand, so that only the target's work counts. Plain
decoding, either stage alone, and both; by `hints` and, at tau 1 and 0.75 and by both readings of eq. 10, by `hsd`; with
drafts of two resolutions, and by kind of page.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.common import is_whole, say
from bench.document_pages import edit_distance, plain
from bench.documents.gateway import AtHand, Gateway
from bench.documents.reading import MAX_TOKENS, PLAIN, passes_of, what_is_missing
from bench.documents.shown_pages import SURFACE, ShownPage, drafts_of, flat, shown_pages
from slipstream.documents.messages import DocumentLimits, PageDraft, RegionStage
from slipstream.documents.pool import ReaderPool
from slipstream.documents.reading import STAGES, DocumentOptions, PageReading
from slipstream.documents.surfaces import PARAGRAPHS
from slipstream.options import CaptionOptions
from slipstream.speculation.hints.tolerance import ToleranceRule
from slipstream.stack.local import FRESH, Stack, StackOptions

STAGE_DPI = (75, 150)
"""At which the OCR sees pages of 72: the first makes drafts with errors."""
PAGE, BOTH = STAGES
REGION = "region"
"""Alone: what a page of regions says, joined in the reader's order. Its text is not plain decoding's."""
METHODS: dict[str, dict[str, Any]] = {
    "hints": {"method": "hints"},
    "hsd": {"method": "hsd"},
    "hsd, tau 0.75": {"method": "hsd", "tolerance": 0.75, "tolerance_rule": str(ToleranceRule.LOG_RATIO)},
    "hsd, tau 0.75 of p": {"method": "hsd", "tolerance": 0.75, "tolerance_rule": str(ToleranceRule.PROBABILITY_RATIO)},
}
"""Eq. 10 as it is printed, and as a ratio of probabilities."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {PLAIN: (PAGE, {"method": PLAIN})} | {
    f"{name}, {stage}": (stage, options) for name, options in METHODS.items() for stage in (PAGE, BOTH, REGION)
}
"""Stage and options."""


@dataclass(frozen=True)
class Read:
    """A page, read in one way."""

    text: str
    seconds: float
    """From the picture and the draft to the last token."""
    regions: RegionStage | None
    """What its regions took; None: they were not read."""
    page: PageReading | None = None
    """None: its regions alone were read."""


async def _read_page(gateway: Gateway, page: ShownPage, draft: PageDraft, way: str) -> Read:
    """One page as a document of its own."""
    stage, options = WAYS[way]
    caption = CaptionOptions(**options, max_new_tokens=MAX_TOKENS)
    asked = DocumentOptions(surface=SURFACE, caption=caption, stage=BOTH if stage == BOTH else PAGE)
    planned = await gateway.planned(asked, AtHand.of([page], [draft]))
    if stage == REGION:
        texts, facts, seconds = await planned.read_regions(page, draft)
        return Read(PARAGRAPHS.join(filter(None, texts)), seconds, facts)
    [read] = await planned.read(b"")
    return Read(read.text, read.caption.timings.total_s, read.caption.regions, read)


Pages = Sequence[ShownPage]
Rounds = Sequence[Sequence[Read]]
"""The pages of each round, read in one way."""


async def measure_stages(model: Path, num_pages: int, rounds: int) -> dict[str, Any]:
    """All ways of reading in turns; where there is no checkpoint or no OCR, why nothing is shown."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    pages, pool = flat(shown_pages(model, num_pages)), ReaderPool(DocumentLimits())
    options = StackOptions(target_model=model, draft_model=None, threads=1, extra_flags=FRESH)
    rows, read = [], dict[str, Rounds]()
    try:
        async with Stack(options) as stack:
            gateway = Gateway(stack.processes["target"].address)
            for dpi in STAGE_DPI:
                drafts = await drafts_of(pool, pages, dpi)
                read = await _read_in_turns(gateway, pages, drafts, rounds)
                rows += [{"ocr_dpi": dpi} | _row(way, pages, read) for way in WAYS]
                say(f"stages: {rows[-len(WAYS) :]}")
            await gateway.close()
    finally:
        pool.close()
    kinds = [_way_row(way, pages, read) for way in WAYS]
    return {"shown": True, "pages": num_pages, "model": str(model), "rows": rows, "kinds": kinds}


def are_stages_kept(found: dict[str, Any]) -> bool:
    """Texts are plain decoding's wherever they are to be."""
    return not found["shown"] or all(is_whole(row["identical"]) for row in found["rows"] if not row["lossy"])


async def _read_in_turns(gateway: Gateway, pages: Pages, drafts: Sequence[PageDraft], rounds: int) -> dict[str, Rounds]:
    """All pages by all ways, one after the other, so that a machine whose speed drifts favours none."""
    read: dict[str, list[list[Read]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            in_turn = zip(pages, drafts, strict=True)
            read[way].append([await _read_page(gateway, page, draft, way) for page, draft in in_turn])
    return dict(read)


# -- tables -----------------------------------------------------------------------------------------------------------


def _row(way: str, pages: Pages, all_read: Mapping[str, Rounds]) -> dict[str, Any]:
    (stage, options), read, plain_read = WAYS[way], all_read[way], all_read[PLAIN]
    same = [
        each.text == expected.text
        for of_round, plain_round in zip(read, plain_read, strict=True)
        for each, expected in zip(of_round, plain_round, strict=True)
    ]
    readings = [each.page for of_round in read for each in of_round if each.page is not None]
    row: dict[str, Any] = {"way": way, "lossy": stage == REGION or "tolerance" in options}
    if readings:
        row |= passes_of(readings)
        row |= {"decoding_speedup": round(_seconds(plain_read, _decoding_s) / _seconds(read, _decoding_s), 2)}
    row |= {"end_to_end_speedup": round(_seconds(plain_read, _total_s) / _seconds(read, _total_s), 2)}
    row |= {"page_s": round(_seconds(read, _total_s) / len(pages), 3), "cer": _cer(pages, read[0])}
    if facts := [each.regions for of_round in read for each in of_round if each.regions is not None]:
        row |= _regions_of(facts)
    return row | {"identical": f"{sum(same)}/{len(same)}"}


def _regions_of(facts: Sequence[RegionStage]) -> dict[str, float | None]:
    """Of a page, but for both countings of a pass (see `passes_of`)."""
    passes, tokens = sum(each.passes for each in facts), sum(each.num_tokens - each.num_read for each in facts)
    accepted = sum(each.accepted_prediction_tokens for each in facts)
    return {
        "regions": round(mean(each.num_regions for each in facts), 1),
        "read_in_time": round(mean(each.num_read for each in facts), 1),
        "region_tokens_a_pass": round(tokens / passes, 2) if passes else None,
        "region_aal_eq14": round(accepted / passes, 2) if passes else None,
        "region_s": round(mean(each.seconds for each in facts), 3),
    }


def _way_row(way: str, pages: Pages, read: Mapping[str, Rounds]) -> dict[str, Any]:
    """By kind of page: from end to end, beside plain decoding."""

    def seconds(way: str, places: Sequence[int]) -> float:
        return _seconds([[of_round[place] for place in places] for of_round in read[way]], _total_s)

    row: dict[str, Any] = {"way": way}
    for kind in dict.fromkeys(page.kind for page in pages):
        places = [place for place, page in enumerate(pages) if page.kind == kind]
        row[kind] = round(seconds(PLAIN, places) / seconds(way, places), 2)
    return row


def _seconds(read: Rounds, seconds_of: Callable[[Read], float]) -> float:
    """Over all pages; of each the median of its rounds."""
    return sum(float(median(map(seconds_of, of_page))) for of_page in zip(*read, strict=True))


def _total_s(read: Read) -> float:
    return read.seconds


def _decoding_s(read: Read) -> float:
    """Of the page alone."""
    assert read.page is not None, "its regions alone have no such time"
    return read.page.caption.timings.generate_s


def _cer(pages: Pages, read: Sequence[Read]) -> float:
    """Characters that were read wrong, without marks and line ends."""
    truths = [plain(page.text) for page in pages]
    wrong = sum(edit_distance(truth, plain(each.text)) for truth, each in zip(truths, read, strict=True))
    return round(wrong / sum(map(len, truths)), 4)
