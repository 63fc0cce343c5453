"""How one film is run, with frames and models that are made up: what is decoded when, what is kept, who is to blame."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from slipstream.archive.duplicates import SETS_KEPT
from slipstream.archive.intake import read_item
from slipstream.archive.messages import BatchItem, JobKind, Priority
from slipstream.archive.parts import PartLimits
from slipstream.archive.queue import JobState, KnownEntry, QueuePolicy
from slipstream.archive.records import BatchPayload, job_of, read_job
from slipstream.archive.worker import RetryLater, RunnerDied
from slipstream.captioning import film_captioner
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.film_captioner import DecodedSegment, Film, FilmCaptioner
from slipstream.captioning.plan import CaptionPlan, make_plan
from slipstream.errors import (
    LimitExceeded,
    ObjectChanged,
    ObjectUnavailable,
    Overloaded,
    ServiceUnavailable,
    SlipstreamError,
    UnreadableVideo,
)
from slipstream.messages import Caption, Segment
from slipstream.options import CaptionOptions
from slipstream.video.files import VideoFile
from slipstream.video.messages import SampledVideo
from tests.support.film_world import CONFIG, SEGMENTS, START_S, SUMMED_UP, TIMES, FakeCaptioner, World, long_film
from tests.support.processes import eventually

WHOLE = [f"text {number}" for number in range(SEGMENTS)]


async def test_every_segment_is_a_part_with_times_text_and_receipt() -> None:
    world = World()
    outcome = await world.ended(await world.submit())
    parts = await world.parts()
    assert outcome.state is JobState.DONE and await world.texts() == WHOLE
    assert [part.segment for part in parts] == [Segment(n, *times) for n, times in enumerate(TIMES)]
    assert all(part.receipt and part.receipt.video_sha256 == "ab" * 32 for part in parts)
    warnings = [part.caption.video.warnings for part in parts if part.caption]
    assert warnings == [("cut off",)] + [()] * (SEGMENTS - 1)
    assert world.progress == [f"segment {n}/{SEGMENTS}" for n in range(1, SEGMENTS + 1)]
    assert world.media.asked == [[0, 1], [2, 3], [4, 5], [6]] and world.models.most_running == 2
    tallies = (await world.queue.get_batch("batch")).tallies
    assert (tallies["segments"], tallies["tokens"]) == (SEGMENTS, 3 * SEGMENTS)
    (record,), _ = await world.queue.list_jobs("batch")
    job = job_of(record)
    assert (job.kind, job.parts_done, job.parts_total, job.error) == (JobKind.FILM, SEGMENTS, SEGMENTS, "")


@pytest.mark.parametrize(("options", "total"), [({"prompts": ["p", "q"]}, 2 * SEGMENTS), (SUMMED_UP, SEGMENTS + 1)])
async def test_where_parts_are_no_segments_they_are_told_as_parts(options: dict[str, Any], total: int) -> None:
    world = World()
    assert (await world.ended(await world.submit(**options))).state is JobState.DONE
    assert world.progress == [f"part {n}/{total}" for n in range(1, total + 1)]


@pytest.mark.parametrize("is_up", [True, False])
async def test_a_target_that_is_lost_costs_the_segments_that_it_had(is_up: bool) -> None:
    world = World()
    lease = await world.submit()

    def lose(number: int) -> None:
        if number == 4:
            world.models.is_up = is_up
            raise ServiceUnavailable("the session broke")

    world.models.at = lose
    with pytest.raises(RetryLater if is_up else RunnerDied):
        await world.runner.run(lease, world.progress.append)
    assert not world.media.num_open
    kept = [part.number for part in await world.parts()]
    assert set(kept) >= {0, 1, 2} and 4 not in kept
    assert await world.queue.retry(lease, "again", 0.0, counted=False)
    world.models.at, world.models.is_up, world.models.captioned = (lambda number: None), True, []
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert sorted(world.models.captioned) == [n for n in range(SEGMENTS) if n not in kept]
    assert await world.texts() == WHOLE


async def test_what_cannot_be_decoded_is_marked_and_the_rest_goes_on() -> None:
    world = World()
    world.media.torn, world.media.refused = {0, 3}, {4: LimitExceeded("it took too long")}
    assert (await world.ended(await world.submit())).state is JobState.DONE
    torn = "torn; cut off"  # what is to be said of the film stands with its first part
    assert await world.texts() == [torn, *WHOLE[1:3], "torn", "it took too long", *WHOLE[5:]]
    assert [part.segment and part.segment.error for part in await world.parts()][3:5] == ["torn", "it took too long"]
    assert world.media.asked == [[0, 1], [2, 3], [4, 5], [4], [5], [6]], "what fails together is tried apart"


@pytest.mark.parametrize("bad", [{9}, {0, 1, 2, 3}, set(range(16)) - {15}, set(range(16))])
async def test_of_segments_that_fail_together_the_sound_ones_are_found_in_few_tries(
    bad: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = FakeCaptioner()
    models.media.refused = {number: UnreadableVideo("the decoder crashed") for number in bad}
    films = FilmCaptioner(CONFIG, cast(GatewayCaptioner, models))
    plan = make_plan(CaptionOptions(segments="fixed:1s"), CONFIG)
    found = await films._sampled(plan, cast(VideoFile, None), [(n, n + 1.0) for n in range(16)])
    assert [number for number, video in enumerate(found) if not isinstance(video, SampledVideo)] == sorted(bad)
    assert len(models.media.asked) == {1: 9, 4: 11, 15: 31, 16: 31}[len(bad)]
    for video in found:
        if isinstance(video, SampledVideo):
            video.close()
    monkeypatch.setattr(film_captioner, "RETRY_S", -1.0)
    late = await films._sampled(plan, cast(VideoFile, None), [(n, n + 1.0) for n in range(16)])
    assert all(isinstance(error, UnreadableVideo) for error in late) and not models.media.num_open


async def test_a_film_of_which_nothing_can_be_decoded_fails_and_can_be_tried_again() -> None:
    world = World()
    world.media.torn = set(range(SEGMENTS))
    outcome = await world.ended(await world.submit())
    assert (outcome.state, outcome.error) == (JobState.FAILED, "torn") and not await world.parts()
    await world.queue.retry_dead("batch", frozenset({JobState.FAILED}))
    world.media.torn = set()
    assert (await world.ended(await world.take())).state is JobState.DONE and await world.texts() == WHOLE


@pytest.mark.parametrize("torn", [set(), {0, 1}])
async def test_of_a_film_that_is_written_to_nothing_is_kept_from_then_on(torn: set[int]) -> None:
    """So one that grows for hours is given up as what gets nowhere is."""
    world = World()
    lease = await world.submit()
    world.media.torn, world.media.at_cut = torn, world.media.overwrite
    with pytest.raises(ObjectChanged, match="changed while it was read"):
        await world.runner.run(lease, world.progress.append)
    assert not await world.parts()
    world.media.torn, world.media.at_cut = set(), lambda: None
    world.models.at = lambda number: world.media.overwrite() if number == 3 else None
    with pytest.raises(ObjectChanged):
        await world.runner.run(lease, world.progress.append)
    assert {part.number for part in await world.parts()} <= {0, 1, 2} and not world.media.num_open


async def test_another_target_in_the_middle_of_a_film_makes_all_of_it() -> None:
    world = World()
    lease = await world.submit()

    def replaced(number: int) -> None:
        world.models.model = replace(world.models.model, revision="r2" if number == 3 else world.models.model.revision)

    world.models.at = replaced
    with pytest.raises(RetryLater, match="the target is another one") as later:
        await world.runner.run(lease, world.progress.append)
    assert not later.value.counted and not world.media.num_open
    assert await world.queue.retry(lease, "again", 0.0, counted=False)
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert {part.receipt.target.revision for part in await world.parts() if part.receipt} == {"r2"}


@pytest.mark.parametrize(("last", "torn"), [(3, set()), (3, {0, 1}), (SEGMENTS - 1, set())])
async def test_a_gateway_that_ends_keeps_what_it_has_begun_and_begins_no_more(last: int, torn: set[int]) -> None:
    """So that no segment is made twice, however long the film is and however short the time to end."""
    world = long_film()
    world.media.torn = torn
    lease = await world.submit(**SUMMED_UP)

    def end(number: int) -> None:
        if number == last:
            world.stopping.set()

    world.models.at = end
    with pytest.raises(RetryLater, match="the gateway ends") as later:
        await world.runner.run(lease, world.progress.append)
    assert (later.value.counted, later.value.delay_s) == (False, 0.0) and not world.media.num_open
    begun = list(world.models.captioned)
    kept = [part.number for part in await world.parts() if part.caption]
    assert sorted(begun) == kept and last in kept and not world.models.summed_up
    assert await world.queue.retry(lease, "the gateway ends", 0.0, counted=False)
    world.stopping.clear()
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert sorted(world.models.captioned) == [number for number in range(SEGMENTS) if number not in torn]
    assert world.models.summed_up


@pytest.mark.parametrize("error", [ObjectUnavailable("HTTP 503"), Overloaded("no room for frames")])
async def test_what_keeps_segments_from_being_decoded_costs_none_that_has_begun(error: SlipstreamError) -> None:
    """Its frames are there."""
    world = World()
    world.media.torn, world.media.refused, world.models.lasts = {0}, {2: error}, asyncio.Event()
    lease = await world.submit()
    running = asyncio.create_task(world.runner.run(lease, world.progress.append))
    await eventually(lambda: [2, 3] in world.media.asked and world.models.captioned == [1])
    world.models.lasts.set()
    with pytest.raises((RetryLater, Overloaded), match=str(error)):
        await running
    assert await world.texts() == ["torn; cut off", "text 1"] and not world.media.num_open
    assert await world.queue.retry(lease, "again", 0.0)
    world.media.refused = {}
    assert (await world.ended(await world.take())).state is JobState.DONE
    assert sorted(world.models.captioned) == list(range(1, SEGMENTS)), "each once"


async def test_a_segment_that_gave_way_to_people_costs_none_that_is_served() -> None:
    world = World()
    lease, served = await world.submit(), asyncio.Event()

    async def caption(plan: CaptionPlan, video: SampledVideo, *given: Any, **facts: Any) -> Caption:
        number = int(video.frames[0, 0, 0, 0])
        world.models.captioned.append(number)
        if number == 1:
            raise Overloaded("captions that people wait for fill the queue")
        await served.wait()
        return Caption(f"text {number}", 3, None)

    world.models.caption = caption  # type: ignore[method-assign]
    running = asyncio.create_task(world.runner.run(lease, world.progress.append))
    await eventually(lambda: 1 in world.models.captioned)
    served.set()
    with pytest.raises(Overloaded, match="fill the queue"):
        await running
    assert world.models.captioned == [0, 1] and await world.texts() == WHOLE[:1] and not world.media.num_open
    del world.models.caption  # type: ignore[method-assign]
    assert await world.queue.retry(lease, "again", 0.0, counted=False)
    assert (await world.ended(await world.take())).state is JobState.DONE and await world.texts() == WHOLE
    assert sorted(world.models.captioned) == sorted([*range(SEGMENTS), 1]), "each once but the one that gave way"


async def test_of_more_prompts_than_sets_stay_at_hand_each_reads_its_duplicates_once() -> None:
    prompts = [f"What is at {number}?" for number in range(SETS_KEPT + 2)]
    world, read = World(), Counter[str]()
    list_known = world.queue.list_known

    async def counted(key: str, after: str, limit: int) -> list[KnownEntry]:
        entries = await list_known(key, after, limit)
        read.update(key for _ in entries)
        return entries

    world.queue.list_known = counted  # type: ignore[method-assign]
    await world.ended(await world.submit(duplicates="share", prompts=prompts))
    assert len(read) == len(prompts)
    assert read == {key: len(entries) for key, entries in world.queue._known.items()}, "every entry once"


async def test_who_lost_the_lease_keeps_nothing() -> None:
    world = World()
    stale = await world.submit()
    world.models.lasts = asyncio.Event()
    late = asyncio.create_task(world.runner.run(stale, world.progress.append))
    await eventually(lambda: len(world.models.captioned) == 2)
    world.queue.policy = replace(world.queue.policy, lease_s=-1.0)
    for job in world.queue._jobs.values():
        job.lease_ends_s = 0.0
    (lease,) = await world.queue.take("other", 1)
    world.models.lasts.set()
    with pytest.raises(RetryLater, match="lease is lost"):
        await late
    assert not await world.parts() and not world.media.num_open and lease.epoch == stale.epoch + 1


async def test_what_a_film_keeps_is_bounded() -> None:
    world = World(QueuePolicy(parts=PartLimits(max_job_bytes=1500)))
    outcome = await world.ended(await world.submit())
    assert outcome.state is JobState.FAILED and "segments of this film take more than the 1500 bytes" in outcome.error
    world = World(QueuePolicy(parts=PartLimits(max_parts=6)))
    outcome = await world.ended(await world.submit())
    assert outcome.state is JobState.FAILED and "parts" in outcome.error and not world.models.captioned


async def test_a_cancelled_film_frees_its_frames() -> None:
    world = World()
    world.models.lasts = asyncio.Event()
    running = asyncio.create_task(world.runner.run(await world.submit(), world.progress.append))
    await eventually(lambda: len(world.models.captioned) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not world.media.num_open


def test_how_a_batch_cuts_its_films_is_nothing_to_its_documents() -> None:
    batch = BatchPayload("", {"segments": "fixed:1s", "max_new_tokens": 5})
    document = read_job(read_item(BatchItem("a", "/a.pdf"), 1, batch, Priority.NORMAL, CONFIG).payload)
    assert document.kind is JobKind.DOCUMENT and document.page_options(batch) == CaptionOptions(max_new_tokens=5)
    whole = read_item(BatchItem("a", "/a.mp4", {"segments": "none"}), 1, batch, Priority.NORMAL, CONFIG)
    assert read_job(whole.payload).kind is JobKind.VIDEO
    wrong = read_item(BatchItem("a", "/a.mp4", {"segments": "fixed:0s"}), 1, batch, Priority.NORMAL, CONFIG)
    assert "at least 0.001 s" in wrong.rejection


def decoding(models: FakeCaptioner, numbers: Sequence[int]) -> AsyncGenerator[DecodedSegment, None]:
    """Segments of these numbers of a film of seconds."""
    films = FilmCaptioner(CONFIG, cast(GatewayCaptioner, models))
    plan = make_plan(CaptionOptions(segments="fixed:1s"), CONFIG)
    film = Film(START_S, tuple(map(float, range(SEGMENTS + 1))))
    source = cast(VideoFile, type("Source", (), {"num_bytes": 12}))
    return films.decoded(plan, source, film, numbers)


async def test_frames_are_decoded_one_group_ahead_and_no_further() -> None:
    models = FakeCaptioner()
    decoded = decoding(models, [0, 1, 3, 4, 5, 6])
    first = await anext(decoded)
    await eventually(lambda: models.media.num_open == 4)
    assert models.media.asked == [[0, 1], [3, 4]] and first.segment == Segment(0, *TIMES[0])
    await decoded.aclose()
    assert models.media.num_open == 1 and first.video is not None
    first.video.close()
    assert not models.media.num_open


async def test_frames_that_find_no_room_beside_a_films_own_are_asked_for_once_that_is_free() -> None:
    models = FakeCaptioner()
    decoded = decoding(models, [0, 1, 2, 3, 4])
    models.media.refused = {2: Overloaded("no room for frames"), 4: Overloaded("no room for frames")}
    for number in range(4):
        if number == 2:
            await eventually(lambda: len(models.media.asked) == 2)
            del models.media.refused[2]
        one = await anext(decoded)
        assert one.segment.number == number and one.video is not None
        one.video.close()
    with pytest.raises(Overloaded):
        await anext(decoded)
    assert models.media.asked == [[0, 1], [2, 3], [2, 3], [4], [4]] and not models.media.num_open
