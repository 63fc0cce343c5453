"""The region stage of a page: the target first reads what the reader found on it, all regions together, each as a page
of its own is read. Their texts are better hints for the page than the reader's words, as in the paper of `hsd`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog

from slipstream.captioning.plan import CaptionPlan
from slipstream.documents.messages import PageDraft, PagePicture, RegionStage
from slipstream.documents.regions import ReadableRegion, readable_regions, shown_alone
from slipstream.errors import SlipstreamError
from slipstream.frame_size import FrameSize
from slipstream.logs import get_logger
from slipstream.messages import Caption, StageChange
from slipstream.options import CaptionOptions
from slipstream.sampling.params import STRUCTURES

SPARE_TOKENS = 16
"""That a region may have beyond one for each byte that the reader saw there: a target may lose itself in a picture."""


class PageRegions:
    """Reads the regions of one page. What goes wrong with one costs its hint.

    Args:
        picture: the page's.
        size: of the target's frames.
        room: one place of it is held by each region while it is read.
        read: the target's reading of a picture, which may raise anything.
        emit: told of each region that is done, as stage "regions".
    """

    def __init__(
        self,
        picture: PagePicture,
        size: FrameSize,
        room: asyncio.Semaphore,
        read: Callable[[PagePicture, CaptionPlan], Awaitable[Caption]],
        emit: Callable[[StageChange], None],
    ) -> None:
        self._picture = picture
        self._size = size
        self._room = room
        self._read = read
        self._emit = emit
        self._num_done = 0
        self.facts = RegionStage()
        """So far."""

    async def read_all(self, draft: PageDraft, texts: Sequence[str], plan: CaptionPlan) -> tuple[str, ...]:
        """Of each of the draft's regions, in reading order, what the target reads there; where it does not, its text of
        `texts`, which is what the reader says in the target's way of writing. `plan` is the page's."""
        readings, began = list(texts), asyncio.get_running_loop().time()
        regions = readable_regions(draft, texts, self._picture)
        self.facts = RegionStage(num_regions=len(regions))
        self._emit(StageChange("regions", 0, len(regions)))

        async def read_one(region: ReadableRegion) -> None:
            caption = await self._read_one(region, plan)
            seconds = asyncio.get_running_loop().time() - began
            if caption is not None and caption.text:
                readings[region.place] = caption.text
                self.facts = _counted(self.facts, caption, seconds)
            self._num_done += 1
            self._emit(StageChange("regions", self._num_done, len(regions)))

        async with asyncio.TaskGroup() as group:
            for region in regions:
                group.create_task(read_one(region))
        return tuple(readings)

    async def _read_one(self, region: ReadableRegion, plan: CaptionPlan) -> Caption | None:
        plan = _region_plan(plan, region)
        structlog.contextvars.bind_contextvars(request_id=plan.request_id)
        try:
            async with self._room:
                picture = await asyncio.to_thread(shown_alone, self._picture, region.box, self._size)
                return await self._read(picture, plan)
        except SlipstreamError as error:
            get_logger().warning("region.lost", reason=str(error))
        except Exception:
            get_logger().exception("region.failed")
        return None


def _region_plan(plan: CaptionPlan, region: ReadableRegion) -> CaptionPlan:
    """As the page's, with what the reader says of the region as its hint. It is free text of any length: what is asked
    of the page's form says nothing of what stands in a part of it."""
    most_tokens = min(plan.options.max_new_tokens, len(region.text.encode()) + SPARE_TOKENS)
    options = CaptionOptions(prediction=(region.text,), max_new_tokens=most_tokens, min_new_tokens=0, trace=False)
    options = options.over(plan.options).without(*STRUCTURES)
    return replace(plan.named(f"-r{region.place}"), options=options, sampling=options.sampling)


def _counted(facts: RegionStage, caption: Caption, seconds: float) -> RegionStage:
    speculation = caption.speculation
    return RegionStage(
        num_regions=facts.num_regions,
        num_read=facts.num_read + 1,
        num_tokens=facts.num_tokens + caption.num_tokens,
        passes=facts.passes + speculation.passes,
        accepted_prediction_tokens=facts.accepted_prediction_tokens + speculation.accepted_prediction_tokens,
        rejected_prediction_tokens=facts.rejected_prediction_tokens + speculation.rejected_prediction_tokens,
        seconds=seconds,
    )
