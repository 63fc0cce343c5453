"""Results that leave Redis and jobs that wait outside, on real stores: each job once, in its place, whoever dies."""

import asyncio
import contextlib
import gzip
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from slipstream.archive import feeder as feeder_module
from slipstream.archive import spill_queue as spill_queue_module
from slipstream.archive.compactor import Compactor
from slipstream.archive.feeder import Feeder
from slipstream.archive.queue import (
    BatchSpec,
    BatchState,
    DamagedRecord,
    JobSpec,
    JobState,
    Outcome,
    QueuePolicy,
    Retried,
    SubmitOutcome,
    UnknownBatch,
)
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.results_folder import MARKER, ResultDiffers, ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from slipstream.errors import InvalidConfig, ObjectNotFound
from tests.archive.spilled import NAMES, Spill, files_in, lines_of
from tests.archive.worlds import DONE, POLICY, specs
from tests.support.mortal import Killed, Life, MortalFolder, MortalQueue
from tests.support.object_store import object_server


async def test_each_job_is_in_its_place_wherever_it_lies(spill: Spill, tmp_path: Path) -> None:
    assert await spill.fill(*NAMES) == {SubmitOutcome.ADDED: 150}
    assert await spill.fill(*NAMES) == {SubmitOutcome.KNOWN: 150}
    assert (await spill.queue.depth()).queued == 150
    assert [job.custom_id for job in await spill.list()] == NAMES
    assert len([key for key in await spill.keys() if key.startswith("j:")]) == 100, "the rest waits outside"
    await spill.work(until=80)
    assert [job.custom_id for job in await spill.list()] == NAMES
    assert await spill.state() is BatchState.IN_PROGRESS
    await spill.work()
    jobs = await spill.list()
    assert [job.custom_id for job in jobs] == NAMES and all(job.result == DONE.result for job in jobs)
    batch = await spill.queue.get_batch("batch")
    assert (batch.state, batch.counts[JobState.DONE], batch.tallies) == (BatchState.COMPLETED, 150, {"tokens": 150.0})
    assert not [key for key in await spill.keys() if key.startswith(("j:", "r:", "s:"))]
    assert Counter(line["custom_id"] for line in lines_of(tmp_path)) == Counter(NAMES), "each in exactly one file"
    assert await spill.fill(*NAMES, "new") == {SubmitOutcome.KNOWN: 150, SubmitOutcome.ADDED: 1}
    other = [replace(job, payload="{}") for job in specs("n3", "n149")]
    assert await spill.queue.submit("batch", other) == [SubmitOutcome.CONFLICT] * 2
    assert [job.custom_id for job in await spill.list()] == [*NAMES, "new"]


async def test_two_compactors_and_two_feeders_at_once_do_no_harm(spill: Spill, tmp_path: Path) -> None:
    """Their elections are taken away again and again, so both believe that it is theirs."""
    other = Spill(spill.url, f"file://{tmp_path}", spill.name)
    try:
        await spill.fill(*NAMES)
        async with Redis.from_url(spill.url) as redis:
            while await spill.state() is not BatchState.COMPLETED or "b:batch:ended" in await spill.keys():
                await _both_work(spill, other, redis)
        assert Counter(line["custom_id"] for line in lines_of(tmp_path)) == Counter(NAMES)
        assert [job.custom_id for job in await spill.list()] == NAMES
    finally:
        await other.queue.close()


async def test_a_feeder_that_comes_late_feeds_nothing(spill: Spill) -> None:
    await spill.fill(*NAMES)
    for lease in await spill.queue.take("w", 200):
        await spill.queue.finish(lease, DONE)
    while await spill.compactor.step():
        pass
    due = await spill.queue.next_chunk("a")
    assert due is not None
    jobs = due.chunk.jobs_in(await spill.folder.read(due.chunk.name))
    assert await spill.queue.feed(due, due.fed, jobs[:2])
    assert not await spill.queue.feed(due, due.fed, jobs[:2]), "another has fed them"
    async with Redis.from_url(spill.url) as redis:
        await redis.delete(f"{{{spill.name}}}:feeder")
    await spill.work()
    assert [(job.custom_id, job.state) for job in await spill.list()] == [(name, JobState.DONE) for name in NAMES]


async def test_jobs_of_one_object_that_come_in_by_two_calls_are_each_there_once(spill: Spill) -> None:
    """The same items are handed in twice at the same time, and there is room for some at first, and then for all: the
    batch knows the object twice, for other jobs each."""
    names = NAMES[:60]
    await spill.fill("first")
    await spill.queue.open_batch(BatchSpec("filler", "other"))
    await spill.queue.submit("filler", [JobSpec("large", "x" * spill.policy.queue_bytes)])
    both_are_there, written = asyncio.Barrier(2), asyncio.Event()
    put = spill.folder.put

    async def put_together(name: str, data: bytes) -> bytes | None:
        await both_are_there.wait()
        return await put(name, data)

    async def hand_in(most: int, after: asyncio.Event | None = None) -> Counter[SubmitOutcome]:
        queue = SpillQueue(spill.url, spill.folder, spill.name, spill.policy)
        try:
            ask = queue._ask

            async def ask_in_order(script: str, *args: Any) -> Any:
                if script == "add_chunk" and after:
                    await after.wait()
                answer = await ask(script, *args)
                if script == "add_chunk":
                    written.set()
                return answer

            queue._ask = ask_in_order  # type: ignore[method-assign]
            return Counter(await queue.submit("batch", specs(*names), most))
        finally:
            await queue.close()

    spill.folder.put = put_together  # type: ignore[method-assign]
    answers = await asyncio.gather(hand_in(21), hand_in(100, written))
    spill.folder.put = put  # type: ignore[method-assign]
    assert answers == [
        {SubmitOutcome.ADDED: 20, SubmitOutcome.OVER_QUOTA: 40},
        {SubmitOutcome.KNOWN: 20, SubmitOutcome.ADDED: 40},
    ]
    await spill.queue.cancel_batch("filler")
    for _ in range(4):
        await spill.compactor.step()
        await spill.feeder.step()
    await spill.queue.seal_batch("batch")
    for lease in await spill.queue.take("w", 100):
        assert await spill.queue.finish(lease, DONE)
    assert [job.custom_id for job in await spill.list()] == ["first", *names]
    batch = await spill.queue.get_batch("batch")
    assert (batch.state, batch.counts[JobState.DONE]) == (BatchState.COMPLETED, 61)


async def _both_work(spill: Spill, other: Spill, redis: Any) -> None:
    for lease in await spill.queue.take("w", 20):
        await spill.queue.finish(lease, DONE)
    offices = [f"{{{spill.name}}}:{office}" for office in ("compactor", "feeder")]
    await redis.delete(*offices)
    steps = spill.compactor.step(), other.feeder.step(), spill.feeder.step()
    plan = await other.queue.plan_file("other", spill.file_bytes, 0.0)
    await redis.delete(*offices)
    await asyncio.gather(*steps)
    if plan and plan.jobs:  # the other had begun, and goes on with what was done meanwhile
        rows = [job async for job in _rows(other, plan)]
        assert len(rows) <= len(plan.jobs)
        assert not await other.queue.commit_file(plan, (await other.queue._files("batch"))[-1])


async def _rows(spill: Spill, plan: Any) -> AsyncIterator[Any]:
    with contextlib.suppress(DamagedRecord):  # their records have gone
        for job in await spill.queue.finished("other", plan, 0, 100):
            yield job


async def test_a_file_that_holds_other_jobs_is_named_and_nothing_is_lost(
    spill: Spill, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await spill.fill(*NAMES[:20])
    await spill.queue.open_batch(BatchSpec("neighbour", "me"))
    await spill.queue.submit("neighbour", specs("x"))
    for lease in await spill.queue.take("w", 21):
        await spill.queue.finish(lease, DONE)
    plan = await spill.queue.plan_file(spill.compactor._me, spill.file_bytes, 0.0)
    assert plan is not None and plan.batch_id == "batch"
    file = await spill.compactor._write(plan)
    path = tmp_path / f"{file.name}.jsonl.gz"
    right = path.read_bytes()
    for wrong in (gzip.compress(b"{}\n"), right[:-9], b"", gzip.compress(gzip.decompress(right) * 2)):
        path.write_bytes(wrong)
        with pytest.raises(ResultDiffers, match=path.name):
            await spill.compactor._write(plan)
    table = tmp_path / f"{file.name}.parquet"
    path.write_bytes(gzip.compress(gzip.decompress(right), 1))
    as_there = await spill.compactor._write(plan)
    assert as_there.digest == file.digest and as_there.num_bytes == path.stat().st_size, "the same, packed otherwise"
    kept = table.read_bytes()
    table.write_bytes(b"x")
    while await spill.compactor.step():
        pass
    assert table.name in capsys.readouterr().out
    assert table.read_bytes() == b"x" and len(await spill.list()) == 20
    neighbour = [key for key in await spill.keys() if key.startswith("b:neighbour:")]
    assert "b:neighbour:files" in neighbour, "the others went on"
    table.write_bytes(kept)
    async with Redis.from_url(spill.url) as redis:
        await redis.hdel(f"{{{spill.name}}}:b:batch", "blocked")
    while await spill.compactor.step():
        pass
    assert [job.custom_id for job in await spill.list()] == NAMES[:20]
    assert not [key for key in await spill.keys() if key.startswith("j:")]


@settings(max_examples=8)
@given(kills=st.lists(st.tuples(st.integers(0, 25), st.booleans()), min_size=4, max_size=12), order=st.randoms())
def test_whoever_is_killed_each_job_is_done_and_written_once(
    kills: list[tuple[int, bool]], order: Any, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("results")

    async def run() -> None:
        spill = Spill(redis_url, f"file://{folder}", folder.name, room=60_000)
        life = Life()
        address = MortalFolder(f"file://{folder}", life)
        queue = MortalQueue(redis_url, address, folder.name, spill.policy, life)
        patch = pytest.MonkeyPatch()
        patch.setattr(spill_queue_module, "CHUNK_JOBS", 8)
        patch.setattr(spill_queue_module, "OUTSIDE_JOBS", 15)
        try:
            for steps, is_after in kills:
                life.left, life.is_after = steps, is_after
                with contextlib.suppress(Killed):
                    await queue.open_batch(BatchSpec("batch", "me"))
                    await queue.submit("batch", specs(*NAMES[:60]))
                    for lease in await spill.queue.take("w", order.randint(0, 20)):
                        await spill.queue.finish(lease, DONE)
                    mortal = Compactor(queue, address, 5000, 0.0), Feeder(queue, address)
                    for _ in range(3):
                        await mortal[order.randint(0, 1)].step()
                async with Redis.from_url(redis_url) as redis:
                    await redis.delete(f"{{{folder.name}}}:compactor", f"{{{folder.name}}}:feeder")
            await spill.fill(*NAMES[:60])
            await spill.work()
            assert [job.custom_id for job in await spill.list()] == NAMES[:60]
            assert files_in(folder, "chunk-*"), "some waited outside"
            assert Counter(line["custom_id"] for line in lines_of(folder)) == Counter(NAMES[:60])
            assert not [key for key in await spill.keys() if key.startswith("j:")]
        finally:
            patch.undo()
            await queue.close()
            await spill.queue.close()

    asyncio.run(run())


async def test_a_cancelled_batch_ends_and_its_jobs_are_told(spill: Spill) -> None:
    await spill.fill(*NAMES)
    (lease,) = await spill.queue.take("w", 1)
    await spill.queue.finish(lease, DONE)
    await spill.queue.cancel_batch("batch")
    assert await spill.state() is BatchState.CANCELLING, "some wait outside"
    assert not (await spill.queue.get_batch("batch")).ended_s
    assert await spill.queue.retry_dead("batch") == Retried(0, SubmitOutcome.OUTSIDE), "they would come to life"
    await spill.work()
    assert await spill.state() is BatchState.CANCELLED
    assert [job.state for job in await spill.list()] == [JobState.DONE] + [JobState.CANCELLED] * 149
    assert len(await spill.list(states=frozenset({JobState.DONE}))) == 1


async def test_jobs_that_failed_stay_and_are_tried_again(spill: Spill) -> None:
    why = {"rejection": "too large", "rejection_code": "OUT_OF_RANGE"}
    jobs = [JobSpec(name, "{}", **(why if number % 10 == 9 else {})) for number, name in enumerate(NAMES)]
    await spill.queue.open_batch(BatchSpec("batch", "me"))
    await spill.queue.submit("batch", jobs)
    await spill.queue.seal_batch("batch")
    await spill.work()
    assert await spill.state() is BatchState.COMPLETED
    failed = await spill.list(states=frozenset({JobState.FAILED, JobState.DEAD}))
    assert [job.custom_id for job in failed] == NAMES[9::10] and {job.error_code for job in failed} == {"OUT_OF_RANGE"}
    assert (await spill.queue.retry_dead("batch", frozenset({JobState.FAILED}))).num_jobs == 15
    await spill.work()
    assert [(job.custom_id, job.state) for job in await spill.list()] == [(name, JobState.DONE) for name in NAMES]


async def test_a_batch_of_which_too_many_fail_is_fed_no_more(redis_url: str, tmp_path: Path) -> None:
    spill = Spill(redis_url, f"file://{tmp_path}", "failing", room=100_000)
    try:
        await spill.fill(*(f"n{number}" for number in range(400)))
        while leases := await spill.queue.take("w", 20):
            for lease in leases:
                await spill.queue.finish(lease, Outcome(JobState.FAILED, error="no such file"))
            await spill.feeder.step()
        counts = (await spill.queue.get_batch("batch")).counts
        assert counts[JobState.FAILED] + counts[JobState.QUEUED] == 400 and 0 < counts[JobState.FAILED] < 250
        await spill.queue.retry_dead("batch", frozenset({JobState.FAILED}))
        await spill.work()
        assert (await spill.queue.get_batch("batch")).counts[JobState.DONE] == 400
    finally:
        await spill.queue.close()


@pytest.mark.parametrize("is_on", [True, False])
async def test_a_batch_goes_after_its_retention_and_its_files_stay(spill: Spill, tmp_path: Path, is_on: bool) -> None:
    """Also where all gateways but the one that writes files are without `--results-to` again."""
    sweeper = spill.queue if is_on else RedisQueue(spill.url, spill.name, replace(POLICY, max_backlog=10_000))
    await spill.fill(*NAMES)
    await spill.work(until=150)
    async with Redis.from_url(spill.url) as redis:
        expire = redis.zadd(f"{{{spill.name}}}:expiry", {"batch": 1})
        await expire
        await sweeper.sweep()
        assert len(await spill.list()) == 150, "what is not written yet is kept"
        await spill.work()
        await redis.zadd(f"{{{spill.name}}}:expiry", {"batch": 1})
        while await sweeper.sweep():
            pass
    if not is_on:
        await sweeper.close()
    assert not [key for key in await spill.keys() if key.startswith(("b:", "j:"))]
    assert len(lines_of(tmp_path)) == 150
    await spill.fill(*NAMES)
    await spill.work()
    assert len(await spill.list()) == 150, "handed in again it is a batch like any other"


async def test_small_batches_go_ahead_of_what_waits_outside(spill: Spill) -> None:
    await spill.queue.open_batch(BatchSpec("large", "me"))
    await spill.queue.submit("large", specs(*(f"n{number}" for number in range(45))))
    await spill.fill("a")
    assert len(await spill.queue.take("w", 100)) == 46


async def test_what_somebody_removed_is_named(spill: Spill, tmp_path: Path) -> None:
    await spill.fill(*NAMES)
    for chunk in files_in(tmp_path, "chunk-*"):
        kept = chunk.read_bytes()
        chunk.write_bytes(b"")
        with pytest.raises(DamagedRecord, match=chunk.name):
            await spill.list()
        chunk.write_bytes(kept)
    await spill.work()
    for file in files_in(tmp_path, "part-*.jsonl.gz"):
        file.unlink()
    fresh = Spill(spill.url, f"file://{tmp_path}", spill.name)
    with pytest.raises(ObjectNotFound, match="part-batch-"):
        await fresh.list()
    await fresh.queue.close()


@pytest.mark.parametrize("digits", [4, 12, 20, 31])
async def test_the_beginning_of_a_jobs_id_is_no_job(spill: Spill, digits: int) -> None:
    """Callers name jobs as they like; that is no damage of the store."""
    await spill.fill("a")
    await spill.work()
    (job,) = await spill.list()
    assert await spill.queue.list_parts("batch", job.job_id) == ([], 0)
    with pytest.raises(UnknownBatch):
        await spill.queue.list_parts("batch", job.job_id[:digits])


async def test_a_gateway_without_the_folder_says_what_is_missing(spill: Spill) -> None:
    await spill.fill(*NAMES[:30])
    await spill.work()
    plain = RedisQueue(spill.url, spill.name, POLICY)
    with pytest.raises(InvalidConfig, match="--results-to"):
        await plain.list_jobs("batch")
    assert await plain.list_jobs("batch", frozenset({JobState.FAILED})) == ([], 0)
    await plain.close()


async def test_the_folder_is_ours_and_can_be_written(tmp_path: Path) -> None:
    folder = ResultsFolder(f"file://{tmp_path}")
    await folder.check()
    await folder.check()
    (tmp_path / MARKER).write_text("{}")
    with pytest.raises(InvalidConfig, match="another folder"):
        await folder.check()
    for url in ("", "/tmp/x", "ftp://x/y", "s3://"):
        with pytest.raises(InvalidConfig, match="--results-to"):
            ResultsFolder(url)
    with pytest.raises(InvalidConfig, match="--queue-bytes"):
        SpillQueue("redis://localhost", folder, policy=QueuePolicy())


@pytest_asyncio.fixture
async def bucket(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    async with object_server() as served:
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        yield "s3://films/results"


async def test_results_in_a_bucket(bucket: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "FED_JOBS", 7)
    spill = Spill(redis_url, bucket, "bucket")
    try:
        await spill.folder.check()
        await spill.folder.check()
        await spill.fill(*NAMES)
        assert await spill.folder.put(MARKER, b"other") is not None, "If-None-Match"
        await spill.work()
        assert [job.custom_id for job in await spill.list()] == NAMES
    finally:
        await spill.queue.close()
