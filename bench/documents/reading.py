"""Held-out pages read by the pocket reader through the whole stack, the OCR's text as its hint, as in paper 003.

- `identity`: every page by every method, with a reader that is well, killed, frozen, slow or lying.
- `kinds`: by kind of page and method what a pass gives, and how fast decoding is; then documents from end to end, the
  reader working ahead in processes of its own.
- `noise`: what the OCR's resolution does to both methods.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.common import is_whole, say
from bench.document_pages import edit_distance, plain
from bench.documents import waiting_reader
from bench.documents.alignment import LEAST_RATIO
from bench.documents.shown_pages import (
    DPI,
    FAULTS,
    STRIKES,
    SURFACE,
    ShownPage,
    drafts_of,
    read_again,
    read_live,
    read_pages,
    shown_pages,
    token_ids,
)
from slipstream import AsyncCaptioner
from slipstream.client.caption_client import GatewayAddress
from slipstream.documents.messages import DocumentLimits, PageDraft
from slipstream.documents.pool import ReaderPool, check_packages
from slipstream.documents.reading import PageReading
from slipstream.documents.surfaces import page_text
from slipstream.errors import InvalidConfig
from slipstream.stack.local import Stack, StackOptions

PLAIN = "autoregressive"
LOSSLESS = ("hints", "hsd", "prompt_lookup")
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {"method": PLAIN},
    "hints": {"method": "hints"},
    "hsd": {"method": "hsd"},
    "hsd, tau 0.75": {"method": "hsd", "tolerance": 0.75},
    "prompt_lookup": {"method": "prompt_lookup"},
}
NOISE_DPI = (60, 75, 100, 150)
PAGES_AT_ONCE = 2
"""Of a document from end to end, so that one can wait for the OCR while another is decoded."""
FROZEN_PAGE_S = 3.0
"""What a reader is given for a page where it is to freeze."""
MAX_TOKENS = 192
TEXT_KINDS = ("prose", "report", "list", "columns")
LEAST_TEXT_SPEEDUP, LEAST_SPEEDUP, LEAST_HIDDEN = 2.5, 0.97, 0.9
Pages = Mapping[str, Sequence[ShownPage]]
Drafts = Mapping[str, Sequence[PageDraft]]


async def measure_reading(model: Path, num_pages: int, rounds: int) -> dict[str, Any]:
    """All of it; where there is no checkpoint or no OCR, why nothing is shown."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    pages = shown_pages(model, num_pages)
    pool = ReaderPool(DocumentLimits())
    options = StackOptions(target_model=model, draft_model=None, threads=1)
    try:
        async with Stack(options) as stack, AsyncCaptioner(gateway=GatewayAddress(stack.gateway_address)) as captioner:
            found: dict[str, Any] = {"identity": await _measure_identity(captioner, pool, pages)}
            noise, drafts = await _measure_noise(captioner, pool, pages)
            kinds = [await _measure_kind(captioner, pool, pages[kind], drafts[kind], rounds) for kind in pages]
    finally:
        pool.close()
    rows = [row for found_kind in kinds for row in found_kind["methods"]]
    documents = [found_kind["document"] for found_kind in kinds]
    found |= {"rows": rows, "documents": documents, "noise": noise}
    return {"shown": True, "pages": num_pages, "model": str(model)} | found | {"missed": missed(found)}


def what_is_missing(model: Path) -> str:
    """Why no page can be read here; empty where all is there."""
    if not (model / "config.json").is_file():
        return f"there is no checkpoint of a reader of pages in {model}; name one by --reader-model"
    try:
        check_packages()
    except InvalidConfig as missing:
        return str(missing)
    return ""


def missed(found: Mapping[str, Any]) -> list[str]:
    """What is aimed at and was not reached here. How much of the reader's time can be hidden, and so what documents
    gain from end to end, follows from how slow the target is beside the reader: it is told, and breaks nothing."""
    by_kind = {each["kind"]: each["end_to_end_speedup"] for each in found["documents"]}
    hinted = [row["decoding_speedup"] for row in found["rows"] if row["method"] == "hints"]
    told = [each["hidden"] for each in found["documents"] if each["hidden"] is not None]
    aims = {
        f"{LEAST_TEXT_SPEEDUP} from end to end on pages of text": max(
            (by_kind.get(kind, 0.0) for kind in TEXT_KINDS), default=0.0
        )
        >= LEAST_TEXT_SPEEDUP,
        f"{LEAST_SPEEDUP} from end to end on every kind": min(by_kind.values()) >= LEAST_SPEEDUP,
        f"{LEAST_SPEEDUP} of decoding on every kind": min(hinted) >= LEAST_SPEEDUP,
        f"{LEAST_HIDDEN:.0%} of the reader's time hidden": bool(told) and min(told) >= LEAST_HIDDEN,
        f"{LEAST_RATIO} times the tokens a pass of hsd": min(row["ratio"] for row in found["noise"]) >= LEAST_RATIO,
    }
    return [aim for aim, is_reached in aims.items() if not is_reached]


def is_kept(found: Mapping[str, Any]) -> bool:
    """Texts are those of plain decoding wherever they were compared. What was not shown breaks nothing."""
    if not found["shown"]:
        return True
    compared = [*(row for row in found["rows"] if not row["lossy"]), *found["documents"]]
    return all(map(is_whole, [*found["identity"]["by_fault"].values(), *(each["identical"] for each in compared)]))


# -- identity ---------------------------------------------------------------------------------------------------------


async def _measure_identity(captioner: AsyncCaptioner, pool: ReaderPool, pages: Pages) -> dict[str, Any]:
    """Methods with hints hear the reader itself; it is run once a page and fault, and `hsd` gets the same draft."""
    waiting = ReaderPool(DocumentLimits(), module=waiting_reader.__name__)
    impatient = ReaderPool(DocumentLimits(page_s=FROZEN_PAGE_S), module=waiting_reader.__name__)
    pools = {fault: waiting if fault in STRIKES else pool for fault in FAULTS} | {"frozen": impatient}
    same = {f"{method}, {fault}": [0, 0] for fault in FAULTS for method in LOSSLESS}
    empty = dict.fromkeys(FAULTS, 0)
    all_pages = [page for of_kind in pages.values() for page in of_kind]
    try:
        for number, page in enumerate(all_pages):
            nothing = PageDraft(1, page.picture.width, page.picture.height, ())
            [expected] = await _read(captioner, [page], [nothing], 1, PLAIN)
            for fault in FAULTS:
                events = read_live(pools[fault], [page], 2 * DPI, fault)
                [live] = await read_pages(captioner, events, 1, method="hints", max_new_tokens=MAX_TOKENS)
                empty[fault] += not live.draft.regions
                readings = {"hints": live}
                for method in LOSSLESS[1:]:
                    [readings[method]] = await _read(captioner, [page], [live.draft], 1, method)
                for method, reading in readings.items():
                    same[f"{method}, {fault}"][0] += token_ids(reading) == token_ids(expected)
                    same[f"{method}, {fault}"][1] += 1
            if number % 10 == 9:
                say(f"identity: {number + 1} of {len(all_pages)} pages")
    finally:
        waiting.close()
        impatient.close()
    return {"by_fault": {name: f"{equal}/{total}" for name, (equal, total) in same.items()}, "empty_drafts": empty}


async def _read(
    captioner: AsyncCaptioner, pages: Sequence[ShownPage], drafts: Sequence[PageDraft], max_pages: int, name: str
) -> list[PageReading]:
    asked = METHODS[name] | {"max_new_tokens": MAX_TOKENS}
    return await read_pages(captioner, read_again(pages, drafts), max_pages, **asked)


# -- noise ------------------------------------------------------------------------------------------------------------


async def _measure_noise(
    captioner: AsyncCaptioner, pool: ReaderPool, pages: Pages
) -> tuple[list[dict[str, Any]], Drafts]:
    """By resolution; and the drafts of the best one, which the other figures are of."""
    rows: list[dict[str, Any]] = []
    drafts: dict[str, list[PageDraft]] = {}
    for dpi in NOISE_DPI:
        drafts = {kind: await drafts_of(read_live(pool, of_kind, dpi)) for kind, of_kind in pages.items()}
        row: dict[str, Any] = {"ocr_dpi": dpi, "ocr_cer": _cer(pages, drafts)}
        row["ocr_s"] = round(mean(draft.seconds for of_kind in drafts.values() for draft in of_kind), 3)
        for method in ("hints", "hsd"):
            read = [await _read(captioner, of_kind, drafts[kind], 1, method) for kind, of_kind in pages.items()]
            row[method] = passes_of([page for of_kind in read for page in of_kind])
        row["ratio"] = round(row["hints"]["tokens_a_pass"] / row["hsd"]["tokens_a_pass"], 2)
        say(f"noise: {row}")
        rows.append(row)
    return rows, drafts


def _cer(pages: Pages, drafts: Drafts) -> float:
    """Characters that the OCR has wrong, without marks and line ends."""
    wrong = total = 0
    for kind, of_kind in pages.items():
        for page, draft in zip(of_kind, drafts[kind], strict=True):
            truth = plain(page.text)
            wrong += edit_distance(truth, plain(page_text(draft.regions, SURFACE)))
            total += len(truth)
    return round(wrong / total, 4)


def passes_of(read: Sequence[PageReading]) -> dict[str, float]:
    """The paper's AAL in both of its countings: eq. 14 leaves out the target's own token, the tables count it."""
    captions = [page.caption for page in read]
    passes = sum(caption.speculation.passes for caption in captions)
    tokens = sum(caption.num_tokens - 1 for caption in captions)
    own = sum(not token.from_draft for caption in captions for token in caption.tokens[1:])
    rows = sum(cost.window * cost.count for caption in captions for cost in caption.speculation.pass_costs)
    return {
        "tokens_a_pass": round(tokens / passes, 2),
        "aal_eq14": round((tokens - own) / passes, 2),
        "rows_a_pass": round(rows / passes, 1),
    }


# -- kinds of pages ---------------------------------------------------------------------------------------------------


async def _measure_kind(
    captioner: AsyncCaptioner, pool: ReaderPool, pages: Sequence[ShownPage], drafts: Sequence[PageDraft], rounds: int
) -> dict[str, Any]:
    """Methods in turns, so that a machine whose speed drifts favours none."""
    read: dict[str, list[list[PageReading]]] = {name: [] for name in METHODS}
    for _ in range(rounds):
        for name in METHODS:
            read[name].append(await _read(captioner, pages, drafts, 1, name))
    rows = [_method_row(pages[0].kind, name, read[name], read[PLAIN]) for name in METHODS]
    document = await _measure_document(captioner, pool, pages, drafts, rounds)
    say(f"{pages[0].kind}: {rows} {document}")
    return {"methods": rows, "document": document}


def _method_row(
    kind: str, name: str, read: Sequence[Sequence[PageReading]], plain_read: Sequence[Sequence[PageReading]]
) -> dict[str, Any]:
    same = [
        token_ids(page) == token_ids(expected)
        for of_round, plain_round in zip(read, plain_read, strict=True)
        for page, expected in zip(of_round, plain_round, strict=True)
    ]
    all_pages = [page for of_round in read for page in of_round]
    return {
        "kind": kind,
        "method": name,
        "lossy": "tolerance" in METHODS[name],
        "tokens": round(mean(page.caption.num_tokens for page in all_pages), 1),
        **passes_of(all_pages),
        "decoding_speedup": round(_decoding_s(plain_read) / _decoding_s(read), 2),
        "identical": f"{sum(same)}/{len(same)}",
    }


def _decoding_s(read: Sequence[Sequence[PageReading]]) -> float:
    """Over all pages; of each the median of its rounds."""
    times = [[page.caption.timings.generate_s for page in of_page] for of_page in zip(*read, strict=True)]
    return sum(float(median(of_page)) for of_page in times)


async def _measure_document(
    captioner: AsyncCaptioner, pool: ReaderPool, pages: Sequence[ShownPage], drafts: Sequence[PageDraft], rounds: int
) -> dict[str, Any]:
    """All pages of a kind as one document: plainly without a reader, with drafts that are there, and with the reader
    working beside the target. What the last takes more than the second is reader's time that is not hidden."""
    seconds: dict[str, list[float]] = {"plain": [], "given": [], "live": []}
    reader_s, same, total = [], 0, 0
    for _ in range(rounds):
        texts = {}
        for way, times in seconds.items():
            await pool.wait_prepared()
            events = read_live(pool, pages, NOISE_DPI[-1]) if way == "live" else read_again(pages, drafts)
            method = PLAIN if way == "plain" else "hints"
            began = time.perf_counter()
            read = await read_pages(captioner, events, PAGES_AT_ONCE, method=method, max_new_tokens=MAX_TOKENS)
            times.append(time.perf_counter() - began)
            texts[way] = [token_ids(page) for page in read]
        reader_s.append(sum(page.draft.seconds for page in read))
        same += sum(
            text == expected for way in texts for text, expected in zip(texts[way], texts["plain"], strict=True)
        )
        total += len(pages) * len(seconds)
    plain_s, given_s, live_s = (median(times) for times in seconds.values())
    shown_s = max(live_s - given_s, 0.0)
    return {
        "kind": pages[0].kind,
        "plain_s_a_page": round(plain_s / len(pages), 3),
        "end_to_end_speedup": round(plain_s / live_s, 2),
        "without_the_reader": round(plain_s / given_s, 2),
        "reader_s_a_page": round(median(reader_s) / len(pages), 3),
        "hidden": round(1 - min(shown_s / median(reader_s), 1.0), 2) if median(reader_s) else None,
        "identical": f"{same}/{total}",
    }
