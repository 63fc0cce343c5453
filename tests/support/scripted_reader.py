"""A reader service that draws real documents, loads no model, and says of them what a script says.

The script is `script.json` in the folder $READER_SCRIPT_FOLDER, read anew for each page, by page number:
    text     in place of what the page says, at once
    beyond   pixels by which that text's region leaves the page
    regions  in place of that text, [[left, top, right, bottom, text], ...] in shares of the page
    hold     name of a file there: the draft is sent once it exists, or at once where no OCR was asked for
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
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

FOLDER_VARIABLE = "READER_SCRIPT_FOLDER"
FOLDER = Path(os.environ.get(FOLDER_VARIABLE, ""))


class ScriptedPool(ReaderPool):
    """Reads as the script says. A draft of the script's own does not wait for the page's."""

    async def read(self, data: bytes, request: DocumentRequest) -> AsyncGenerator[ReadEvent, None]:
        told: dict[str, Any] = {}
        async with aclosing(super().read(data, request)) as events:
            async for event in events:
                if isinstance(event, PageDraft):
                    if told.keys() & {"text", "regions"}:
                        continue
                    await held(told, request)
                yield event
                if isinstance(event, PagePicture):
                    pages = json.loads((FOLDER / "script.json").read_text())
                    told = pages.get(str(event.page), {})
                    if told.keys() & {"text", "regions"}:
                        await held(told, request)
                        yield scripted(event, told)


async def held(told: dict[str, Any], request: DocumentRequest) -> None:
    while request.ocr and "hold" in told and not (FOLDER / told["hold"]).exists():  # noqa: ASYNC110 (another process makes it)
        await asyncio.sleep(0.01)


def scripted(picture: PagePicture, told: dict[str, Any]) -> PageDraft:
    width, height = picture.width, picture.height
    whole = [0, 0, 1 + told.get("beyond", 0) / width, 1, told.get("text")]
    regions = []
    for order, (left, top, right, bottom, text) in enumerate(told.get("regions", [whole])):
        box = Box(round(left * width), round(top * height), round(right * width), round(bottom * height))
        regions.append(Region(box, RegionKind.TEXT, order, text, 1.0, Origin.OCR))
    return PageDraft(picture.page, width, height, tuple(regions))


if __name__ == "__main__":
    scripting: Any = partial(ScriptedPool, module="tests.support.trusting_reader")
    service.ReaderPool = scripting  # type: ignore[misc]
    run_service("reader", service.ReaderConfig, service.setup, service.SERVES)
