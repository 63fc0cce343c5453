"""Films in segments, for both of the gateway's doors: where one is cut, its frames ahead of the models, its captions.

Each segment is captioned from its own frames, as if they were a clip of their own, so its text is that of such a clip.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from slipstream.captioning.caption_run import Emit
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.duplicates import KnownCaptions, RecentCaptions, caption_sparingly
from slipstream.captioning.film_summary import Once, TimedText, not_kept, nothing_seen, sum_up
from slipstream.captioning.plan import CaptionPlan
from slipstream.captioning.stats import CaptionStats
from slipstream.errors import (
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    SlipstreamError,
    UnreadableVideo,
)
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.messages import Caption, CaptionEvent, CommittedText, FilmEvent, FilmFacts, Segment, SharedFrom
from slipstream.time_limits import within_limit
from slipstream.video.files import VideoFile
from slipstream.video.film_cuts import Cut, groups, parse_segments
from slipstream.video.frame_times import num_sampled
from slipstream.video.messages import SampledVideo, Window

SEGMENTS_LOOKED_UP = 8
"""Earlier segments whose captions are hints for the next one."""
RETRY_S = 300.0
"""For so long a group of segments that cannot be decoded together is tried in parts. A decoder that crashes costs a
second of that, one that hangs all of its own limit."""
CANNOT_SUM_UP = (InvalidRequest, LimitExceeded, UnreadableVideo)
"""Errors that the summary has, and the film has not."""


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

    def whole(self, error: str = "") -> Segment:
        """All of it, for its summary."""
        start_s, end_s = (round(self.start_s + bound, 6) for bound in (self.bounds[0], self.bounds[-1]))
        return Segment(len(self.bounds) - 1, start_s, end_s, error, is_summary=True)


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
        self._texts: dict[str, deque[str]] = {}
        """By prompt."""

    def add(self, prompt: str, caption: Caption) -> None:
        """One more; the same text once."""
        texts = self._texts.setdefault(prompt, deque(maxlen=SEGMENTS_LOOKED_UP))
        if caption.text and caption.text not in texts:
            texts.append(caption.text)

    def of(self, plan: CaptionPlan) -> CaptionPlan:
        """The plan of one prompt with them, where its method drafts from hints and its text depends on none."""
        if not plan.method.takes_hints or plan.is_tolerant:
            return plan
        return plan.hinted(tuple(self._texts.get(plan.options.prompt, ())))


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
        """All that is done for a caller's film: receive it, cut it, caption one segment after the other, each for all
        prompts, and sum up where that is asked for. `upload` is read where the plan names no path. Close it to end the
        work.

        Raises:
            InvalidRequest: the options ask for no segments, or the film has none.
            Overloaded: too many captions are in work.
            ServiceUnavailable: no target.
            DeadlineExceeded: a segment or the summary took longer than this server allows.
            SlipstreamError: whatever is wrong with the film, the request or the models.
        """
        cut, captioner = cut_of(plan), self._captioner
        captioner.places.check()
        plan = captioner.settled(plan, await captioner.check(plan, wait_for_ready=True))
        with ExitStack() as held:
            async with captioner.media.open(plan.path, upload, owner=plan.owner) as source:
                held.enter_context(captioner.places.held())
                film = await self.cut(plan, source, cut)
                yield film.facts
                said: list[TimedText] = []
                earlier, known = EarlierTexts(), defaultdict[str, RecentCaptions](RecentCaptions)
                async with aclosing(self.decoded(plan, source, film, range(film.facts.num_segments))) as segments:
                    async for decoded in segments:
                        captions: list[Caption] = []
                        async with aclosing(self._said(plan, decoded, earlier, known)) as events:
                            async for event in events:
                                yield event
                                if isinstance(event, Caption):
                                    captions.append(event)
                        if captions:
                            said.append(TimedText.of(decoded.segment, captions))
                if not said:
                    raise UnreadableVideo(decoded.segment.error)
                if plan.options.get("summary", False):
                    async with aclosing(self._summed_up(plan, film, said)) as events:
                        async for event in events:
                            yield event

    async def cut(self, plan: CaptionPlan, source: VideoFile, cut: Cut) -> Film:
        """Where the film is cut. Raises what `Media.plan_segments` does."""
        async with self._decoders:
            with self._captioner.metrics.decoding(source.num_bytes):
                planned = await self._captioner.media.plan_segments(
                    source, cut, owner=plan.owner, in_background=plan.in_background
                )
        return Film(planned.start_s, planned.bounds, planned.warnings)

    async def decoded(
        self, plan: CaptionPlan, source: VideoFile, film: Film, numbers: Sequence[int]
    ) -> AsyncGenerator[DecodedSegment, None]:
        """The segments of these numbers with their frames, in order; some are decoded together, and the next ones ahead
        of whoever takes these. A part of the film that cannot be decoded has errors in the place of frames.

        Raises:
            SlipstreamError: no room for frames, or no decoder.
        """
        most_frames = _most_frames(plan, list(pairwise(film.bounds)))
        at_once = self._captioner.media.windows_at_once(most_frames, self._frame_size)
        waiting = deque(groups(numbers, at_once))
        ahead: asyncio.Task[list[DecodedSegment]] | None = None
        there: deque[DecodedSegment] = deque()
        try:
            while waiting:
                is_beside, ahead = ahead is not None, ahead or self._begin(plan, source, film, waiting[0])
                try:
                    there.extend(await ahead)
                except Overloaded:
                    if not is_beside:
                        raise
                    ahead = None  # it found no room beside frames of this film's own, which are free by now
                    continue
                waiting.popleft()
                ahead = self._begin(plan, source, film, waiting[0]) if waiting else None
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
        """Captions one segment by a plan of one prompt; needs a `check` of the captioner's shortly before. Its frames
        stay: of the next prompts the target has the prefill at hand. Raises what `GatewayCaptioner.caption` raises."""
        assert decoded.video is not None, "a segment without frames has no caption"
        now, number = asyncio.get_running_loop().time(), decoded.segment.prompt
        stats = CaptionStats(arrived=now - (0.0 if number else decoded.decode_s), sampled=now)
        plan = plan.named(f"-s{decoded.segment.number}" + (f"-q{number}" if number else ""))
        return await self._captioner.caption(plan, decoded.video, emit, stats, resume_wait_s=resume_wait_s)

    async def sum_up(
        self, plan: CaptionPlan, said: Sequence[TimedText], once: Once = not_kept, *, resume_wait_s: float = 0.0
    ) -> Caption:
        """The text about the whole film, from those of its segments; needs a `check` shortly before. Raises what
        `film_summary.sum_up` and `GatewayCaptioner.caption` raise."""

        async def ask(asked: CaptionPlan, warnings: Sequence[str]) -> Caption:
            now = asyncio.get_running_loop().time()
            stats, video = CaptionStats(arrived=now, sampled=now), nothing_seen(warnings)
            return await self._captioner.caption(asked, video, _unheard, stats, resume_wait_s=resume_wait_s)

        target = self._captioner.peers.target.model
        assert target is not None, "the target has been asked"
        return await sum_up(plan, said, target.max_context, ask, once)

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
        found = await self._sampled(plan, source, windows)
        decode_s = (loop.time() - began) / len(numbers)
        return [
            DecodedSegment(film.segment(number), video, decode_s)
            if isinstance(video, SampledVideo)
            else DecodedSegment(film.segment(number, str(video)), None)
            for number, video in zip(numbers, found, strict=True)
        ]

    async def _sampled(
        self, plan: CaptionPlan, source: VideoFile, windows: Sequence[Window]
    ) -> list[SampledVideo | SlipstreamError]:
        """The frames of windows or why there are none. What fails as a whole is tried again in halves, as one window
        may be to blame: a decoder crashes or runs out of time or memory over it."""
        found: list[SampledVideo | SlipstreamError] = []
        clock = asyncio.get_running_loop().time
        waiting, last_s = deque([windows]), clock() + RETRY_S
        try:
            while waiting:
                asked = waiting.popleft()
                try:
                    found += await self._sampled_together(plan, source, asked)
                except (UnreadableVideo, LimitExceeded) as error:
                    half = len(asked) // 2
                    if half and clock() < last_s:
                        waiting.extendleft((asked[half:], asked[:half]))
                    else:
                        found += [error] * len(asked)
        except BaseException:
            for video in found:
                if isinstance(video, SampledVideo):
                    video.close()
            raise
        return found

    async def _sampled_together(
        self, plan: CaptionPlan, source: VideoFile, windows: Sequence[Window]
    ) -> Sequence[SampledVideo | SlipstreamError]:
        async with self._decoders:
            with self._captioner.metrics.decoding(0):  # its bytes are counted once, when it is cut
                return await self._captioner.media.sample_windows(
                    source,
                    _most_frames(plan, windows),
                    windows,
                    fps=plan.options.get("fps", 0.0),
                    size=self._frame_size,
                    owner=plan.owner,
                    in_background=plan.in_background,
                )

    async def _said(
        self, plan: CaptionPlan, decoded: DecodedSegment, earlier: EarlierTexts, known: Mapping[str, KnownCaptions]
    ) -> AsyncGenerator[FilmEvent, None]:
        """All that is said of one segment, prompt after prompt; then its frames are closed. `known`: earlier captions,
        by prompt."""
        if decoded.video is None:
            yield decoded.segment
            return
        with decoded.video:
            for number, prompt in enumerate(plan.options.questions):
                answering = replace(decoded, segment=replace(decoded.segment, prompt=number))
                asked = earlier.of(plan.asking(prompt))
                async with aclosing(self._answered(asked, answering, known[prompt])) as events:
                    async for event in events:
                        yield event
                        if isinstance(event, Caption):
                            earlier.add(prompt, event)

    async def _summed_up(
        self, plan: CaptionPlan, film: Film, said: Sequence[TimedText]
    ) -> AsyncGenerator[FilmEvent, None]:
        """The summary, which may have an error as a segment may: what came before is whole."""
        try:
            async with self._in_time(plan, "the summary"):
                caption = await self.sum_up(plan, said, resume_wait_s=self._config.resume_wait_s)
        except CANNOT_SUM_UP as error:
            yield film.whole(str(error))
            return
        yield film.whole()
        yield CommittedText(caption.tokens)
        yield caption

    async def _answered(
        self, plan: CaptionPlan, decoded: DecodedSegment, known: KnownCaptions
    ) -> AsyncGenerator[FilmEvent, None]:
        """All that is said of one segment and prompt."""
        assert decoded.video is not None, "a segment without frames is asked nothing"
        yield decoded.segment
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

    async def _caption_in_time(self, decoded: DecodedSegment, emit: Emit, plan: CaptionPlan) -> Caption:
        async with self._in_time(plan, f"segment {decoded.segment.number}"):
            return await self.caption(plan, decoded, emit, resume_wait_s=self._config.resume_wait_s)

    @asynccontextmanager
    async def _in_time(self, plan: CaptionPlan, what: str) -> AsyncIterator[None]:
        """Surrounds a caption, and counts it. Raises `DeadlineExceeded` for one that takes too long."""
        with self._captioner.metrics.captioning(plan.method.name):
            async with within_limit(self._config.request_timeout_s, f"{what} was not captioned"):
                yield


def cut_of(plan: CaptionPlan) -> Cut:
    """How the plan cuts a film. Raises `InvalidRequest` for one that does not."""
    cut = parse_segments(plan.options.get("segments", "none"))
    if cut is None:
        raise InvalidRequest("say how the film is to be cut: segments fixed:10s, or shots")
    return cut


def _most_frames(plan: CaptionPlan, windows: Sequence[Window]) -> int:
    """Of one of these segments."""
    longest_s = max(end_s - start_s for start_s, end_s in windows)
    return num_sampled(longest_s, plan.options.num_frames, plan.options.get("fps", 0.0))


def _unheard(event: CaptionEvent) -> None:
    """A summary is told when it is whole."""


async def _given(task: asyncio.Task[list[DecodedSegment]]) -> list[DecodedSegment]:
    """What a task that was cancelled has made all the same."""
    (result,) = await asyncio.gather(task, return_exceptions=True)
    return result if isinstance(result, list) else []
