"""Documents from end to end: the real reader with its OCR, the gateway's own code, the wire, and a target.

- `live`: the pocket reader as fast as it is here, where the OCR of a page takes longer than the page.
- `replayed`: REPLAY. The same target decides the tokens, and each of its passes lasts as long as a table says of a
  model that is slow beside the OCR, as paper 003's is. The reader and the OCR are as fast as they are.

A kind of pages is one document. It is read plainly without the OCR, with drafts that are there already, with the OCR
working ahead, and with it while it pays, by a gate that knows nothing yet.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, cast

from bench.common import PROC, is_whole, say
from bench.documents.reading import (
    LEAST_HIDDEN,
    LEAST_SPEEDUP,
    LEAST_TEXT_SPEEDUP,
    MAX_TOKENS,
    NOISE_DPI,
    PLAIN,
    TEXT_KINDS,
    passes_of,
    what_is_missing,
)
from bench.documents.shown_pages import DPI, SURFACE, ShownPage, document_of, shown_pages, token_ids
from bench.replay.rows import LATE, open_replay, replaying
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.media import Media
from slipstream.documents.messages import NO_OCR, DocumentRequest, ReadEvent
from slipstream.documents.reading import DocumentOptions, PageReading, page_readings
from slipstream.options import CaptionOptions
from slipstream.rpc.peers import Peers
from slipstream.rpc.reader import RemoteReader
from slipstream.stack.local import FRESH, Stack, StackOptions

WAYS: dict[str, tuple[str, str]] = {
    "plain": (PLAIN, "never"),
    "given": ("hints", "always"),
    "always": ("hints", "always"),
    "paying": ("hints", "paying"),
}
"""Method, and when the OCR is asked."""
REQUEST = DocumentRequest(dpi=DPI, ocr_dpi=NOISE_DPI[-1], text_layer=False)
LOOK_S, CALM_LOOKS = 0.1, 5
NOTE = "REPLAY: the target's passes last as long as the table says; tokens, reader and OCR are those of this machine"


@dataclass(frozen=True)
class WholeRead:
    """A document, read in one way."""

    seconds: float
    """From the request to the last event."""
    pages: Sequence[PageReading]


class Recording:
    """Stands in for `RemoteReader`: says at once what another has said."""

    def __init__(self, events: Sequence[ReadEvent]) -> None:
        self._events = events

    async def read(self, *_: Any, **__: Any) -> AsyncGenerator[ReadEvent, None]:
        """See `RemoteReader.read`."""
        for event in self._events:
            yield event


class Gateway:
    """The part of a gateway that reads documents, with a target and a reader."""

    def __init__(self, target: str, reader: str, reader_pid: int) -> None:
        self._config = GatewayConfig(listen="", target=target, reader=reader)
        self._reader_pid = reader_pid
        self._peers, self._reader = Peers(target, ""), RemoteReader(reader)
        self._captioner = GatewayCaptioner(self._config, self._peers, Media(self._config))

    async def close(self) -> None:
        await self._peers.close()
        await self._reader.close()

    async def record(self, document: bytes) -> Recording:
        """What the reader says of the document."""
        events = self._reader.read(document, replace(REQUEST, pictures=True))
        return Recording([event async for event in events])

    async def read(self, document: bytes, way: str, given: Recording) -> WholeRead:
        """All pages, one after the other, by a gateway that has read none before. The reader's process for the next
        document, which is started with each, is ready."""
        method, ocr = WAYS[way]
        reader = cast(RemoteReader, given) if way == "given" else self._reader
        documents = DocumentCaptioner(self._config, self._captioner, reader)
        caption = CaptionOptions(method=method, max_new_tokens=MAX_TOKENS)
        asked = DocumentOptions(REQUEST, SURFACE, caption, ocr=ocr)
        plan = documents.plan(asked)
        await self._captioner.check(plan)
        await _all_rest(self._reader_pid)
        began = time.perf_counter()
        async with aclosing(page_readings(documents.events(document, asked, plan, pages_at_once=1))) as pages:
            read = [page async for page in pages]
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


async def measure_replayed(model: Path, table: Path, num_pages: int, rounds: int) -> dict[str, Any]:
    """At the pace of a table, which must be run at its own speed: the OCR's is not to be changed."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    replay = open_replay(table, 1.0)
    options = replaying(_options(model), table, replay.speed, ("target",))
    found = await _measure(options, shown_pages(model, num_pages), rounds)
    pass_s = median(row["pass_s"] for row in found["rows"])
    late = pass_s > LATE * replay.target.pass_s(1) / replay.speed
    return {"replay": True, "note": NOTE, "table": replay.name, "speed": replay.speed, "late": late} | found


def is_whole_kept(found: Mapping[str, Any]) -> bool:
    """Texts are plain decoding's. What was not shown breaks nothing."""
    return not found["shown"] or all(is_whole(row["identical"]) for row in found["rows"])


def _options(model: Path) -> StackOptions:
    return StackOptions(target_model=model, draft_model=None, reader=True, threads=1, extra_flags=FRESH)


async def _measure(options: StackOptions, kinds: Mapping[str, Sequence[ShownPage]], rounds: int) -> dict[str, Any]:
    async with Stack(options) as stack:
        target, reader = stack.processes["target"], stack.processes["reader"]
        gateway = Gateway(target.address, reader.address, reader.pid)
        try:
            rows = [await _measure_kind(gateway, kind, pages, rounds) for kind, pages in kinds.items()]
        finally:
            await gateway.close()
    return {"shown": True, "rows": rows, "missed": _missed(rows)}


async def _measure_kind(gateway: Gateway, kind: str, pages: Sequence[ShownPage], rounds: int) -> dict[str, Any]:
    """All ways in turns, so that a machine whose speed drifts favours none."""
    document = await asyncio.to_thread(document_of, pages)
    given = await gateway.record(document)
    read: dict[str, list[WholeRead]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            read[way].append(await gateway.read(document, way, given))
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
