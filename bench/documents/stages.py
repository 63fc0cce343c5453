"""Paper 003's two stages: what reading a page's regions first is worth, and what it costs.

The gateway's own code reads pages whose pictures and drafts are at hand, so that only the target's work counts. Plain
decoding, either stage alone, and both; with drafts of two resolutions, and by kind of page.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

from bench.common import is_whole, say
from bench.document_pages import edit_distance, plain
from bench.documents.reading import MAX_TOKENS, PLAIN, passes_of, what_is_missing
from bench.documents.shown_pages import SURFACE, ShownPage, drafts_of, read_again, read_live, shown_pages
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.media import Media
from slipstream.documents.messages import DocumentLimits, PageDraft, ReadEvent
from slipstream.documents.pool import ReaderPool
from slipstream.documents.reading import STAGES, DocumentOptions, PageReading, page_readings
from slipstream.documents.surfaces import PARAGRAPHS, SURFACES
from slipstream.options import CaptionOptions
from slipstream.rpc.peers import Peers
from slipstream.rpc.reader import RemoteReader
from slipstream.stack.local import FRESH, Stack, StackOptions

STAGE_DPI = (75, 150)
"""At which the OCR sees pages of 72: the first makes drafts with errors."""
PAGE, BOTH = STAGES
REGIONS = "region"
"""Alone: what a page of regions says, joined in the reader's order. Its text is not plain decoding's."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: (PAGE, {"method": PLAIN}),
    "hints, page": (PAGE, {"method": "hints"}),
    "hints, region+page": (BOTH, {"method": "hints"}),
    "hints, region": (REGIONS, {"method": "hints"}),
    "hsd, page": (PAGE, {"method": "hsd"}),
    "hsd, region+page": (BOTH, {"method": "hsd"}),
    "hsd, tau 0.75, page": (PAGE, {"method": "hsd", "tolerance": 0.75}),
    "hsd, tau 0.75, region+page": (BOTH, {"method": "hsd", "tolerance": 0.75}),
}


@dataclass(frozen=True)
class Read:
    """A page, read in one way."""

    text: str
    seconds: float
    """From the picture and the draft to the last token."""
    page: PageReading | None = None
    """None: its regions alone were read."""


class ReaderAtHand:
    """Stands in for `RemoteReader`: the pictures and the drafts are there already."""

    def __init__(self) -> None:
        self.pages: Sequence[ShownPage] = ()
        self.drafts: Sequence[PageDraft] = ()

    async def read(self, *_: Any, **__: Any) -> AsyncGenerator[ReadEvent, None]:
        """See `RemoteReader.read`."""
        async for event in read_again(self.pages, self.drafts):
            yield event


class StagedReader:
    """The part of a gateway that reads documents."""

    def __init__(self, target: str) -> None:
        config = GatewayConfig(listen="", target=target, reader="at hand")
        self._peers, self._reader = Peers(target, ""), ReaderAtHand()
        self._captioner = GatewayCaptioner(config, self._peers, Media(config))
        self._documents = DocumentCaptioner(config, self._captioner, cast(RemoteReader, self._reader))

    async def close(self) -> None:
        await self._peers.close()

    async def read(self, page: ShownPage, draft: PageDraft, way: str) -> Read:
        """One page as a document of its own."""
        stage, options = WAYS[way]
        caption = CaptionOptions(**options, max_new_tokens=MAX_TOKENS)
        asked = DocumentOptions(surface=SURFACE, caption=caption, stage=BOTH if stage == BOTH else PAGE)
        plan = self._documents.plan(asked)
        await self._captioner.check(plan)
        if stage == REGIONS:
            regions = self._documents.regions_of(page.picture, lambda event: None)
            texts = await regions.read_all(draft, SURFACES[SURFACE](draft.regions), plan)
            return Read(PARAGRAPHS.join(filter(None, texts)), regions.facts.seconds)
        self._reader.pages, self._reader.drafts = [page], [draft]
        events = self._documents.events(b"", asked, plan, pages_at_once=1)
        async with aclosing(page_readings(events)) as pages:
            (read,) = [each async for each in pages]
        return Read(read.text, read.caption.timings.total_s, read)


Pages = Sequence[ShownPage]
Rounds = Sequence[Sequence[Read]]
"""The pages of each round, read in one way."""


async def measure_stages(model: Path, num_pages: int, rounds: int) -> dict[str, Any]:
    """All ways of reading in turns; where there is no checkpoint or no OCR, why nothing is shown."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    pages = [page for of_kind in shown_pages(model, num_pages).values() for page in of_kind]
    pool, options = ReaderPool(DocumentLimits()), StackOptions(target_model=model, draft_model=None, threads=1)
    rows, read = [], dict[str, Rounds]()
    try:
        async with Stack(replace(options, extra_flags=FRESH)) as stack:
            reader = StagedReader(stack.processes["target"].address)
            for dpi in STAGE_DPI:
                drafts = await drafts_of(read_live(pool, pages, dpi))
                read = await _read_in_turns(reader, pages, drafts, rounds)
                rows += [{"ocr_dpi": dpi} | _row(way, pages, read) for way in WAYS]
                say(f"stages: {rows[-len(WAYS) :]}")
            await reader.close()
    finally:
        pool.close()
    kinds = [_kind_row(kind, pages, read) for kind in dict.fromkeys(page.kind for page in pages)]
    return {"shown": True, "pages": num_pages, "model": str(model), "rows": rows, "kinds": kinds}


def are_stages_kept(found: dict[str, Any]) -> bool:
    """Texts are plain decoding's wherever they are to be."""
    return not found["shown"] or all(is_whole(row["identical"]) for row in found["rows"] if not row["lossy"])


async def _read_in_turns(
    reader: StagedReader, pages: Pages, drafts: Sequence[PageDraft], rounds: int
) -> dict[str, Rounds]:
    """All pages by all ways, one after the other, so that a machine whose speed drifts favours none."""
    read: dict[str, list[list[Read]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            read[way].append([await reader.read(page, draft, way) for page, draft in zip(pages, drafts, strict=True)])
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
    row: dict[str, Any] = {"way": way, "lossy": stage == REGIONS or "tolerance" in options}
    if readings:
        row |= passes_of(readings)
        row |= {"decoding_speedup": round(_seconds(plain_read, _decoding_s) / _seconds(read, _decoding_s), 2)}
    row |= {"end_to_end_speedup": round(_seconds(plain_read, _total_s) / _seconds(read, _total_s), 2)}
    row |= {"page_s": round(_seconds(read, _total_s) / len(pages), 3), "cer": _cer(pages, read[0])}
    facts = [page.caption.regions for page in readings if page.caption.regions is not None]
    if facts:
        passes, tokens = sum(each.passes for each in facts), sum(each.num_tokens - each.num_read for each in facts)
        row |= {"regions": round(mean(each.num_regions for each in facts), 1)}
        row |= {"read_in_time": round(mean(each.num_read for each in facts), 1)}
        row |= {"region_tokens_a_pass": round(tokens / passes, 2) if passes else None}
        row |= {"region_s": round(mean(each.seconds for each in facts), 3)}
    return row | {"identical": f"{sum(same)}/{len(same)}"}


def _kind_row(kind: str, pages: Pages, read: Mapping[str, Rounds]) -> dict[str, Any]:
    """From end to end beside plain decoding."""
    places = [place for place, page in enumerate(pages) if page.kind == kind]
    seconds = {
        way: _seconds([[of_round[place] for place in places] for of_round in read[way]], _total_s) for way in WAYS
    }
    return {"kind": kind} | {way: round(seconds[PLAIN] / seconds[way], 2) for way in WAYS}


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
