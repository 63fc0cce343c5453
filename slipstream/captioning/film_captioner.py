"""Films in segments, for both of the gateway's doors: where one is cut, its frames ahead of the models, its captions.

Each segment is captioned from its own frames, as if they were a clip of their own, so its text is that of such a clip.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial

from slipstream.captioning.caption_run import Emit
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.duplicates import KnownCaptions, RecentCaptions, caption_sparingly
from slipstream.captioning.media import VideoFile
from slipstream.captioning.plan import CaptionPlan
from slipstream.captioning.stats import CaptionStats
from slipstream.errors import InvalidRequest, LimitExceeded, ServiceUnavailable, SlipstreamError, UnreadableVideo
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.messages import Caption, CaptionEvent, FilmEvent, FilmFacts, Segment, SharedFrom
from slipstream.rpc.security import current_rights
from slipstream.video.film_cuts import Cut, groups, parse_segments
from slipstream.video.messages import SampledVideo

SEGMENTS_LOOKED_UP = 8
"""Earlier segments whose captions are hints for the next one."""


@dataclass(frozen=True)
class Film:
    """Where a film is cut."""

    start_s: float
    """When its first frame is shown, by the container's clock."""
    bounds: tuple[float, ...]
    """[num_segments + 1] seconds from that frame."""
    warnings: tuple[str, ...] = ()

    @property
    def facts(self) -> FilmFacts:
        """For callers."""
        return FilmFacts(len(self.bounds) - 1, self.start_s, self.bounds[-1], self.warnings)

    def segment(self, number: int, error: str = "") -> Segment:
        """One of them, from 0, by the container's clock."""
        start_s, end_s = (round(self.start_s + bound, 6) for bound in self.bounds[number : number + 2])
        return Segment(number, start_s, end_s, error)


@dataclass(frozen=True)
class DecodedSegment:
    """A segment and its frames."""

    segment: Segment
    video: SampledVideo | None
    """To be closed by whoever has it. None where the segment has an error."""
    decode_s: float = 0.0
    """Its share of the time that decoding took."""


class EarlierTexts:
    """What the last segments of a film were captioned with: for the next ones, text that is already there. They change
    no text, so who has captioned what, and in which order, does not matter."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque(maxlen=SEGMENTS_LOOKED_UP)

    def add(self, caption: Caption) -> None:
        """One more; the same text once."""
        if caption.text and caption.text not in self._texts:
            self._texts.append(caption.text)

    def of(self, plan: CaptionPlan) -> CaptionPlan:
        """The plan with them, where its method drafts from hints and its text does not depend on these."""
        return plan.hinted(self._texts) if plan.method.takes_hints and not plan.is_tolerant else plan


class FilmCaptioner:
    """Captions films in segments with a `GatewayCaptioner`.

    Args:
        decoders: one is held while a film is cut or decoded; None: there are as many as there are decoders.
    """

    def __init__(
        self, config: GatewayConfig, captioner: GatewayCaptioner, decoders: asyncio.Semaphore | None = None
    ) -> None:
        self._config = config
        self._captioner = captioner
        self._decoders = decoders or asyncio.Semaphore(config.decode_workers)

    async def caption_interactively(
        self, plan: CaptionPlan, upload: AsyncIterator[bytes]
    ) -> AsyncGenerator[FilmEvent, None]:
        """All that is done for a caller's film: receive it, cut it, caption one segment after the other. `upload` is
        read where the plan names no path. Close it to end the work.

        Raises:
            InvalidRequest: the options ask for no segments, or the film has none.
            Overloaded: too many captions are in work.
            ServiceUnavailable: no target, or a segment took longer than this server allows.
            SlipstreamError: whatever is wrong with the film, the request or the models.
        """
        cut, captioner = cut_of(plan), self._captioner
        captioner.places.check()
        plan = captioner.settled(plan, await captioner.check(plan, wait_for_ready=True))
        with ExitStack() as held:
            async with captioner.media.open(plan.path, upload, owner=plan.owner) as source:
                held.enter_context(captioner.places.held(of_one=current_rights().max_captions))
                film = await self.cut(plan, source, cut)
                yield film.facts
                numbers = range(film.facts.num_segments)
                num_captions, earlier, known = 0, EarlierTexts(), RecentCaptions()
                async with aclosing(self.decoded(plan, source, film, numbers)) as segments:
                    async for decoded in segments:
                        num_captions += decoded.video is not None
                        async for event in self._said(earlier.of(plan), decoded, known):
                            yield event
                            if isinstance(event, Caption):
                                earlier.add(event)
                if not num_captions:
                    raise UnreadableVideo(decoded.segment.error)

    async def cut(self, plan: CaptionPlan, source: VideoFile, cut: Cut) -> Film:
        """Where the film is cut. Raises what `Media.plan_segments` does."""
        async with self._decoders:
            with self._captioner.metrics.decoding(source.num_bytes):
                planned = await self._captioner.media.plan_segments(source, cut, owner=plan.owner)
        return Film(planned.start_s, planned.bounds, planned.warnings)

    async def decoded(
        self, plan: CaptionPlan, source: VideoFile, film: Film, numbers: Sequence[int]
    ) -> AsyncGenerator[DecodedSegment, None]:
        """The segments of these numbers with their frames, in order; some are decoded together, and the next ones ahead
        of whoever takes these. A part of the film that cannot be decoded has errors in the place of frames.

        Raises:
            SlipstreamError: no room for frames, or no decoder.
        """
        at_once = self._captioner.media.windows_at_once(plan.options.num_frames, self._frame_size)
        waiting = deque(groups(numbers, at_once))
        ahead: asyncio.Task[list[DecodedSegment]] | None = None
        there: deque[DecodedSegment] = deque()
        try:
            while ahead is not None or waiting:
                ahead = ahead or self._begin(plan, source, film, waiting.popleft())
                there.extend(await ahead)
                ahead = self._begin(plan, source, film, waiting.popleft()) if waiting else None
                while there:
                    yield there.popleft()
        finally:
            if ahead is not None:
                ahead.cancel()
                there.extend(await _given(ahead))
            for left in there:
                if left.video is not None:
                    left.video.close()

    async def caption(
        self, plan: CaptionPlan, decoded: DecodedSegment, emit: Emit, *, resume_wait_s: float = 0.0
    ) -> Caption:
        """Captions one segment and closes its frames; needs a `check` of the captioner's shortly before. Raises what
        `GatewayCaptioner.caption` raises."""
        assert decoded.video is not None, "a segment without frames has no caption"
        now = asyncio.get_running_loop().time()
        stats = CaptionStats(arrived=now - decoded.decode_s, sampled=now)
        with decoded.video as video:
            plan = plan.named(f"-s{decoded.segment.number}")
            return await self._captioner.caption(plan, video, emit, stats, resume_wait_s=resume_wait_s)

    @property
    def _frame_size(self) -> FrameSize:
        target = self._captioner.peers.target.model
        return ANY_SIZE if target is None else target.frame_size

    def _begin(
        self, plan: CaptionPlan, source: VideoFile, film: Film, numbers: Sequence[int]
    ) -> asyncio.Task[list[DecodedSegment]]:
        return asyncio.create_task(self._decode(plan, source, film, numbers))

    async def _decode(
        self, plan: CaptionPlan, source: VideoFile, film: Film, numbers: Sequence[int]
    ) -> list[DecodedSegment]:
        windows = [(film.bounds[number], film.bounds[number + 1]) for number in numbers]
        loop = asyncio.get_running_loop()
        began = loop.time()
        found: Sequence[SampledVideo | SlipstreamError]
        try:
            async with self._decoders:
                with self._captioner.metrics.decoding(0):  # its bytes are counted once, when it is cut
                    found = await self._captioner.media.sample_windows(
                        source, plan.options.num_frames, windows, size=self._frame_size, owner=plan.owner
                    )
        except (UnreadableVideo, LimitExceeded) as error:
            found = [error] * len(numbers)
        decode_s = (loop.time() - began) / len(numbers)
        return [
            DecodedSegment(film.segment(number), video, decode_s)
            if isinstance(video, SampledVideo)
            else DecodedSegment(film.segment(number, str(video)), None)
            for number, video in zip(numbers, found, strict=True)
        ]

    async def _said(
        self, plan: CaptionPlan, decoded: DecodedSegment, known: KnownCaptions
    ) -> AsyncGenerator[FilmEvent, None]:
        """All that is said of one segment. `known`: captions of earlier ones."""
        yield decoded.segment
        if decoded.video is None:
            return
        events: asyncio.Queue[CaptionEvent | None] = asyncio.Queue()
        made_for = SharedFrom(segment=decoded.segment.number)
        make = partial(self._caption_in_time, decoded, events.put_nowait)
        captioning = asyncio.create_task(caption_sparingly(plan, decoded.video, known, made_for, make))
        captioning.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield (await captioning).caption
        finally:
            captioning.cancel()
            await asyncio.gather(captioning, return_exceptions=True)
            decoded.video.close()

    async def _caption_in_time(self, decoded: DecodedSegment, emit: Emit, plan: CaptionPlan) -> Caption:
        limit_s = self._config.request_timeout_s
        with self._captioner.metrics.captioning(plan.method.name):
            try:
                async with asyncio.timeout(limit_s):
                    return await self.caption(plan, decoded, emit, resume_wait_s=self._config.resume_wait_s)
            except TimeoutError:
                raise ServiceUnavailable(
                    f"segment {decoded.segment.number} was not captioned within this server's limit of {limit_s:g} s"
                ) from None


def cut_of(plan: CaptionPlan) -> Cut:
    """How the plan cuts a film. Raises `InvalidRequest` for one that does not."""
    cut = parse_segments(plan.options.get("segments", "none"))
    if cut is None:
        raise InvalidRequest("say how the film is to be cut: segments fixed:10s, or shots")
    return cut


async def _given(task: asyncio.Task[list[DecodedSegment]]) -> list[DecodedSegment]:
    """What a task that was cancelled has made all the same."""
    (result,) = await asyncio.gather(task, return_exceptions=True)
    return result if isinstance(result, list) else []
