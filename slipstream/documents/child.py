"""A reader's process: `python -m slipstream.documents.child DESCRIPTOR MEMORY_BYTES CPU_S PARENT_PID`.

It reads one hostile document and ends. It gets the document's bytes as an open descriptor, confines itself before it
looks at them, and has nothing worth taking. What it answers is in `slipstream.documents.process`, its parent.
"""

import gc
import io
import json
import math
import mmap
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

from slipstream.documents.messages import (
    MAX_DRAFT_BYTES,
    DocumentLimits,
    DocumentRequest,
    PageDraft,
    draft_to_json,
)
from slipstream.documents.page_reader import Picture, read_page, scaled
from slipstream.documents.recognise import Recogniser
from slipstream.documents.render import OpenDocument, open_document
from slipstream.errors import InvalidRequest, LimitExceeded, UnreadableDocument
from slipstream.video.confine import confine, limit_cpu

MAX_REQUEST_BYTES = 64 * 1024
CPU_SLACK_S = 2
NICENESS = 5
"""Drafts can wait: a gateway that decides, and models on the CPU, go before them."""
_THREADS = 1

# -- preloading --------------------------------------------------------------------------------------------------------

_PDF = b"""%PDF-1.4
1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj
2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj
3 0 obj <</Type/Page/Parent 2 0 R/MediaBox[0 0 200 100]/Resources<</Font<</F 5 0 R>>>>/Contents 4 0 R>> endobj
4 0 obj <</Length 41>> stream
BT /F 18 Tf 9 40 Td (Quick brown) Tj ET
endstream endobj
5 0 obj <</Type/Font/Subtype/Type1/BaseFont/Helvetica>> endobj
trailer <</Root 1 0 R>>
"""


def preload(recogniser: Recogniser) -> None:
    """Makes this process load, before it is confined, whatever reading loads only when it comes to it: a small document
    of each kind is read, and one refused. Takes some tenths of a second."""
    limits = DocumentLimits()
    document = open_document(_PDF, limits)
    picture, _ = document.draw(1, 150, 10**6)
    layer = document.text_lines(1, picture)
    read_page(picture, layer, recogniser)
    read_page(picture, [], recogniser)
    kinds = {"PNG": ("RGB", "P", "RGBA"), "JPEG": ("L",), "WEBP": ("RGB",), "TIFF": ("1", "CMYK", "LAB")}
    for kind, mode in ((kind, mode) for kind, modes in kinds.items() for mode in modes):
        data = io.BytesIO()
        Image.new(mode, (8, 8)).save(data, kind)
        open_document(data.getvalue(), limits).draw(1, 150, 16)
    for nonsense in (b"no document", b"%PDF-1.4 nonsense"):
        with suppress(UnreadableDocument):
            open_document(nonsense, limits)


# -- child -------------------------------------------------------------------------------------------------------------


def main(descriptor: int, memory_bytes: int, cpu_s: int, parent_pid: int) -> None:
    """Serves one document, until the parent hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends its readers; a terminal or a supervisor does not
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    recogniser = Recogniser()
    preload(recogniser)
    with socket.socket(fileno=descriptor) as connection:
        confined = confine(memory_bytes, cpu_s, _THREADS, parent_pid)
        _say(connection, "ready", confined=confined, has_layout=recogniser.has_layout)
        gc.freeze()
        message, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
        if message:
            _Reading(connection, recogniser, DocumentLimits(**json.loads(message)), *descriptors).serve()


class _Reading:
    """One document, asked for page by page."""

    def __init__(
        self, connection: socket.socket, recogniser: Recogniser, limits: DocumentLimits, document: int, memory: int
    ) -> None:
        self._connection = connection
        self._recogniser = recogniser
        self._limits = limits
        self._document_descriptor = document
        self._pictures_bytes = 3 * limits.max_page_pixels
        self._memory = mmap.mmap(memory, self._pictures_bytes + MAX_DRAFT_BYTES)

    def serve(self) -> None:
        """Opens the document, then reads the pages that are asked for. Every message gets its answer, or an error."""
        document = self._answered(self._open, self._limits.open_s)
        while document is not None:
            message, *_ = socket.recv_fds(self._connection, MAX_REQUEST_BYTES, 0)  # `recv` is not let through
            if not message:
                return
            fields = json.loads(message)
            page, request = int(fields.pop("page")), DocumentRequest(**fields)
            self._answered(lambda page=page, request=request: self._read(document, page, request), self._limits.page_s)
            gc.collect()

    def _answered(self, work: Any, limit_s: float) -> Any:
        _begin_step(limit_s)
        try:
            return work()
        except (InvalidRequest, LimitExceeded) as error:
            kind = next(kind for kind in (UnreadableDocument, LimitExceeded, InvalidRequest) if isinstance(error, kind))
            _say(self._connection, "refused", error=kind.__name__, message=str(error))
        except MemoryError:
            _say(self._connection, "refused", error=LimitExceeded.__name__, message=LACKED_MEMORY)
        return None

    def _open(self) -> OpenDocument:
        with os.fdopen(self._document_descriptor, "rb") as file:
            file.seek(0)  # it may be the second reader of this document
            document = open_document(file.read(), self._limits)
        _say(self._connection, "opened", num_pages=document.num_pages)
        return document

    def _read(self, document: OpenDocument, page: int, request: DocumentRequest) -> None:
        picture, dpi = document.draw(page, request.dpi, self._limits.max_page_pixels)
        height, width = picture.shape[:2]
        self._memory[: picture.nbytes] = picture.tobytes()
        _say(self._connection, "drawn", width=width, height=height, dpi=dpi)
        _begin_step(self._limits.page_s)
        began = time.monotonic()
        seen = self._seen(document, page, request, picture, dpi)
        layer = document.text_lines(page, seen) if request.text_layer else []
        regions, warnings = read_page(seen, layer, self._recogniser, ocr=request.ocr)
        across, down = width / seen.shape[1], height / seen.shape[0]
        placed = tuple(scaled(region, across, down, width, height) for region in regions)
        draft = PageDraft(page, width, height, placed, tuple(warnings), time.monotonic() - began)
        data = json.dumps(draft_to_json(draft), ensure_ascii=False).encode("utf-8", errors="replace")
        self._memory[self._pictures_bytes : self._pictures_bytes + len(data)] = data
        _say(self._connection, "drafted", num_bytes=len(data))

    def _seen(
        self, document: OpenDocument, page: int, request: DocumentRequest, picture: Picture, dpi: float
    ) -> Picture:
        """The picture that the OCR gets."""
        if not request.ocr_dpi or request.ocr_dpi == request.dpi:
            return picture
        if dpi:
            return document.draw(page, request.ocr_dpi, self._limits.max_page_pixels)[0]
        shrink = min(1.0, request.ocr_dpi / request.dpi)
        size = (max(1, int(picture.shape[1] * shrink)), max(1, int(picture.shape[0] * shrink)))
        return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX))


LACKED_MEMORY = "the document needs more memory than a reader has; read it at a lower dpi"


def _begin_step(limit_s: float) -> None:
    limit_cpu(math.ceil(limit_s) + CPU_SLACK_S)


def _say(connection: socket.socket, kind: str, **fields: Any) -> None:
    connection.send(json.dumps({kind: fields}).encode())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
