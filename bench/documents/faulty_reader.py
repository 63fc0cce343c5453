"""The reader service with its real OCR and a fault, which $FAULTY_READER names; run by a stack in place of its own.

well    none
held    the draft of a page is sent once the page's mark is in the folder $FAULTY_READER_FOLDER, if ever
slow    drafts come late, each page's by as much as `DELAYS_S` says
lying   of each page it says what is on the page before
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from slipstream.documents.messages import DocumentRequest, PageDraft, ReadEvent, Region
from slipstream.documents.pool import ReaderPool
from slipstream.rpc.server import run_service
from slipstream.services.reader import __main__ as service

FAULT_VARIABLE, FOLDER_VARIABLE = "FAULTY_READER", "FAULTY_READER_FOLDER"
DELAYS_S = (0.0, 0.1, 0.3, 1.0)
"""Before the target has its first token, while it writes, and behind the end of the text."""
POLL_S = 0.01


def mark_of(folder: Path, page: int) -> Path:
    return folder / f"page-{page}"


async def _well(draft: PageDraft) -> PageDraft:
    return draft


async def _held(draft: PageDraft) -> PageDraft:
    mark = mark_of(Path(os.environ[FOLDER_VARIABLE]), draft.page)
    while not mark.exists():  # noqa: ASYNC110 (another process makes it)
        await asyncio.sleep(POLL_S)
    return draft


async def _slow(draft: PageDraft) -> PageDraft:
    await asyncio.sleep(DELAYS_S[draft.page % len(DELAYS_S)])
    return draft


class _Lying:
    """Where nothing was on the page before, or there was none, words are said backwards."""

    def __init__(self) -> None:
        self._before: tuple[Region, ...] = ()

    async def __call__(self, draft: PageDraft) -> PageDraft:
        backwards = tuple(replace(region, text=region.text[::-1]) for region in draft.regions)
        told, self._before = self._before or backwards, draft.regions
        return replace(draft, regions=told)


FAULTS: dict[str, Callable[[PageDraft], Awaitable[PageDraft]]] = {
    "well": _well,
    "held": _held,
    "slow": _slow,
    "lying": _Lying(),
}


class FaultyPool(ReaderPool):
    """Drafts of the OCR are told as the fault has them."""

    async def read(self, data: bytes, request: DocumentRequest) -> AsyncGenerator[ReadEvent, None]:
        told = FAULTS[os.environ[FAULT_VARIABLE]]
        async with aclosing(super().read(data, request)) as events:
            async for event in events:
                yield await told(event) if request.ocr and isinstance(event, PageDraft) else event


if __name__ == "__main__":
    service.ReaderPool = FaultyPool  # type: ignore[attr-defined]
    run_service("reader", service.ReaderConfig, service.setup, service.SERVES)
