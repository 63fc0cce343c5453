"""Held-out pages read by the pocket reader, the OCR's text as its hint: how good drafts are.

The gateway's own code reads pages whose pictures and drafts are at hand; `faults` and `live` have a reader at work.

- `rows`: by kind of page and method what a pass gives, and how fast decoding is.
- `noise`: what the OCR's resolution does to both methods.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.common import is_whole, say
from bench.document_pages import edit_distance, plain
from bench.documents.alignment import LEAST_RATIO
from bench.documents.gateway import AtHand, Gateway
from bench.documents.shown_pages import SURFACE, Pages, ShownPage, drafts_of, shown_pages, token_ids
from slipstream.documents.messages import DocumentLimits, PageDraft
from slipstream.documents.pool import ReaderPool, check_packages
from slipstream.documents.reading import DocumentOptions, PageReading
from slipstream.documents.surfaces import page_text
from slipstream.errors import InvalidConfig
from slipstream.options import CaptionOptions
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
MAX_TOKENS = 192
LEAST_DECODING = 0.97
Drafts = Mapping[str, Sequence[PageDraft]]


async def measure_reading(model: Path, num_pages: int, rounds: int) -> dict[str, Any]:
    """All of it; where there is no checkpoint or no OCR, why nothing is shown."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    pages = shown_pages(model, num_pages)
    pool = ReaderPool(DocumentLimits())
    try:
        async with Stack(StackOptions(target_model=model, draft_model=None, threads=1)) as stack:
            gateway = Gateway(stack.processes["target"].address)
            noise, drafts = await _measure_noise(gateway, pool, pages)
            rows = [row for kind in pages for row in await _measure_kind(gateway, pages[kind], drafts[kind], rounds)]
            await gateway.close()
    finally:
        pool.close()
    found = {"shown": True, "pages": num_pages, "model": str(model), "rows": rows, "noise": noise}
    return found | {"missed": missed(found)}


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
    """What is aimed at and was not reached here."""
    hinted = [row["decoding_speedup"] for row in found["rows"] if row["method"] == "hints"]
    aims = {
        f"{LEAST_DECODING} of decoding on every kind": min(hinted) >= LEAST_DECODING,
        f"{LEAST_RATIO} times the tokens a pass of hsd": min(row["ratio"] for row in found["noise"]) >= LEAST_RATIO,
    }
    return [aim for aim, is_reached in aims.items() if not is_reached]


def is_kept(found: Mapping[str, Any]) -> bool:
    """Texts are those of plain decoding wherever they were compared. What was not shown breaks nothing."""
    return not found["shown"] or all(is_whole(row["identical"]) for row in found["rows"] if not row["lossy"])


async def _read(
    gateway: Gateway, pages: Sequence[ShownPage], drafts: Sequence[PageDraft], name: str
) -> list[PageReading]:
    caption = CaptionOptions(**METHODS[name], max_new_tokens=MAX_TOKENS)
    return await gateway.read(DocumentOptions(surface=SURFACE, caption=caption), AtHand.of(pages, drafts))


# -- noise ------------------------------------------------------------------------------------------------------------


async def _measure_noise(
    gateway: Gateway, pool: ReaderPool, pages: Pages
) -> tuple[list[dict[str, Any]], Mapping[str, Sequence[PageDraft]]]:
    """By resolution; and the drafts of the best one, which the other figures are of."""
    rows: list[dict[str, Any]] = []
    drafts: dict[str, list[PageDraft]] = {}
    for dpi in NOISE_DPI:
        drafts = {kind: await drafts_of(pool, of_kind, dpi) for kind, of_kind in pages.items()}
        row: dict[str, Any] = {"ocr_dpi": dpi, "ocr_cer": _cer(pages, drafts)}
        row["ocr_s"] = round(mean(draft.seconds for of_kind in drafts.values() for draft in of_kind), 3)
        for method in ("hints", "hsd"):
            read = [await _read(gateway, of_kind, drafts[kind], method) for kind, of_kind in pages.items()]
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
    gateway: Gateway, pages: Sequence[ShownPage], drafts: Sequence[PageDraft], rounds: int
) -> list[dict[str, Any]]:
    """Methods in turns, so that a machine whose speed drifts favours none."""
    read: dict[str, list[list[PageReading]]] = {name: [] for name in METHODS}
    for _ in range(rounds):
        for name in METHODS:
            read[name].append(await _read(gateway, pages, drafts, name))
    rows = [_method_row(pages[0].kind, name, read[name], read[PLAIN]) for name in METHODS]
    say(f"{pages[0].kind}: {rows}")
    return rows


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
