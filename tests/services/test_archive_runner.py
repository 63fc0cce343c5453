"""How one archive job is run, with models and files that are made up: order, reuse, and who is to blame."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

from slipstream.archive.job_runner import ArchiveRunner
from slipstream.archive.queue import DamagedRecord, JobState, Lease, Outcome, QueueUnavailable
from slipstream.archive.records import BatchPayload, JobPayload, read_result, write_batch, write_job
from slipstream.archive.worker import RetryLater, RunnerDied
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.plan import CaptionPlan
from slipstream.captioning.stats import CaptionStats
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    ObjectChanged,
    ServiceUnavailable,
    SessionExists,
    SlipstreamError,
    UnreadableVideo,
    VersionMismatch,
)
from slipstream.messages import Caption, CommittedText, CommittedToken, StageChange
from slipstream.metrics import GatewayMetrics
from slipstream.service_info import ModelInfo
from slipstream.video.files import FileThreads, VideoFile
from slipstream.video.messages import SampledVideo
from tests.support.memory_queue import MemoryQueue
from tests.support.processes import eventually

CONFIG = GatewayConfig(listen="", target="t:1", archive_slots=1, archive_ahead=2, decode_workers=4)
TARGET = ModelInfo(model_id="big", revision="r1", dtype="float32", tokens_per_frame=4, max_frames=64)


@dataclass
class FakeTarget:
    """A peer that answers, or not."""

    is_up: bool = True
    model: ModelInfo = field(default_factory=lambda: TARGET)

    async def ask(self, timeout_s: float = 2.0, *, wait_for_ready: bool = False) -> ModelInfo:
        if not self.is_up:
            raise ServiceUnavailable("the target is not reachable")
        return self.model


class FakeCaptioner:
    """Stands in for `GatewayCaptioner`: the text tells what was asked of which video.

    `meanwhile` runs within a caption."""

    def __init__(self) -> None:
        self.target = FakeTarget()
        self.peers = self
        self.draft = None
        self.media = self
        self.metrics = GatewayMetrics()
        self.meanwhile: Callable[[CaptionPlan], Any] = lambda plan: asyncio.sleep(0)
        self.while_read: Callable[[VideoFile], Any] = lambda source: None
        self.request_id = ""
        self.num_sampled = self.num_captions = self.num_captioning = self.most_captioning = 0

    async def check(self, plan: CaptionPlan, *, wait_for_ready: bool = False) -> ModelInfo:
        return await self.target.ask()

    def settled(self, plan: CaptionPlan, target: ModelInfo) -> CaptionPlan:
        return plan

    async def look_for_draft(self, plan: CaptionPlan) -> None:
        pass

    @contextlib.asynccontextmanager
    async def open_source(self, source: str, owner: str, **wanted: Any) -> AsyncIterator[VideoFile]:
        with os.fdopen(os.memfd_create("video"), "w+b", buffering=0) as file:
            file.write(source.encode())
            yield VideoFile(cast(BinaryIO, file), len(source), FileThreads())

    async def sample(
        self, plan: CaptionPlan, source: VideoFile, emit: Any, stats: CaptionStats, *, digest: bool
    ) -> SampledVideo:
        assert digest
        self.num_sampled += 1
        data = os.pread(source.whole.fileno(), 100, 0)
        self.while_read(source)
        stats.sampled = asyncio.get_running_loop().time()
        emit(StageChange("decode", done=1, total=1))
        frames = np.zeros((1, 2, 2, 3), np.uint8)
        return SampledVideo(frames, (0.0,), 1.0, 2, 2, "", 0, (), hashlib.sha256(data).hexdigest(), len(data))

    async def caption(self, plan: CaptionPlan, video: SampledVideo, emit: Any, stats: CaptionStats) -> Caption:
        self.num_captions += 1
        self.num_captioning += 1
        self.most_captioning = max(self.most_captioning, self.num_captioning)
        try:
            emit(CommittedText((CommittedToken(0, "", from_draft=False),) * 3))
            await self.meanwhile(plan)
        finally:
            self.num_captioning -= 1
        return Caption(f"{plan.options.prompt} {video.sha256[:6]}", 3, None, request_id=self.request_id)


class World:
    """A runner among fakes, and leases of its queue."""

    def __init__(self, config: GatewayConfig = CONFIG) -> None:
        self.models = FakeCaptioner()
        self.queue = MemoryQueue()
        self.runner = ArchiveRunner(config, cast(GatewayCaptioner, self.models), self.queue)
        self.progress: list[str] = []

    async def run(self, lease: Lease) -> Outcome:
        return await self.runner.run(lease, self.progress.append)

    async def text(self, lease: Lease) -> str:
        return read_result((await self.run(lease)).result)[0].text


def lease_of(source: str = "/a", **changes: Any) -> Lease:
    options = write_batch(BatchPayload("", {"prompt": "What?"}))
    payload = write_job(JobPayload(source, {}, ""))
    name = hashlib.sha256(source.encode()).hexdigest()[:32]
    lease = Lease(name, "batch", source, "worker", 1, payload, options, 0, 0, is_suspect=False, entry="")
    return replace(lease, **changes)


@pytest.fixture
def world() -> World:
    return World()


async def test_a_job_becomes_a_result_with_its_receipt(world: World) -> None:
    own = write_job(JobPayload("/a", {"prompt": "Why?"}, ""))
    outcome = await world.run(lease_of(payload=own, epoch=3))
    summary, receipt = read_result(outcome.result)
    digest = hashlib.sha256(b"/a").hexdigest()
    assert outcome.state is JobState.DONE and summary.text == f"Why? {digest[:6]}"
    assert (receipt.video_sha256, receipt.video_bytes, receipt.runs) == (digest, 2, 3)
    assert (receipt.target.revision, receipt.target.model_id, receipt.reused) == ("r1", "big", False)
    assert receipt.draft is None and outcome.tallies["tokens"] == 3
    assert world.progress == ["decode 1/1", "generate 3"]


async def test_the_file_must_be_the_one_that_was_meant(world: World) -> None:
    digest = hashlib.sha256(b"/a").hexdigest()
    for given, is_right in ((digest, True), ("0" * 64, False)):
        lease = lease_of(payload=write_job(JobPayload("/a", {}, given)))
        if is_right:
            assert await world.text(lease)
        else:
            with pytest.raises(InvalidRequest, match=f"has the SHA-256 {digest}"):
                await world.run(lease)


@pytest.mark.parametrize("error", [None, UnreadableVideo("it is cut off")])
async def test_of_a_file_that_is_written_to_while_it_is_read_there_is_no_caption(
    error: UnreadableVideo | None, world: World
) -> None:
    """Its frames would be of other bytes than its digest; and what it lacked may be there by now."""

    def grow(source: VideoFile) -> None:
        source.whole.write(b"more")
        if error is not None:
            raise error

    world.models.while_read = grow
    with pytest.raises(ObjectChanged, match="/a changed while it was read; try again once it is complete"):
        await world.run(lease_of())
    assert not world.models.num_captions


async def test_videos_are_decoded_ahead_of_the_models(world: World) -> None:
    gate = asyncio.Event()
    world.models.meanwhile = lambda plan: gate.wait()
    runs = [asyncio.create_task(world.run(lease_of(f"/{number}"))) for number in range(3)]
    await eventually(lambda: world.models.num_sampled == 3 and world.models.num_captioning)
    assert world.models.num_captions == 1
    gate.set()
    assert [outcome.state for outcome in await asyncio.gather(*runs)] == [JobState.DONE] * 3
    assert world.models.most_captioning == 1 and world.models.num_captions == 3


async def test_the_same_content_is_captioned_once(world: World) -> None:
    """Also while the first caption is under way, and from another batch later."""
    gate = asyncio.Event()
    world.models.meanwhile = lambda plan: gate.wait()
    runs = [asyncio.create_task(world.run(lease_of()))]
    await eventually(lambda: world.models.num_captioning)
    runs.append(asyncio.create_task(world.run(lease_of(job_id="another", epoch=2))))
    await eventually(lambda: world.models.num_sampled == 2)
    gate.set()
    first, second = await asyncio.gather(*runs)
    assert world.models.num_captions == 1 and first.content_key == second.content_key
    (made, made_by), (taken, taken_by) = read_result(first.result), read_result(second.result)
    assert made == taken and (made_by.reused, taken_by.reused, taken_by.runs) == (False, True, 2)
    assert second.tallies == {"reused": 1}
    other = World()
    other.queue.find_result = _found(first)  # type: ignore[method-assign]
    assert read_result((await other.run(lease_of())).result)[1].reused and not other.models.num_captions


async def test_what_was_made_in_a_lost_lease_is_the_jobs_own(world: World) -> None:
    """As by a gateway that was frozen and has the job again: it is made once, counts, and was not taken over."""
    lost = await world.run(lease_of())
    again = await world.run(lease_of(epoch=2))
    (made, made_by), (kept, kept_by) = read_result(lost.result), read_result(again.result)
    assert world.models.num_captions == 1 and (made, replace(made_by, runs=2)) == (kept, kept_by)
    assert again.tallies == lost.tallies and again.tallies["tokens"] == 3 and not kept_by.reused


@pytest.mark.parametrize("share", [False, True])
async def test_results_are_taken_over_within_an_owner_unless_all_share_theirs(share: bool) -> None:
    """Or one could learn what others asked about which video, and when. A receipt names no other job or process."""
    world = World(replace(CONFIG, share_results=share))
    world.models.request_id = "secret-1"
    made = await world.run(lease_of(owner="a"))
    assert read_result(made.result)[0].request_id == "secret-1"
    again, others, nobodys = [await world.run(lease_of(job_id=f"of {owner}", owner=owner)) for owner in ("a", "b", "")]
    for outcome, is_reused in ((again, True), (others, share), (nobodys, share)):
        caption, receipt = read_result(outcome.result)
        assert receipt.reused == is_reused
        assert caption.request_id == ("" if is_reused else "secret-1")
    assert world.models.num_captions == (1 if share else 3)
    assert (made.content_key == others.content_key) == share


async def test_another_model_makes_another_result(world: World) -> None:
    first = await world.run(lease_of())
    world.models.target.model = ModelInfo(revision="r2", dtype="float32", tokens_per_frame=4, max_frames=64)
    second = await world.run(lease_of())
    assert first.content_key != second.content_key and world.models.num_captions == 2


@pytest.mark.parametrize("failure", [QueueUnavailable("gone"), DamagedRecord("WRONGTYPE")])
async def test_a_store_that_is_away_does_not_stop_captions(world: World, failure: Exception) -> None:
    """Nor one whose index of results is damaged."""

    async def away(content_key: str) -> str | None:
        raise failure

    world.queue.find_result = away  # type: ignore[method-assign]
    assert await world.text(lease_of())


# -- what went wrong, and whose fault that is -------------------------------------------------------------------------


async def test_a_job_of_another_release_is_left_to_others(world: World) -> None:
    for changes in ({"payload": '{"v":99}'}, {"options": '{"v":99}'}):
        with pytest.raises(RetryLater) as given_back:
            await world.run(lease_of(**changes))
        assert not given_back.value.counted and given_back.value.delay_s


@pytest.mark.parametrize("failure", [VersionMismatch("upgrade the target"), InvalidConfig("it knows no min_p")])
@pytest.mark.parametrize("num_fit", [0, 1], ids=["at first", "behind a wait"])
async def test_models_that_do_not_fit_are_not_the_items_fault(world: World, failure: Exception, num_fit: int) -> None:
    left, fits = num_fit, world.models.check

    async def unfit(plan: CaptionPlan, **options: Any) -> ModelInfo:
        nonlocal left
        left -= 1
        if left < 0:
            raise failure
        return await fits(plan, **options)

    world.models.check = unfit  # type: ignore[method-assign]
    with pytest.raises(RetryLater) as given_back:
        await world.run(lease_of())
    assert not given_back.value.counted and given_back.value.delay_s


async def test_what_a_gateway_lacks_is_not_the_items_fault(world: World) -> None:
    """One of the queue's others may have it: a draft, or a target that keeps texts to a structure."""
    with pytest.raises(RetryLater, match="needs a draft") as given_back:
        await world.run(lease_of(options=write_batch(BatchPayload("", {"method": "slipstream_tree"}))))
    assert not given_back.value.counted and given_back.value.delay_s

    async def lacking(plan: CaptionPlan) -> None:
        raise InvalidConfig("texts are kept to a structure by llguidance")

    world.models.meanwhile = lacking
    with pytest.raises(RetryLater, match="llguidance") as given_back:
        await world.run(lease_of())
    assert not given_back.value.counted and given_back.value.delay_s


async def test_a_name_in_use_is_not_the_items_fault(world: World) -> None:
    """Whoever knows the id of a job may open a session of the name of its next run."""

    async def squat(plan: CaptionPlan) -> None:
        raise SessionExists("session 'x-1' is open already")

    world.models.meanwhile = squat
    with pytest.raises(RetryLater, match="open already") as given_back:
        await world.run(lease_of())
    assert not given_back.value.counted


async def test_no_target_is_nobodys_fault(world: World) -> None:
    world.models.target.is_up = False
    with pytest.raises(ServiceUnavailable):
        await world.run(lease_of())
    assert not world.models.num_sampled


async def test_a_host_that_fails_is_counted_and_a_decoder_that_is_away_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may never come back; decoders do, and the worker gives their jobs back uncounted."""

    @contextlib.asynccontextmanager
    async def away(source: str, owner: str, **wanted: Any) -> AsyncIterator[BinaryIO]:
        raise ServiceUnavailable("fetching from videos.example failed")
        yield

    async def no_decoder(*args: Any, **options: Any) -> SampledVideo:
        raise ServiceUnavailable("no video decoder can be started now")

    with monkeypatch.context() as patched:
        patched.setattr(world.models, "open_source", away)
        with pytest.raises(RetryLater, match="fetching from") as given_back:
            await world.run(lease_of())
        assert given_back.value.counted
    monkeypatch.setattr(world.models, "sample", no_decoder)
    with pytest.raises(ServiceUnavailable, match="decoder"):
        await world.run(lease_of())


@pytest.mark.parametrize("survives", [False, True])
async def test_a_target_lost_within_a_caption(world: World, survives: bool) -> None:
    """It died, perhaps of this job; or only the session broke, which is counted, as a limit must end it some time."""

    async def lose(plan: CaptionPlan) -> None:
        world.models.target.is_up = survives
        raise ServiceUnavailable("the target is not reachable")

    world.models.meanwhile = lose
    with pytest.raises(RetryLater if survives else RunnerDied) as lost:
        await world.run(lease_of())
    assert not survives or cast(RetryLater, lost.value).counted


async def test_only_a_suspect_is_blamed_for_the_targets_death() -> None:
    for suspect_first in (True, False):
        world = World(replace(CONFIG, archive_slots=3))
        both = asyncio.Barrier(3)

        async def die(plan: CaptionPlan, world: World = world, both: asyncio.Barrier = both) -> None:
            await both.wait()
            world.models.target.is_up = False
            raise ServiceUnavailable("the target is not reachable")

        world.models.meanwhile = die
        leases = [lease_of("/suspect", is_suspect=True), lease_of("/near")]
        leases = [*(leases if suspect_first else leases[::-1]), lease_of("/far")]
        ends = await asyncio.gather(*map(world.run, leases), return_exceptions=True)
        for lease, end in zip(leases, ends, strict=True):
            if lease.is_suspect:
                assert isinstance(end, RunnerDied)
            else:
                assert isinstance(end, RetryLater) and not end.counted


async def test_a_caption_that_takes_too_long_is_counted() -> None:
    world = World(replace(CONFIG, request_timeout_s=0.05))
    world.models.meanwhile = lambda plan: asyncio.sleep(60)
    with pytest.raises(SlipstreamError, match=r"within this server's limit of 0\.05 s") as late:
        await world.run(lease_of())
    assert not isinstance(late.value, ServiceUnavailable), "that would be retried for ever"


def _found(outcome: Outcome) -> Any:
    async def find_result(content_key: str) -> str | None:
        return outcome.result if content_key == outcome.content_key else None

    return find_result
