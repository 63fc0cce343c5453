"""What a page costs the reader, and how well it reads: seconds, errors of characters, memory, on pages made here.

The reader is run as its service runs it, in confined processes of one thread. Pages are drawn by the renderer from PDFs
whose text is known; `scan` hides their text layer, as a picture of the page has none. Needs the extra `documents`.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.common import PROC, machine_facts, make_parser, say
from bench.output import finish
from bench.tables import print_rows
from slipstream.documents.messages import DocumentFacts, DocumentLimits, DocumentRequest, PageDraft, PagePicture
from slipstream.documents.pool import ReaderPool, check_packages
from slipstream.documents.surfaces import page_text
from tests.support.documents import paragraph, pdf_of, sentence, two_columns, words_at


def one_column(seed: int) -> tuple[bytes, str]:
    """A page of running text under a heading, and its text."""
    head, parts = (
        "Of foxes and harbours",
        [[sentence(seed + 5 * part + row, 11) for row in range(9)] for part in range(4)],
    )
    content = words_at(72, 770, head, 20)
    for part, lines in enumerate(parts):
        content += paragraph(72, 720 - 155 * part, lines, 11)
    return content, "\n\n".join([head, *(" ".join(lines) for lines in parts)])


TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KINDS = {"one column": one_column, "two columns": two_columns}


def edit_distance(truth: Sequence[str], text: Sequence[str]) -> int:
    """Insertions, deletions and substitutions (Levenshtein)."""
    row = list(range(len(text) + 1))
    for count, wanted in enumerate(truth, start=1):
        above, row[0] = row[0], count
        for place, found in enumerate(text, start=1):
            above, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, above + (found != wanted))
    return row[-1]


def plain(text: str) -> str:
    """Without marks of headings and with single spaces."""
    return " ".join(text.replace("#", " ").split())


async def _read(pool: ReaderPool, data: bytes, request: DocumentRequest) -> dict[str, Any]:
    """Times of one document of one page, and the most memory that its process had."""
    await pool.wait_prepared()
    [pid] = pool.pids  # the spare, which will read it
    began, times, used, text = time.perf_counter(), {}, {}, ""
    async for event in pool.read(data, request):
        times[type(event)], used[type(event)] = time.perf_counter() - began, _used(pid)
        if isinstance(event, PageDraft):
            text = plain(page_text(event.regions))
    return {
        "draw_s": times[PagePicture] - times[DocumentFacts],
        "read_s": times[PageDraft] - times[PagePicture],
        "cpu_s": used[PageDraft][1] - used[DocumentFacts][1],
        "memory_mib": used[PageDraft][0] / 1024,
        "text": text,
    }


def _used(pid: int) -> tuple[int, float]:
    """The most memory in KiB that a process or one that it has started ever had, and their seconds of CPU: a confined
    one lives in a namespace below its parent."""
    try:
        status = (PROC / str(pid) / "status").read_text()
        ticks = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[11:13]
        children = (PROC / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:  # it has ended
        return 0, 0.0
    own = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    below = [_used(int(child)) for child in children]
    cpu_s = sum(map(int, ticks)) / TICKS_PER_S
    return max([0, *own, *(peak for peak, _ in below)]), cpu_s + sum(seconds for _, seconds in below)


async def _measure(num_pages: int, dpis: Sequence[int]) -> list[dict[str, Any]]:
    pool = ReaderPool(DocumentLimits())
    began = time.perf_counter()
    await pool.wait_prepared()
    say(f"a reader starts in {time.perf_counter() - began:.2f} s")
    rows = []
    try:
        for kind, make in KINDS.items():
            for source, dpi in [("layer", 150), *(("scan", dpi) for dpi in dpis)]:
                request = DocumentRequest(dpi=dpi, text_layer=source == "layer")
                pages = [make(seed) for seed in range(num_pages)]
                said = [await _read(pool, pdf_of([content]), request) for content, _ in pages]
                rows.append(_row(kind, source, dpi, [plain(truth) for _, truth in pages], said))
                say(str(rows[-1]))
    finally:
        pool.close()
    return rows


def _row(kind: str, source: str, dpi: int, truths: Sequence[str], said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    wrong = sum(edit_distance(truth, page["text"]) for truth, page in zip(truths, said, strict=True))
    wrong_words = sum(
        edit_distance(truth.split(), page["text"].split()) for truth, page in zip(truths, said, strict=True)
    )
    return {
        "kind": kind,
        "source": source,
        "dpi": dpi,
        "draw_s": round(median(page["draw_s"] for page in said), 3),
        "read_s": round(median(page["read_s"] for page in said), 3),
        "least_read_s": round(min(page["read_s"] for page in said), 3),
        "cpu_s": round(median(page["cpu_s"] for page in said), 2),
        "cer": round(wrong / sum(map(len, truths)), 5),
        "wer": round(wrong_words / sum(len(truth.split()) for truth in truths), 5),
        "memory_mib": round(max(page["memory_mib"] for page in said)),
    }


def main(argv: Sequence[str]) -> None:
    """Measures, prints a table and the document."""
    flags: dict[str, Any] = {"pages": (4, "pages of each kind"), "dpi": ([60, 75, 100, 150], "resolutions of scans")}
    options = make_parser("document-pages", "What does a page cost the reader?", **flags).parse_args(argv)
    check_packages()
    rows = asyncio.run(_measure(options.pages, options.dpi))
    print_rows("Pages and what they cost", rows)
    finish("document-pages", {"machine": machine_facts(), "pages_each": options.pages, "rows": rows})
