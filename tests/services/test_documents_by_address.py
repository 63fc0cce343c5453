"""A document that a gateway fetches from an https address: the same bytes as an upload, by the guards of videos."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.media import Media
from slipstream.captioning.plan import CaptionPlan
from slipstream.documents.messages import DocumentFacts, DocumentRequest, PageDraft, PagePicture, ReadEvent
from slipstream.documents.reading import DocumentOptions, page_readings
from slipstream.errors import LimitExceeded, VideoNotFound
from slipstream.messages import Caption
from slipstream.metrics import GatewayMetrics
from slipstream.rpc.callers import Places
from slipstream.rpc.reader import RemoteReader
from slipstream.service_info import ModelInfo
from tests.services.test_media_fetch import Site, ok, site

__all__ = ["site"]
PDF = b"%PDF-1.7 of two pages" * 1000
CONFIG = GatewayConfig(listen="", target="t:1", reader="r:1", decode_workers=1, max_document_bytes=len(PDF))


class FakeCaptioner:
    """Stands in for `GatewayCaptioner`: every page has a text."""

    def __init__(self, media: Media) -> None:
        self.media, self.metrics = media, GatewayMetrics()
        self.places = Places("captions", 4, 1.0, are="are in work")
        self.peers = SimpleNamespace(target=SimpleNamespace(model=ModelInfo()))

    async def check(self, plan: CaptionPlan, *, wait_for_ready: bool) -> ModelInfo:
        return self.peers.target.model

    def settled(self, plan: CaptionPlan, target: ModelInfo) -> CaptionPlan:
        return plan

    async def caption(self, plan: CaptionPlan, *about: Any, **more: Any) -> Caption:
        return Caption(f"read {plan.request_id[-2:]}", 2, None)


@dataclass
class FakeReader:
    """Has two pages in whatever it is given."""

    given: list[bytes] = field(default_factory=list)

    async def read(
        self, data: bytes, request: DocumentRequest, *, request_id: str, silence_s: float
    ) -> AsyncGenerator[ReadEvent, None]:
        self.given.append(data)
        yield DocumentFacts(2, (1, 2))
        for page in (1, 2):
            yield PagePicture(page, 2, 1, 72, bytes(6))
            yield PageDraft(page, 2, 1, ())


async def read(site: Site, tmp_path: Path, path: str) -> tuple[list[str], list[bytes]]:
    """The texts of a document at that address, and what the reader was given."""

    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("nothing is uploaded")
        yield b""

    media, reader = Media(CONFIG, site.fetcher()), FakeReader()
    try:
        captioner = cast(GatewayCaptioner, FakeCaptioner(media))
        documents = DocumentCaptioner(CONFIG, captioner, cast(RemoteReader, reader))
        plan = documents.plan(asked := DocumentOptions(), path=site.url(path))
        events = documents.read_interactively(asked, plan, nothing())
        async with aclosing(page_readings(events)) as pages:
            return [page.text async for page in pages], reader.given
    finally:
        media.close()


async def test_a_document_is_fetched_and_read(site: Site, tmp_path: Path) -> None:
    site.answers[b"/a.pdf"] = ok(PDF)
    assert await read(site, tmp_path, "/a.pdf") == (["read p1", "read p2"], [PDF])
    assert len(site.requests) == 1


async def test_what_is_refused_reaches_no_reader(site: Site, tmp_path: Path) -> None:
    site.answers[b"/large.pdf"] = ok(PDF + b"x")
    with pytest.raises(LimitExceeded, match=f"at most {len(PDF)} bytes"):
        await read(site, tmp_path, "/large.pdf")
    with pytest.raises(VideoNotFound):
        await read(site, tmp_path, "/absent.pdf")
