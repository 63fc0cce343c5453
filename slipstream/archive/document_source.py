"""The gateway's own `DocumentSource`: a reader draws and drafts the pages, the gateway's captioner reads them.

A page is a video of one frame, and what the reader makes of it a hint. Pages are read one after the other; the reader
works at the next one meanwhile.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from slipstream.archive.document_runner import PageRead
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import CaptionPlan
from slipstream.captioning.stats import CaptionStats
from slipstream.documents.messages import (
    DocumentFacts,
    DocumentRequest,
    PageDraft,
    PagePicture,
    ReadEvent,
)
from slipstream.documents.surfaces import page_text
from slipstream.errors import InvalidConfig, ReaderUnavailable, ServiceUnavailable
from slipstream.frame_size import fit
from slipstream.messages import Caption
from slipstream.rpc.reader import RemoteReader
from slipstream.video.messages import SampledVideo

FRAME_S = 1.0
"""How long the one frame of a page is shown, as in a video of one frame."""


class ReaderSource:
    """A `DocumentSource` over the reader service that the gateway was told of."""

    def __init__(self, config: GatewayConfig, captioner: GatewayCaptioner) -> None:
        self._config = config
        self._captioner = captioner
        self._reader = RemoteReader(config.reader, config.peer_security()) if config.reader else None

    async def pages(
        self, data: bytes, request: DocumentRequest, plan: CaptionPlan
    ) -> AsyncGenerator[DocumentFacts | PageRead, None]:
        """See `DocumentSource`."""
        async with aclosing(self._events(data, request)) as events:
            upcoming = asyncio.create_task(_next_page(events))
            try:
                while (page := await upcoming) is not None:
                    upcoming = asyncio.create_task(_next_page(events))
                    if isinstance(page, DocumentFacts):
                        yield page
                    else:
                        picture, draft = page
                        yield PageRead(picture.dpi, draft, await self._caption(plan, picture, draft))
            finally:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)

    async def close(self) -> None:
        """Leaves the reader."""
        if self._reader is not None:
            await self._reader.close()

    async def _events(self, data: bytes, request: DocumentRequest) -> AsyncGenerator[ReadEvent, None]:
        if self._reader is None:
            raise InvalidConfig(
                "this gateway reads no documents; start it with --reader, the address of a reader service"
            )
        try:
            async with aclosing(self._reader.read(data, request)) as events:
                async for event in events:
                    yield event
        except ServiceUnavailable as error:
            raise ReaderUnavailable(str(error)) from error

    async def _caption(self, plan: CaptionPlan, picture: PagePicture, draft: PageDraft) -> Caption:
        """The page as a caption of its picture."""
        stats = CaptionStats(arrived=asyncio.get_running_loop().time())
        plan = replace(_hinted(plan, draft), request_id=f"{plan.request_id}-{picture.page}")
        with await self._frame(picture) as video:
            stats.sampled = asyncio.get_running_loop().time()
            return await self._captioner.caption(plan, video, lambda event: None, stats)

    async def _frame(self, picture: PagePicture) -> SampledVideo:
        """The picture as the target wants it. Its bytes count in the gateway's budget of frames until it is closed."""
        target = self._captioner.peers.target.model
        assert target is not None, "the target has been asked"
        size = target.frame_size.within(self._config.max_frame_pixels)
        place = self._captioner.media.frames.reserve(max(len(picture.pixels), 3 * size.most_pixels(1)))
        try:
            async for _ in place.wait():
                pass
            pixels = np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.height, picture.width, 3)
            frame = await asyncio.to_thread(fit, pixels, size, 1)
        except BaseException:
            place.release()
            raise
        frames = np.ascontiguousarray(frame)[None]
        place.shrink(frames.nbytes)
        return SampledVideo(
            frames, (0.0,), FRAME_S, picture.width, picture.height, "page", 0, (), on_close=place.release
        )


async def _next_page(events: AsyncIterator[ReadEvent]) -> "DocumentFacts | tuple[PagePicture, PageDraft] | None":
    event = await anext(events, None)
    if not isinstance(event, PagePicture):
        assert not isinstance(event, PageDraft), "a picture comes before its draft"
        return event
    draft = await anext(events)
    assert isinstance(draft, PageDraft), "a draft comes behind its picture"
    return event, draft


def _hinted(plan: CaptionPlan, draft: PageDraft) -> CaptionPlan:
    """With the page's text as one more hint, where the method takes any."""
    text = page_text(draft.regions)
    if not plan.method.takes_hints or not text:
        return plan
    prediction = (*plan.options.prediction, text)
    return replace(plan, options=replace(plan.options, prediction=prediction))
