"""A film of the archive without a video or a model: what is decoded and captioned is made up, its runner is real."""

import asyncio
import contextlib
import io
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

import numpy as np

from slipstream.archive.intake import read_item
from slipstream.archive.job_runner import ArchiveRunner
from slipstream.archive.messages import BatchItem, JobKind, JobPart, Priority
from slipstream.archive.queue import BatchSpec, JobState, Lease, Outcome, QueuePolicy
from slipstream.archive.records import BatchPayload, part_of, read_job, write_batch
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import CaptionPlan
from slipstream.errors import (
    InvalidRequest,
    LimitExceeded,
    ServiceUnavailable,
    SlipstreamError,
    UnreadableVideo,
)
from slipstream.messages import Caption
from slipstream.metrics import GatewayMetrics
from slipstream.service_info import ModelInfo
from slipstream.video.files import FileThreads, VideoFile
from slipstream.video.film_cuts import Cut
from slipstream.video.messages import Planned, SampledVideo
from tests.support.memory_queue import MemoryQueue

CONFIG = GatewayConfig(listen="", target="t:1", archive_slots=2)
SEGMENTS, AT_ONCE, START_S = 7, 2, 5.0
TIMES = [(START_S + number, START_S + number + 1) for number in range(SEGMENTS)]


@dataclass
class FakeMedia:
    """Cuts films into segments of a second; the pixel of a frame says of which it is."""

    torn: set[int] = field(default_factory=set)
    refused: dict[int, SlipstreamError] = field(default_factory=dict)
    """Errors of decoding as a whole, by a segment that it is asked for."""
    asked: list[list[int]] = field(default_factory=list)
    num_open: int = 0
    at_cut: Callable[[], None] = lambda: None
    file: io.FileIO | None = None
    """The latest that was opened."""

    def overwrite(self) -> None:
        """As whoever copies another film to its place."""
        assert self.file is not None
        self.file.write(b"of another")

    async def plan_segments(self, source: VideoFile, cut: Cut, **_: Any) -> Planned:
        self.at_cut()
        return Planned(START_S, tuple(map(float, range(SEGMENTS + 1))), ("cut off",))

    def windows_at_once(self, num_frames: int, size: object) -> int:
        return AT_ONCE

    async def sample_windows(
        self, source: VideoFile, num_frames: int, windows: Sequence[tuple[float, float]], **_: Any
    ) -> list[SampledVideo | SlipstreamError]:
        numbers = [int(start_s) for start_s, _ in windows]
        self.asked.append(numbers)
        if error := next((self.refused[number] for number in numbers if number in self.refused), None):
            raise error
        return [UnreadableVideo("torn") if number in self.torn else self._video(number) for number in numbers]

    def _video(self, number: int) -> SampledVideo:
        self.num_open += 1
        frames = np.full((1, 1, 1, 3), number, dtype=np.uint8)
        return SampledVideo(frames, (0.0,), 1.0, 1, 1, "h264", 0, (), on_close=self._close)

    def _close(self) -> None:
        self.num_open -= 1

    async def digest(self, source: VideoFile) -> tuple[str, int]:
        return "ab" * 32, 12

    @contextlib.asynccontextmanager
    async def open_source(self, source: str, owner: str, **wanted: Any) -> AsyncIterator[VideoFile]:
        with io.FileIO(os.memfd_create("film"), "w+b") as self.file:
            yield VideoFile(cast(BinaryIO, self.file), 12, FileThreads())


class FakeCaptioner:
    """Stands in for `GatewayCaptioner`, its peers and its target."""

    def __init__(self) -> None:
        self.media = FakeMedia()
        self.draft = None
        self.peers = self.target = self
        self.metrics = GatewayMetrics()
        self.model = ModelInfo(model_id="big", revision="r1", max_frames=64)
        self.is_up = True
        self.captioned: list[int] = []
        self.summed_up: list[str] = []
        """Names of the summaries that were made."""
        self.at: Callable[[int], None] = lambda number: None
        self.lasts: asyncio.Event | None = None
        self.num_running = self.most_running = 0

    async def ask(self, timeout_s: float = 2.0, *, wait_for_ready: bool = False) -> ModelInfo:
        if not self.is_up:
            raise ServiceUnavailable("the target is not reachable")
        return self.model

    async def check(self, plan: CaptionPlan, *, wait_for_ready: bool = False) -> ModelInfo:
        return await self.ask()

    def settled(self, plan: CaptionPlan, target: ModelInfo) -> CaptionPlan:
        return plan

    async def look_for_draft(self, plan: CaptionPlan) -> None:
        pass

    async def caption(self, plan: CaptionPlan, video: SampledVideo, *_: Any, **__: Any) -> Caption:
        if not plan.has_video:
            self.summed_up.append(plan.request_id.partition("-whole")[2])
            return Caption(f"sum of {[line.split('] ')[1] for line in plan.options.prompt.splitlines()[2:]]}", 3, None)
        number = int(video.frames[0, 0, 0, 0])
        assert plan.request_id.partition("-q")[0].endswith(f"-s{number}")
        self.captioned.append(number)
        with self._running():
            await asyncio.sleep(0)
            if self.lasts is not None:
                await self.lasts.wait()
            self.at(number)
        return Caption(f"text {number}", 3, None)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            yield
        finally:
            self.num_running -= 1


class World:
    """A runner among fakes, and a queue with one film."""

    def __init__(self, policy: QueuePolicy | None = None) -> None:
        self.models = FakeCaptioner()
        self.media = self.models.media
        self.queue = MemoryQueue(policy)
        self.progress: list[str] = []
        self.stopping = asyncio.Event()
        self.runner = ArchiveRunner(CONFIG, cast(GatewayCaptioner, self.models), self.queue, stopping=self.stopping)

    async def submit(self, **options: Any) -> Lease:
        batch = BatchPayload("", {"segments": "fixed:1s"} | options)
        await self.queue.open_batch(BatchSpec("batch", options=write_batch(batch)))
        spec = read_item(BatchItem("a", "/a.mp4"), 1, batch, Priority.NORMAL, CONFIG)
        assert read_job(spec.payload).kind is JobKind.FILM
        await self.queue.submit("batch", [spec])
        return await self.take()

    async def take(self) -> Lease:
        (lease,) = await self.queue.take("w", 1)
        return lease

    async def ended(self, lease: Lease) -> Outcome:
        """Its outcome, committed; an error of its own as a worker commits it."""
        try:
            outcome = await self.runner.run(lease, self.progress.append)
        except (InvalidRequest, LimitExceeded) as error:
            outcome = Outcome(JobState.FAILED, error=str(error), error_code=error.status)
        assert await self.queue.finish(lease, outcome)
        assert not self.media.num_open, "all frames are freed"
        return outcome

    async def parts(self) -> list[JobPart]:
        (record,), _ = await self.queue.list_jobs("batch")
        return [part_of(part) for part in (await self.queue.list_parts("batch", record.job_id))[0]]

    async def texts(self) -> list[str]:
        return [part.caption.text if part.caption else part.error for part in await self.parts()]


SUMMED_UP: dict[str, Any] = {"summary": True, "summary_prompt": "Sum up.", "max_new_tokens": 8}
ROOM_FOR_TWO = 256 + 8 + len("Sum up.") + 60
"""Tokens of a context in which two captions and what is around them fit."""


def long_film(policy: QueuePolicy | None = None) -> World:
    world = World(policy)
    world.models.model = replace(world.models.model, max_context=ROOM_FOR_TWO)
    return world
