"""A document that a gateway fetches from an https address: the same bytes as an upload, by the guards of videos."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
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
from slipstream.errors import LimitExceeded, Overloaded, VideoNotFound
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
    """Has two pages in whatever it is given, and sees what its media's places are meanwhile."""

    media: Media
    given: list[bytes] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    async def read(
        self, data: bytes, request: DocumentRequest, *, request_id: str, silence_s: float
    ) -> AsyncGenerator[ReadEvent, None]:
        self.given.append(data)
        self.held += [places.used for places in self.media.ceilings]
        yield DocumentFacts(2, (1, 2))
        for page in (1, 2):
            yield PagePicture(page, 2, 1, 72, bytes(6))
            yield PageDraft(page, 2, 1, ())


async def read(site: Site, path: str, config: GatewayConfig = CONFIG) -> tuple[list[str], FakeReader]:
    """The texts of a document at that address, and the reader that was given it."""

    async def nothing() -> AsyncIterator[bytes]:
        raise AssertionError("nothing is uploaded")
        yield b""

    media = Media(config, site.fetcher())
    reader = FakeReader(media)
    try:
        captioner = cast(GatewayCaptioner, FakeCaptioner(media))
        documents = DocumentCaptioner(config, captioner, cast(RemoteReader, reader))
        plan = documents.plan(asked := DocumentOptions(), path=site.url(path))
        events = documents.read_interactively(asked, plan, nothing())
        async with aclosing(page_readings(events)) as pages:
            return [page.text async for page in pages], reader
    finally:
        assert not any(places.used for places in media.ceilings)
        media.close()


async def test_a_document_is_fetched_and_read(site: Site) -> None:
    """What is fetched for a caller counts among what it uploads, its place until it is there."""
    site.answers[b"/a.pdf"] = ok(PDF)
    texts, reader = await read(site, "/a.pdf")
    assert (texts, reader.given, reader.held) == (["read p1", "read p2"], [PDF], [0, len(PDF)])
    assert len(site.requests) == 1


async def test_more_than_there_is_room_for_is_not_fetched(site: Site) -> None:
    site.answers[b"/a.pdf"] = ok(PDF)
    with pytest.raises(Overloaded, match="upload_bytes wait to be decoded"):
        await read(site, "/a.pdf", replace(CONFIG, max_upload_bytes=len(PDF) - 1, max_video_bytes=len(PDF) - 1))


async def test_what_is_refused_reaches_no_reader(site: Site) -> None:
    site.answers[b"/large.pdf"] = ok(PDF + b"x")
    with pytest.raises(LimitExceeded, match=f"limit of {len(PDF)} bytes"):
        await read(site, "/large.pdf")
    with pytest.raises(VideoNotFound):
        await read(site, "/absent.pdf")
