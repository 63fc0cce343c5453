"""The part of a gateway that reads documents, in this process: its own code, at a target and, if asked, a reader in
processes of their own. So pictures and drafts that are at hand can take the reader's place."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

from bench.documents.shown_pages import ShownPage
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.media import Media
from slipstream.captioning.plan import CaptionPlan
from slipstream.documents.messages import DocumentFacts, DocumentRequest, PageDraft, ReadEvent, RegionStage
from slipstream.documents.reading import DocumentOptions, PageReading, page_readings
from slipstream.documents.surfaces import SURFACES
from slipstream.rpc.peers import Peers
from slipstream.rpc.reader import RemoteReader


class AtHand:
    """Stands in for `RemoteReader`: says at once what is there already."""

    def __init__(self, events: Sequence[ReadEvent]) -> None:
        self._events = events

    @classmethod
    def of(cls, pages: Sequence[ShownPage], drafts: Sequence[PageDraft]) -> "AtHand":
        """A document of these pages, in their own pixels."""
        return cls(list(_events(pages, drafts)))

    async def read(self, *_: Any, **__: Any) -> AsyncGenerator[ReadEvent, None]:
        """See `RemoteReader.read`."""
        for event in self._events:
            yield event


def _events(pages: Sequence[ShownPage], drafts: Sequence[PageDraft]) -> Iterator[ReadEvent]:
    yield DocumentFacts(len(pages), tuple(range(1, len(pages) + 1)))
    for number, (page, draft) in enumerate(zip(pages, drafts, strict=True), start=1):
        yield replace(page.picture, page=number)
        yield replace(draft, page=number)


class Gateway:
    """Reads documents at a target.

    Args:
        target, reader: addresses; without a reader documents are at hand.
    """

    def __init__(self, target: str, reader: str = "") -> None:
        self._config = GatewayConfig(listen="", target=target, reader=reader or "at hand")
        self._peers = Peers(target, "")
        self._reader = RemoteReader(reader) if reader else None
        self._captioner = GatewayCaptioner(self._config, self._peers, Media(self._config))

    async def close(self) -> None:
        await self._peers.close()
        if self._reader is not None:
            await self._reader.close()

    async def record(self, document: bytes, request: DocumentRequest) -> AtHand:
        """What the reader says of the document."""
        assert self._reader is not None, "there is a reader to ask"
        events = self._reader.read(document, replace(request, pictures=True))
        return AtHand([event async for event in events])

    async def planned(self, asked: DocumentOptions, at_hand: AtHand | None = None) -> "Planned":
        """A document that can be read at once, by a gateway that has read none before."""
        reader = cast(RemoteReader, at_hand) if at_hand is not None else self._reader
        documents = DocumentCaptioner(self._config, self._captioner, reader)
        plan = documents.plan(asked)
        await self._captioner.check(plan)
        return Planned(documents, asked, plan)

    async def read(self, asked: DocumentOptions, at_hand: AtHand) -> list[PageReading]:
        """The pages of a document that is at hand, one after the other."""
        return await (await self.planned(asked, at_hand)).read(b"")


class Planned:
    """A document that is about to be read."""

    def __init__(self, documents: DocumentCaptioner, asked: DocumentOptions, plan: CaptionPlan) -> None:
        self._documents = documents
        self._asked = asked
        self._plan = plan

    async def read(self, document: bytes) -> list[PageReading]:
        """All of its pages, one after the other."""
        events = self._documents.events(document, self._asked, self._plan, pages_at_once=1)
        async with aclosing(page_readings(events)) as pages:
            return [page async for page in pages]

    async def read_regions(self, page: ShownPage, draft: PageDraft) -> tuple[tuple[str, ...], RegionStage, float]:
        """A page by its regions alone: the text of each in the reader's order, what they took, and the seconds."""
        began = time.perf_counter()
        regions = self._documents.regions_of(page.picture, lambda event: None)
        texts = await regions.read_all(draft, SURFACES[self._asked.surface](draft.regions), self._plan)
        return texts, regions.facts, time.perf_counter() - began
