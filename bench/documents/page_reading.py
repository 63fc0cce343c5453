"""Pages read with drafts that a measurement chooses: each is a video of one frame, and its draft a prediction.

The gateway's own documents ask a reader, whose drafts cannot be chosen.
"""

import asyncio
import io
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.documents.messages import PageDraft, PagePicture, ReadEvent
from slipstream.documents.reading import PageReading
from slipstream.documents.surfaces import SURFACES, page_text
from slipstream.options import CaptionOptions
from slipstream.speculation.methods import METHODS, TOLERANT_METHOD

READ_PROMPT = "Read this page."
HINTED = "hints"


@dataclass(frozen=True)
class PageReader:
    """Reads pages at a gateway.

    Args:
        captioner: the gateway.
        options: of each page; what is left out is: the prompt `READ_PROMPT`, the method "hints".
        surface: how the target writes, one of `SURFACES`.
        max_pages: read at once.
        timeout_s: of one page.
    """

    captioner: AsyncCaptioner
    options: CaptionOptions
    surface: str = "markdown"
    max_pages: int = 2
    timeout_s: float = 600.0

    async def read(self, events: AsyncIterator[ReadEvent]) -> AsyncGenerator[PageReading, None]:
        """The pages in their order, each when it is done. The reader works at the next pages meanwhile, so its time
        is hidden but for the first page's. Raises what the reader or the gateway raise."""
        running: deque[asyncio.Task[PageReading]] = deque()
        upcoming: asyncio.Task[ReadEvent | None] | None = asyncio.create_task(_next(events))
        picture: PagePicture | None = None
        try:
            while upcoming is not None or running:
                awaited = [upcoming] if upcoming is not None and len(running) < self.max_pages else []
                await asyncio.wait([*awaited, *list(running)[:1]], return_when=asyncio.FIRST_COMPLETED)
                if running and running[0].done():
                    yield await running.popleft()
                elif upcoming is not None and upcoming.done():
                    event = await upcoming
                    upcoming = asyncio.create_task(_next(events)) if event is not None else None
                    if isinstance(event, PagePicture):
                        picture = event
                    elif isinstance(event, PageDraft) and picture is not None and event.page == picture.page:
                        running.append(asyncio.create_task(self._read_page(picture, event)))
        finally:
            left = [*running, *([upcoming] if upcoming is not None else [])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _read_page(self, picture: PagePicture, draft: PageDraft) -> PageReading:
        options = self._asked(draft).over(CaptionOptions(prompt=READ_PROMPT, num_frames=1))
        video = await asyncio.to_thread(page_video, picture)
        caption = await self.captioner.caption(video, timeout_s=self.timeout_s, **options.given())
        return PageReading(picture, draft, caption)

    def _asked(self, draft: PageDraft) -> CaptionOptions:
        """The options with the page's hints, where the method takes any."""
        asked = self.options.over(CaptionOptions(method=HINTED))
        method = METHODS.get(asked.method)
        if method is None or not method.takes_hints:
            return asked
        if method.name == TOLERANT_METHOD:  # paper 003's set of regions has no order
            texts = [text for text in SURFACES[self.surface](draft.regions) if text]
        else:
            texts = [page_text(draft.regions, self.surface)]
        given = [*self.options.get("prediction", ()), *filter(None, texts)]
        return replace(asked, prediction=tuple(given)) if given else asked


async def _next(events: AsyncIterator[ReadEvent]) -> ReadEvent | None:
    return await anext(events, None)


def page_video(picture: PagePicture) -> bytes:
    """The picture as a video of one frame, without loss. Raises ValueError when its pixels do not fit its size."""
    import av

    pixels = np.frombuffer(picture.pixels, dtype=np.uint8).reshape(picture.height, picture.width, 3)
    target = io.BytesIO()
    with av.open(target, "w", format="matroska") as output:
        stream = output.add_stream("ffv1", rate=1)
        stream.width, stream.height, stream.pix_fmt = picture.width, picture.height, "bgr0"
        stream.time_base = Fraction(1)
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        frame.pts = 0
        for packet in (*stream.encode(frame), *stream.encode()):
            output.mux(packet)
    return target.getvalue()
