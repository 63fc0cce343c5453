"""What every job does at the models: it asks which there are, waits its turn, and is told who is to blame if they die.

Opening what a job names is here too.
"""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace

import structlog

from slipstream.archive.queue import Lease
from slipstream.archive.worker import RetryLater, RunnerDied
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.media import Media
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    ObjectChanged,
    ObjectUnavailable,
    ServiceUnavailable,
    SessionExists,
    SlipstreamError,
    UnreadableVideo,
)
from slipstream.options import CaptionOptions
from slipstream.service_info import ModelInfo
from slipstream.video.files import VideoFile
from slipstream.video.ranged_film import RangedFilm

ELSEWHERE_S = 30.0
"""Until a job that this gateway cannot run is offered again: one of another release, or models that do not fit it."""


class ModelRuns:
    """One per gateway, for jobs of all kinds."""

    def __init__(
        self,
        config: GatewayConfig,
        captioner: GatewayCaptioner,
        on_target_lost: Callable[[], None] = lambda: None,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self._config = config
        self._stopping = stopping or asyncio.Event()
        self._captioner = captioner
        self._on_target_lost = on_target_lost
        self._co_runners = CoRunners()
        self.slots = asyncio.Semaphore(max(config.archive_slots, 1))
        """Held by who is at the models."""

    @property
    def is_ending(self) -> bool:
        """Whether this gateway is to end: a film then begins no more segments."""
        return self._stopping.is_set()

    def check_stays(self) -> None:
        """Between parts of a job. Raises `RetryLater` once this gateway is to end, for another to go on behind them."""
        if self.is_ending:
            raise RetryLater("the gateway ends; what is kept stays", counted=False, delay_s=0.0)

    async def plan(self, lease: Lease, options: CaptionOptions) -> CaptionPlan:
        """What to ask of the models there are now. Raises what is wrong with the options, `RetryLater`, or
        `ServiceUnavailable` without a target."""
        request_id = lease.request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)
        with left_to_others():
            plan = make_plan(options, self._config, request_id=request_id, owner=lease.owner)
        plan, _ = await self.settled(replace(plan, in_background=True))
        return plan

    async def settled(self, plan: CaptionPlan) -> tuple[CaptionPlan, ModelInfo]:
        """The plan for the models there are now, which may be others than before a wait, and the target. Raises what
        `plan` does."""
        try:
            with left_to_others():
                target = await self._captioner.check(plan)
        except ServiceUnavailable:
            self._on_target_lost()
            raise
        plan = self._captioner.settled(plan, target)
        await self._captioner.look_for_draft(plan)
        return plan, target

    async def check_target(self, known: ModelInfo) -> None:
        """Whether what was made is that target's: one that was away meanwhile may have come back as another one. Raises
        `RetryLater` where it has, or `ServiceUnavailable`."""
        try:
            now = await self._captioner.peers.target.ask()
        except ServiceUnavailable:
            self._on_target_lost()
            raise
        if (now.revision, now.dtype) != (known.revision, known.dtype):
            raise RetryLater("the target is another one than that of the parts that are kept", counted=False)

    @contextlib.asynccontextmanager
    async def captioning(self, lease: Lease, plan: CaptionPlan) -> AsyncIterator[None]:
        """Surrounds a caption, and counts it. A target that is lost becomes `RetryLater` or `RunnerDied`, and what this
        gateway lacks `RetryLater`."""
        metered = self._captioner.metrics.captioning(plan.method.name, door="archive")
        with metered, self._co_runners.running(lease) as co_runner, left_to_others():
            try:
                yield
            except SessionExists as error:  # somebody's session has the name of this run, which is no fault of the item
                raise RetryLater(str(error), counted=False) from error
            except ServiceUnavailable as error:
                if await self._target_answers():
                    raise RetryLater(str(error), counted=True) from error
                if co_runner.beside_suspect:
                    raise RetryLater(str(error), counted=False) from error
                raise RunnerDied("the target died or vanished while it captioned this") from error

    async def _target_answers(self) -> bool:
        try:
            await self._captioner.peers.target.ask()
        except SlipstreamError:
            self._on_target_lost()
            return False
        return True


@contextlib.contextmanager
def left_to_others() -> Iterator[None]:
    """What this gateway or its models lack is the operator's fault, not the item's: `RetryLater`."""
    try:
        yield
    except InvalidConfig as error:
        raise for_others(str(error)) from error


def for_others(reason: str) -> RetryLater:
    """What to raise of a job that this gateway cannot run and another may. Such jobs come back one by one: of many at
    once it would take the most again, as it is done with them at once."""
    return RetryLater(reason, counted=False, delay_s=ELSEWHERE_S * random.uniform(0.5, 1.5))


class CoRunner:
    """One caption at the models."""

    def __init__(self, lease: Lease, beside_suspect: bool) -> None:
        self.is_suspect = lease.is_suspect
        self.beside_suspect = beside_suspect
        """A job that is suspected of killing what runs it was there at the same time."""


class CoRunners:
    """Who is at the target together: when it dies beside a suspect, nobody else is blamed."""

    def __init__(self) -> None:
        self._present: set[CoRunner] = set()

    @contextlib.contextmanager
    def running(self, lease: Lease) -> Iterator[CoRunner]:
        """For the time of a caption."""
        suspects = any(other.is_suspect for other in self._present)
        co_runner = CoRunner(lease, beside_suspect=suspects and not lease.is_suspect)
        if lease.is_suspect:
            for other in self._present:
                other.beside_suspect = not other.is_suspect
        self._present.add(co_runner)
        try:
            yield co_runner
        finally:
            self._present.discard(co_runner)


# -- sources ----------------------------------------------------------------------------------------------------------


CheckUnchanged = Callable[[], Awaitable[None]]
"""Raises `ObjectChanged` where the file was written to since it was opened."""


@contextlib.asynccontextmanager
async def opened(
    media: Media, source: str, owner: str, *, whole: bool = False, most_bytes: int = 0
) -> AsyncIterator[tuple[VideoFile, CheckUnchanged]]:
    """The file of an item, and what asks whether it is still the same, as is asked behind its use anyway. Raises what
    `Media.open_source` and the check do, and `RetryLater` for a host or store that fails, also while the file is in
    use."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            file = await stack.enter_async_context(
                media.open_source(source, owner=owner, whole=whole, most_bytes=most_bytes)
            )
            check = await stack.enter_async_context(_unchanged(file, source))
        except ServiceUnavailable as error:  # the host it is fetched from, which may never come back
            raise RetryLater(str(error), counted=True) from error
        try:
            yield file, check
        except ObjectUnavailable as error:
            raise RetryLater(str(error), counted=True) from error


@contextlib.asynccontextmanager
async def _unchanged(file: VideoFile, source: str) -> AsyncIterator[CheckUnchanged]:
    """Raises `ObjectChanged` behind what is done with a file that was written to meanwhile, as while it is copied to
    its place: what was read is of no one content, and what it lacked may be there by now. Gives what asks before."""
    before = await _written(file)

    async def check() -> None:
        if await _written(file) != before:
            raise ObjectChanged(f"{source} changed while it was read; try again once it is complete")

    try:
        yield check
    except UnreadableVideo:
        await check()
        raise
    await check()


async def _written(file: VideoFile) -> tuple[int, int]:
    """Size and time of the last write; of what is read by ranges the store says itself that it changed."""
    if isinstance(file.file, RangedFilm):
        return file.num_bytes, 0
    status = await file.files.run(os.fstat, file.file.fileno())
    return status.st_size, status.st_mtime_ns


def check_digest(given: str, actual: str) -> None:
    """Raises `InvalidRequest` when the file is not the one that was meant."""
    if given and given.lower() != actual:
        raise InvalidRequest(f"the file has the SHA-256 {actual}, not the one that was given")
