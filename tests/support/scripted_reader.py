"""A reader service that draws real documents and says of them what a script says.

The script is the JSON file $READER_SCRIPT, read anew for each page: by page number, or "all",
    text   in place of what the page says
    lie    true: of a region that is not on the page
    hold   a file: the draft is sent once that exists
    stuck  a file: the picture is sent once that exists
Beside the script it notes `drawn-PAGE` when it has drawn a page, before it is sent, and `drafted-PAGE`.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.documents.messages import (
    Box,
    DocumentRequest,
    Origin,
    PageDraft,
    PagePicture,
    ReadEvent,
    Region,
    RegionKind,
)
from slipstream.documents.pool import ReaderPool
from slipstream.rpc.server import run_service
from slipstream.services.reader import __main__ as service

SCRIPT = "READER_SCRIPT"


async def exists(path: str) -> None:
    while not Path(path).exists():  # noqa: ASYNC110 (another process makes it)
        await asyncio.sleep(0.01)


class ScriptedPool(ReaderPool):
    """Reads as the script says."""

    async def read(self, data: bytes, request: DocumentRequest) -> AsyncGenerator[ReadEvent, None]:
        script = Path(os.environ[SCRIPT])
        async with aclosing(super().read(data, request)) as events:
            async for event in events:
                pages = json.loads(script.read_text())
                match event:
                    case PagePicture():
                        told = self._told(pages, event.page)
                        (script.parent / f"drawn-{event.page}").touch()
                        if "stuck" in told:
                            await exists(told["stuck"])
                    case PageDraft():
                        told = self._told(pages, event.page)
                        (script.parent / f"drafted-{event.page}").touch()
                        if "hold" in told:
                            await exists(told["hold"])
                        event = self._scripted(event, told)
                yield event

    @staticmethod
    def _told(pages: dict[str, Any], page: int) -> dict[str, Any]:
        told: dict[str, Any] = pages.get(str(page), pages.get("all", {}))
        return told

    @staticmethod
    def _scripted(draft: PageDraft, told: dict[str, Any]) -> PageDraft:
        if not {"text", "lie"} & set(told):
            return draft
        box = Box(0, 0, 10**6, 10**6) if told.get("lie") else Box(0, 0, draft.width, draft.height)
        region = Region(box, RegionKind.TEXT, 0, told.get("text", ""), 1.0, Origin.OCR)
        return replace(draft, regions=(region,))


if __name__ == "__main__":
    service.ReaderPool = ScriptedPool  # type: ignore[misc]
    run_service("reader", service.ReaderConfig, service.setup, service.SERVES)
