"""Held-out pages through `ReadDocument`, with a reader that fails: is the text always plain decoding's?

Gateway, target and reader are processes of their own, and the client is that of `slipstream read`. The reader is the
real one with its OCR (see `faulty_reader`), and it is

- killed: SIGKILL to its process, which the stack starts again;
- frozen: SIGSTOP, and SIGCONT when the gateway has given it up or the page is done;
- slow: drafts come before the first token, in the middle of the text or behind its end;
- lying: of each page it says what is on the page before.

The pocket reader is done with a page before the OCR is, so its passes are replayed at a slower pace, tokens unchanged.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import is_whole, say
from bench.documents import faulty_reader
from bench.documents.faulty_reader import FAULT_VARIABLE, FOLDER_VARIABLE, mark_of
from bench.documents.reading import LOSSLESS, MAX_TOKENS, PLAIN, passes_of, what_is_missing
from bench.documents.shown_pages import DPI, SURFACE, document_of, flat, request_at, shown_pages, token_ids
from bench.replay.rows import TABLES, replaying
from slipstream import AsyncCaptioner, connect_async
from slipstream.documents.messages import PageDraft, PagePicture
from slipstream.documents.reading import DocumentEvent, PageReading, page_readings
from slipstream.messages import Caption, CommittedText
from slipstream.speculation.methods import METHODS
from slipstream.stack.local import STABLE_S, Stack, StackOptions
from slipstream.stack.process import ServiceProcess

FAULTS = {"well": "well", "killed": "held", "frozen": "held", "slow": "slow", "lying": "lying"}
"""What the reader itself does where it is hit from outside: it holds a draft until the strike is over."""
STRIKES = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}
HINTED = [method for method in LOSSLESS if METHODS[method].takes_hints]
CYCLE, BEFORE_DRAFT, WHILE_WRITTEN = 4, 1, 3
"""Of four pages the first loses its reader before its draft is sent, and the third while its text is written from it.
The drafts of the second and, where there is a reader again, of the fourth are let go."""
SILENCE_S, WAIT_S = 8.0, 120.0
"""After which the gateway gives a frozen reader up, and for which it waits for one."""
LOOK_S = 0.02
TABLE, SPEED = TABLES / "0.5b-7b.json", 3.0
"""A pass takes 26 ms: the OCR has done while a page is written."""


class Strikes:
    """Hits the reader of a document as the client hears of its pages."""

    def __init__(self, reader: ServiceProcess, folder: Path, number: signal.Signals) -> None:
        self.count = 0
        self._reader = reader
        self._folder = folder
        self._number = number
        self._page = 0
        self._hit_page = 0

    async def hear(self, event: DocumentEvent) -> None:
        match event:
            case PagePicture():
                self._page = event.page
                if event.page % CYCLE == BEFORE_DRAFT:
                    await self._strike()
                else:
                    mark_of(self._folder, event.page).touch()
            case CommittedText() if any(token.from_draft for token in event.tokens):
                await self._strike_writing()
            case Caption():  # the last moment
                await self._strike_writing()
            case PageDraft() if self._number is signal.SIGSTOP and self._hit_page == event.page:
                os.kill(self._reader.pid, signal.SIGCONT)

    async def _strike_writing(self) -> None:
        if self._page % CYCLE == WHILE_WRITTEN and self._hit_page != self._page:
            await self._strike()

    async def _strike(self) -> None:
        """A process that ends sooner after its start would count as one that does not start."""
        while self._reader.served_s < STABLE_S:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(LOOK_S)
        os.kill(self._reader.pid, self._number)
        self._hit_page = self._page
        self.count += 1


async def measure_faults(model: Path, num_pages: int) -> dict[str, Any]:
    """One document of all pages, by every fault and method; where there is no checkpoint or no OCR, why nothing is
    shown."""
    if why := what_is_missing(model):
        return {"shown": False, "why": why}
    document = await asyncio.to_thread(document_of, flat(shown_pages(model, num_pages)))
    expected: list[PageReading] = []
    rows = []
    for fault in FAULTS:
        async with _stack(model, fault) as (stack, captioner, folder):
            expected = expected or await _read(captioner, document, PLAIN)
            for method in LOSSLESS:
                strikes = Strikes(stack.processes["reader"], folder, STRIKES[fault]) if fault in STRIKES else None
                read = await _read(captioner, document, method, strikes)
                for mark in folder.iterdir():
                    mark.unlink()
                rows.append(_row(fault, method, read, expected, strikes))
                say(f"faults: {rows[-1]}")
    missed = [
        f"hints in time, {row['fault']}, by {row['method']}"
        for row in rows
        if _may_be_hinted(row) and not row["hinted"]
    ]
    return {"shown": True, "pages": num_pages, "model": str(model), "rows": rows, "missed": missed}


def _may_be_hinted(row: Mapping[str, Any]) -> bool:
    return row["method"] in HINTED and row["fault"] not in STRIKES


def are_faults_survived(found: Mapping[str, Any]) -> bool:
    """All texts are plain decoding's, readers that were to be hit were, before a draft was sent, and lies were heard in
    time to do harm."""
    return not found["shown"] or all(is_whole(row["identical"]) and _has_struck(row) for row in found["rows"])


def _has_struck(row: Mapping[str, Any]) -> bool:
    if row["fault"] in STRIKES:
        return bool(row["strikes"] and row["without_draft"])
    return row["fault"] != "lying" or not _may_be_hinted(row) or bool(row["hinted"])


@asynccontextmanager
async def _stack(model: Path, fault: str) -> AsyncIterator[tuple[Stack, AsyncCaptioner, Path]]:
    """With a client, and the folder of the reader's marks."""
    flags = ("--reader-wait-s", str(WAIT_S), *(("--reader-silence-s", str(SILENCE_S)) if fault == "frozen" else ()))
    with tempfile.TemporaryDirectory(prefix="slipstream-marks-") as folder:
        options = StackOptions(
            target_model=model,
            draft_model=None,
            reader=True,
            threads=1,
            env={FAULT_VARIABLE: FAULTS[fault], FOLDER_VARIABLE: folder},
            extra_flags={"gateway": flags},
        )
        options = replace(options, modules={**options.modules, "reader": faulty_reader.__name__})
        options = replaying(options, TABLE, SPEED, ("target",))
        async with Stack(options) as stack, connect_async(stack.gateway_address) as captioner:
            yield stack, captioner, Path(folder)


async def _read(
    captioner: AsyncCaptioner, document: bytes, method: str, strikes: Strikes | None = None
) -> list[PageReading]:
    request = request_at(2 * DPI)
    events = captioner.document_events(
        document,
        dpi=request.dpi,
        ocr_dpi=request.ocr_dpi,
        text_layer=request.text_layer,
        surface=SURFACE,
        ocr="never" if method == PLAIN else "always",
        method=method,
        max_new_tokens=MAX_TOKENS,
    )

    async def heard() -> AsyncGenerator[DocumentEvent, None]:
        async with aclosing(events):
            async for event in events:
                if strikes is not None:
                    await strikes.hear(event)
                yield event

    async with aclosing(page_readings(heard())) as pages:
        return [page async for page in pages]


def _row(
    fault: str, method: str, read: Sequence[PageReading], expected: Sequence[PageReading], strikes: Strikes | None
) -> dict[str, Any]:
    spent = [page.caption.speculation for page in read]
    same = sum(token_ids(page) == token_ids(other) for page, other in zip(read, expected, strict=True))
    return {
        "fault": fault,
        "method": method,
        "strikes": strikes.count if strikes is not None else 0,
        "without_draft": sum(not page.draft.regions for page in read),
        "hinted": sum(each.accepted_prediction_tokens + each.rejected_prediction_tokens > 0 for each in spent),
        **passes_of(read),
        "identical": f"{same}/{len(expected)}",
    }
