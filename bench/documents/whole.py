"""Documents from end to end: the real reader with its OCR, the gateway's own code, the wire, and a target.

- `live`: the pocket reader as fast as it is here, where the OCR of a page takes longer than the page.
- `replayed`: REPLAY. The same target decides the tokens, and each of its passes lasts as long as a table says of a
  model that is slow beside the OCR, as in hierarchical speculative decoding, and its prefills in proportion to the
  tokens of a page of such a model. The reader and the OCR are as fast as they are.

A kind of pages is one document. It is read plainly without the OCR, with drafts that are there already, with the OCR
working ahead, and with it while it pays, by a gate that knows nothing yet.
"""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.common import PROC, is_whole, say
from bench.documents.gateway import AtHand, Gateway
from bench.documents.reading import MAX_TOKENS, NOISE_DPI, PLAIN, passes_of, what_is_missing
from bench.documents.shown_pages import SURFACE, ShownPage, document_of, request_at, shown_pages, token_ids
from bench.replay.rows import LATE, open_replay, replaying
from slipstream.documents.messages import NO_OCR
from slipstream.documents.reading import DocumentOptions, PageReading
from slipstream.options import CaptionOptions
from slipstream.stack.local import FRESH, Stack, StackOptions

WAYS: dict[str, tuple[str, str]] = {
    "plain": (PLAIN, "never"),
    "given": ("hints", "always"),
    "always": ("hints", "always"),
    "paying": ("hints", "paying"),
}
"""Method, and when the OCR is asked."""
REQUEST = request_at(NOISE_DPI[-1])
TEXT_KINDS = ("prose", "report", "list", "columns")
LEAST_TEXT_SPEEDUP, LEAST_SPEEDUP, LEAST_HIDDEN = 2.5, 0.97, 0.9
LOOK_S, CALM_LOOKS = 0.1, 5
PAGE_TOKENS = 2772
"""Of an A4 page at 150 dpi for Qwen2.5-VL, one for 28 x 28 pixels: 44 x 63."""
NOTE = "REPLAY: the target's passes and prefills last as the table says; tokens, reader and OCR are of this machine"


@dataclass(frozen=True)
class WholeRead:
    """A document, read in one way."""

    seconds: float
    """From the request to the last event."""
    pages: Sequence[PageReading]


async def _read(gateway: Gateway, document: bytes, way: str, given: AtHand, reader_pid: int) -> WholeRead:
    """All pages, one after the other, by a gateway that has read none before. The reader's process for the next
    document, which is started with each, is ready."""
    method, ocr = WAYS[way]
    caption = CaptionOptions(method=method, max_new_tokens=MAX_TOKENS)
    asked = DocumentOptions(REQUEST, SURFACE, caption, ocr=ocr)
    planned = await gateway.planned(asked, given if way == "given" else None)
    await _all_rest(reader_pid)
    began = time.perf_counter()
    read = await planned.read(document)
    return WholeRead(time.perf_counter() - began, read)


async def _all_rest(pid: int) -> None:
    """Returns when no process from this one on works: neither one that ends nor one that gets ready."""
    calm = 0
    while calm < CALM_LOOKS:
        await asyncio.sleep(LOOK_S)
        calm = calm + 1 if all(state in "SZ" for state in _states(pid)) else 0


def _states(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has just ended
        yield (PROC / str(pid) / "stat").read_text().rpartition(") ")[2][0]
        for child in (PROC / str(pid) / "task" / str(pid) / "children").read_text().split():
            yield from _states(int(child))


async def measure_live(model: Path, num_pages: int, rounds: int) -> dict[str, Any]:
    """On this machine as it is; where there is no checkpoint or no OCR, why nothing is shown."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    return await _measure(_options(model), shown_pages(model, num_pages), rounds)


async def measure_replayed(model: Path, table: Path, page_tokens: int, num_pages: int, rounds: int) -> dict[str, Any]:
    """At the pace of a table, which must be run at its own speed: the OCR's is not to be changed."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    with tempfile.TemporaryDirectory(prefix="slipstream-table-") as folder:
        replay = open_replay(table, 1.0).of_prompts(Path(folder), page_tokens)
        options = replaying(_options(model), replay.path, replay.speed, ("target",))
        found = await _measure(options, shown_pages(model, num_pages), rounds)
    pass_s = median(row["pass_s"] for row in found["rows"])
    late = pass_s > LATE * replay.target.pass_s(1) / replay.speed
    paced = {"table": replay.name, "speed": replay.speed, "prefill_s": replay.target.prefill_s, "late": late}
    return {"replay": True, "note": NOTE} | paced | found


def is_whole_kept(found: Mapping[str, Any]) -> bool:
    """Texts are plain decoding's. What was not shown breaks nothing."""
    return not found["shown"] or all(is_whole(row["identical"]) for row in found["rows"])


def _options(model: Path) -> StackOptions:
    return StackOptions(target_model=model, draft_model=None, reader=True, threads=1, extra_flags=FRESH)


async def _measure(options: StackOptions, kinds: Mapping[str, Sequence[ShownPage]], rounds: int) -> dict[str, Any]:
    async with Stack(options) as stack:
        target, reader = stack.processes["target"], stack.processes["reader"]
        gateway = Gateway(target.address, reader.address)
        try:
            rows = [await _measure_kind(gateway, kind, pages, rounds, reader.pid) for kind, pages in kinds.items()]
        finally:
            await gateway.close()
    return {"shown": True, "rows": rows, "missed": _missed(rows)}


async def _measure_kind(
    gateway: Gateway, kind: str, pages: Sequence[ShownPage], rounds: int, reader_pid: int
) -> dict[str, Any]:
    """All ways in turns, so that a machine whose speed drifts favours none."""
    document = await asyncio.to_thread(document_of, pages)
    given = await gateway.record(document, REQUEST)
    read: dict[str, list[WholeRead]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            read[way].append(await _read(gateway, document, way, given, reader_pid))
    row = _row(kind, read)
    say(f"{row}")
    return row


def _row(kind: str, read: Mapping[str, Sequence[WholeRead]]) -> dict[str, Any]:
    seconds = {way: median(each.seconds for each in of_way) for way, of_way in read.items()}
    live = [page for each in read["always"] for page in each.pages]
    expected = [token_ids(page) for page in read["plain"][0].pages]
    same = [
        token_ids(page) == text
        for of_way in read.values()
        for each in of_way
        for page, text in zip(each.pages, expected, strict=True)
    ]
    reader_s = sum(page.draft.seconds for page in live) / len(read["always"])
    shown_s = max(seconds["always"] - seconds["given"], 0.0)
    costs = [cost for each in read["plain"] for page in each.pages for cost in page.caption.speculation.pass_costs]
    return {
        "kind": kind,
        "pages": len(expected),
        "tokens_a_page": round(mean(map(len, expected)), 1),
        "pass_s": round(sum(cost.pass_s * cost.count for cost in costs) / sum(cost.count for cost in costs), 4),
        "plain_s_a_page": round(seconds["plain"] / len(expected), 3),
        "reader_s_a_page": round(reader_s / len(expected), 3),
        "given": passes_of([page for each in read["given"] for page in each.pages]),
        "always": passes_of(live),
        **{f"{way}_speedup": round(seconds["plain"] / seconds[way], 2) for way in WAYS if way != "plain"},
        "hidden": round(1 - min(shown_s / reader_s, 1.0), 2) if reader_s else None,
        "paying_without_ocr": sum(NO_OCR in page.draft.warnings for page in read["paying"][-1].pages),
        "identical": f"{sum(same)}/{len(same)}",
    }


def _missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What issue and paper aim at and was not reached: it follows from the target's and the OCR's speed, and breaks
    nothing."""
    of_text = [row["paying_speedup"] for row in rows if row["kind"] in TEXT_KINDS]
    hidden = [row["hidden"] for row in rows if row["hidden"] is not None]
    aims = {
        f"{LEAST_TEXT_SPEEDUP} from end to end on pages of text": max(of_text, default=0.0) >= LEAST_TEXT_SPEEDUP,
        f"{LEAST_SPEEDUP} from end to end on every kind": min(row["paying_speedup"] for row in rows) >= LEAST_SPEEDUP,
        f"{LEAST_HIDDEN:.0%} of the reader's time hidden": bool(hidden) and min(hidden) >= LEAST_HIDDEN,
    }
    return [aim for aim, is_reached in aims.items() if not is_reached]
