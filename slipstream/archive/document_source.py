"""The gateway's own `DocumentSource`: its documents, as the interactive call has them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.captioning.plan import CaptionPlan
from slipstream.documents.messages import DocumentFacts
from slipstream.documents.reading import DocumentOptions, PageReading, page_readings


class GatewayDocuments:
    """A `DocumentSource`. Pages are read one after the other: another document may have the archive's other slot."""

    def __init__(self, documents: DocumentCaptioner) -> None:
        self._documents = documents

    async def pages(
        self, data: bytes, asked: DocumentOptions, plan: CaptionPlan
    ) -> AsyncGenerator[DocumentFacts | PageReading, None]:
        """See `DocumentSource`."""
        async with aclosing(self._documents.events(data, asked, plan, pages_at_once=1)) as events:
            async for facts in events:
                if isinstance(facts, DocumentFacts):
                    yield facts
                    break
            async with aclosing(page_readings(events)) as pages:
                async for page in pages:
                    yield page
