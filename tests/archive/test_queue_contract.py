"""What both queues promise, one promise a test."""

from collections import Counter
from dataclasses import replace

import pytest

from slipstream.archive.queue import (
    BatchSpec,
    BatchState,
    BeatAnswer,
    JobState,
    Outcome,
    Priority,
    QueueDepth,
    Retried,
    SubmitOutcome,
    UnknownBatch,
)
from slipstream.errors import InvalidRequest
from tests.archive.worlds import DONE, POLICY, World, fill, specs, take_one

LEASE_S = POLICY.lease_s


async def test_submit_is_idempotent_and_tells_conflicts(world: World) -> None:
    await world.queue.open_batch(BatchSpec("batch"))
    assert await world.queue.submit("batch", specs("a", "b", "a")) == ["added", "added", "known"]
    changed = replace(specs("b")[0], payload="{}")
    assert await world.queue.submit("batch", [changed, *specs("c")]) == [SubmitOutcome.CONFLICT, SubmitOutcome.ADDED]
    assert (await world.jobs())["b"].payload == '{"source": "b"}'
    assert (await world.queue.get_batch("batch")).total == 3


async def test_a_jobs_trace_comes_with_every_lease_and_is_that_of_its_first_hand_in(world: World) -> None:
    await world.queue.open_batch(BatchSpec("b"))
    for trace in ("00-first", "00-second"):
        await world.queue.submit("b", [*specs("a", traceparent=trace), *specs("untraced")])
    taken = await world.queue.take("worker", 2)
    assert {lease.custom_id: lease.traceparent for lease in taken} == {"a": "00-first", "untraced": ""}
    assert [await world.queue.retry(lease, "later", 0, counted=False) for lease in taken] == [True, True]
    assert {lease.traceparent for lease in await world.queue.take("other", 2)} == {"00-first", ""}


async def test_batches_are_found_again_by_their_owner_with_the_same_options(world: World) -> None:
    spec = BatchSpec("batch", owner="me", metadata={"k": "ü"}, options="{}")
    await world.queue.open_batch(spec)
    await world.queue.open_batch(spec)
    with pytest.raises(InvalidRequest, match="other options"):
        await world.queue.open_batch(replace(spec, options="[]"))
    with pytest.raises(UnknownBatch):
        await world.queue.open_batch(replace(spec, owner="you"))
    with pytest.raises(UnknownBatch):
        await world.queue.get_batch("batch", owner="you")
    for call in (world.queue.submit("no", specs("a")), world.queue.seal_batch("no"), world.queue.list_jobs("no")):
        with pytest.raises(UnknownBatch):
            await call
    for call in (world.queue.cancel_batch("no"), world.queue.retry_dead("no")):
        with pytest.raises(UnknownBatch):
            await call
    await world.queue.open_batch(BatchSpec("other", owner="you"))
    assert [batch.metadata for batch in await world.queue.list_batches("me")] == [{"k": "ü"}]
    assert {batch.batch_id for batch in await world.queue.list_batches()} == {"batch", "other"}


async def test_a_job_is_taken_once_and_its_result_kept(world: World) -> None:
    await fill(world, "a")
    lease = await take_one(world)
    assert await world.queue.take("other", 5) == []
    assert (lease.custom_id, lease.payload, lease.options) == ("a", '{"source": "a"}', '{"prompt": "?"}')
    outcome = replace(DONE, content_key="content", tallies={"tokens": 5, "video_s": 1.5})
    assert await world.queue.finish(lease, outcome)
    assert await world.queue.finish(lease, outcome), "repeated by its holder"
    batch = await world.queue.get_batch("batch", "me")
    assert (batch.state, batch.counts[JobState.DONE], batch.tallies) == (
        BatchState.COMPLETED,
        1,
        {"tokens": 5.0, "video_s": 1.5},
    )
    assert batch.ended_s >= batch.created_s > 0
    job = (await world.jobs())["a"]
    assert (job.state, job.result, job.worker, job.epoch) == (JobState.DONE, DONE.result, "w", 1)
    assert job.ended_s >= job.started_s >= job.created_s > 0
    assert await world.queue.find_result("content") == DONE.result
    assert await world.queue.find_result("other") is None


async def test_batch_states(world: World) -> None:
    async def state() -> BatchState:
        return (await world.queue.get_batch("batch")).state

    await world.queue.open_batch(BatchSpec("batch"))
    assert await state() is BatchState.OPEN
    await world.queue.submit("batch", specs("a"))
    await world.queue.seal_batch("batch")
    assert await state() is BatchState.IN_PROGRESS
    lease = await take_one(world)
    assert await world.queue.cancel_batch("batch") == 1
    assert await state() is BatchState.CANCELLING
    assert await world.queue.beat([lease], {}) == [BeatAnswer.CANCEL]
    assert await world.queue.finish(lease, Outcome(JobState.CANCELLED))
    assert await state() is BatchState.CANCELLED
    assert await world.queue.submit("batch", specs("late")) == [SubmitOutcome.ADDED]
    assert (await world.jobs())["late"].state is JobState.CANCELLED
    assert (await world.queue.retry_dead("batch", frozenset({JobState.CANCELLED}))).num_jobs == 2
    assert await state() is BatchState.OPEN


async def test_a_batch_tells_why_a_job_of_it_was_given_back_last(world: World) -> None:
    await fill(world, "a", "b")
    assert (await world.queue.get_batch("batch")).obstacle == ""
    first, second = await world.queue.take("w", 2)
    assert await world.queue.retry(first, "no draft here", 30.0, counted=False)
    told = await world.queue.get_batch("batch")
    assert (told.obstacle, told.obstacle_s >= told.created_s > 0) == ("no draft here", True)
    assert await world.queue.crash(second, "the target died")
    assert (await world.queue.get_batch("batch")).obstacle == "the target died"
    (again,) = await world.queue.take("w", 1)
    assert await world.queue.retry(again, "the worker stopped", 0.0, counted=False)
    assert (await world.queue.get_batch("batch")).obstacle == "the target died", "any other may take it at once"
    assert {job.error for job in (await world.jobs()).values()} == {"no draft here", "the worker stopped"}
    (again,) = await world.queue.take("w", 1)
    assert await world.queue.finish(again, Outcome(JobState.FAILED, error="no such file"))
    assert await world.queue.retry_dead("batch", frozenset({JobState.FAILED})) == Retried(1)
    told = await world.queue.get_batch("batch")
    assert (told.obstacle, told.obstacle_s) == ("", 0.0), "that was before somebody looked after it"


async def test_what_kept_jobs_waiting_is_told_until_one_is_done(world: World) -> None:
    await fill(world, "a", "b", "c")
    first, second, third = await world.queue.take("w", 3)
    assert await world.queue.retry(first, "the target is away", 30.0, counted=False)
    assert await world.queue.finish(second, Outcome(JobState.FAILED, error="no such file"))
    assert (await world.queue.get_batch("batch")).obstacle == "the target is away"
    assert await world.queue.finish(third, DONE)
    told = await world.queue.get_batch("batch")
    assert (told.obstacle, told.obstacle_s) == ("", 0.0)


async def test_a_live_lease_is_kept_whatever_the_jobs_length(world: World) -> None:
    """Named by the mutation guard: no renewal."""
    await fill(world, "a")
    lease = await take_one(world)
    for _ in range(5):
        await world.elapse(0.7 * LEASE_S)
        assert await world.queue.beat([lease], {lease.job_id: "decode 3/8"}) == [BeatAnswer.KEEP]
        assert await world.queue.take("other", 5) == []
    assert (await world.jobs())["a"].progress == "decode 3/8"


async def test_a_lost_job_runs_again_and_the_stale_holder_is_refused(world: World) -> None:
    """Named by the mutation guard: no owner check."""
    await fill(world, "a")
    stale = await take_one(world, "w1")
    await world.lose(stale)
    lease = await take_one(world, "w2")
    assert (lease.epoch, lease.crashes, lease.is_suspect) == (2, 1, False)
    assert await world.queue.beat([stale], {}) == [BeatAnswer.LOST]
    assert not await world.queue.finish(stale, replace(DONE, result="stale"))
    assert not await world.queue.retry(stale, "stale", 0.0)
    assert not await world.queue.crash(stale, "stale")
    assert await world.queue.finish(lease, DONE)
    assert not await world.queue.finish(stale, replace(DONE, result="stale"))
    assert (await world.jobs())["a"].result == DONE.result


async def test_an_expired_lease_that_nobody_took_is_renewed(world: World) -> None:
    await fill(world, "a")
    lease = await take_one(world)
    await world.elapse(3 * LEASE_S)
    assert await world.queue.beat([lease], {}) == [BeatAnswer.KEEP]
    assert await world.queue.take("other", 5) == []


async def test_the_same_worker_gets_another_epoch(world: World) -> None:
    await fill(world, "a")
    stale = await take_one(world)
    await world.elapse(2 * LEASE_S)
    lease = await take_one(world)
    assert (lease.worker, lease.epoch) == (stale.worker, 2)
    assert not await world.queue.finish(stale, DONE)
    assert await world.queue.finish(lease, DONE)


async def test_the_token_is_worker_and_epoch(world: World) -> None:
    """A store that lost the end of its log may give an epoch out twice."""
    await fill(world, "a")
    lease = await take_one(world)
    impostor = replace(lease, worker="other")
    assert await world.queue.beat([impostor], {}) == [BeatAnswer.LOST]
    assert not await world.queue.finish(impostor, DONE)
    assert await world.queue.finish(lease, DONE)


async def test_expired_jobs_come_before_all_others(world: World) -> None:
    """Named by the mutation guard: no sweep of expired leases."""
    await fill(world, "a", "b", "c")
    lost = await take_one(world)
    await world.lose(lost)
    assert [lease.custom_id for lease in await world.queue.take("other", 2)] == ["a", "b"]


async def test_retries_wait_and_are_counted(world: World) -> None:
    await fill(world, "a")
    for attempt in range(POLICY.max_attempts):
        lease = await take_one(world)
        assert lease.attempts == attempt
        assert await world.queue.retry(lease, f"failure {attempt}", 8.0)
        assert await world.queue.take("w", 5) == []
        await world.elapse(9.0)
    job = (await world.jobs())["a"]
    assert (job.state, job.error, job.error_code) == (JobState.DEAD, "failure 2", "ABORTED")
    assert (await world.queue.depth()).dead == 1
    assert (await world.queue.retry_dead("batch")).num_jobs == 1
    assert (await world.queue.depth()).dead == 0
    lease = await take_one(world)
    assert (lease.attempts, lease.crashes) == (0, 0)


async def test_uncounted_retries_are_not_limited(world: World) -> None:
    await fill(world, "a")
    for _ in range(2 * POLICY.max_attempts):
        lease = await take_one(world)
        assert await world.queue.retry(lease, "drained", 0.0, counted=False)
        assert await world.queue.retry(lease, "drained", 0.0, counted=False), "repeated by its holder"
    assert (await take_one(world)).attempts == 0


async def test_failed_jobs_do_not_fail_the_batch(world: World) -> None:
    await world.queue.open_batch(BatchSpec("batch"))
    large = specs("c", rejection="too large", rejection_code="OUT_OF_RANGE")
    await world.queue.submit("batch", [*specs("a"), *specs("b", rejection="max_tokens must be positive"), *large])
    await world.queue.seal_batch("batch")
    assert await world.queue.finish(await take_one(world), Outcome(JobState.FAILED, error="no", error_code="NOT_FOUND"))
    batch = await world.queue.get_batch("batch")
    assert (batch.state, batch.counts[JobState.FAILED]) == (BatchState.COMPLETED, 3)
    assert [(job.error, job.error_code) for job in (await world.jobs()).values()] == [
        ("no", "NOT_FOUND"),
        ("max_tokens must be positive", "INVALID_ARGUMENT"),
        ("too large", "OUT_OF_RANGE"),
    ]
    assert (await world.queue.retry_dead("batch", frozenset({JobState.FAILED}))).num_jobs == 3
    assert len(await world.queue.take("w", 5)) == 3


async def test_priorities_are_weighted_and_starve_nobody(world: World) -> None:
    await world.queue.open_batch(BatchSpec("batch"))
    for priority in Priority:
        await world.queue.submit("batch", specs(*(f"{priority}-{i}" for i in range(30)), priority=priority))
    first = [lease.custom_id.split("-")[0] for lease in await world.queue.take("w", 20)]
    assert Counter(first) == {"high": 12, "normal": 6, "low": 2}
    assert len(await world.queue.take("w", 100)) == 70


async def test_the_backlog_is_bounded(world: World) -> None:
    world.queue.policy = replace(POLICY, max_backlog=1000)
    await world.queue.open_batch(BatchSpec("batch"))
    answers = await world.queue.submit("batch", specs(*map(str, range(1001))))
    assert Counter(answers) == {SubmitOutcome.ADDED: 1000, SubmitOutcome.FULL: 1}
    await take_one(world)
    assert await world.queue.submit("batch", specs("999", "1000")) == [SubmitOutcome.KNOWN, SubmitOutcome.ADDED]


async def test_pages(world: World) -> None:
    names = [f"job{i:04}" for i in range(700)]
    await fill(world, *names)
    for lease in await world.queue.take("w", 3):
        await world.queue.finish(lease, DONE)
    seen, after = [], 0
    while True:
        page, after = await world.queue.list_jobs("batch", after=after, limit=150)
        seen += [job.custom_id for job in page]
        if after == 0:
            break
    assert seen == names
    page, _ = await world.queue.list_jobs("batch", frozenset({JobState.DONE}), limit=2)
    assert [job.custom_id for job in page] == names[:2]


async def test_cancel_ends_queued_and_delayed_jobs_at_once(world: World) -> None:
    await fill(world, *map(str, range(600)))
    running, delayed, drained = await world.queue.take("w", 3)
    await world.queue.retry(delayed, "later", 50.0)
    assert await world.queue.cancel_batch("batch") == 600
    assert await world.queue.retry(drained, "drained", 0.0)
    counts = (await world.queue.get_batch("batch")).counts
    assert (counts[JobState.CANCELLED], counts[JobState.RUNNING]) == (599, 1)
    await world.elapse(LEASE_S + 60)
    assert await world.queue.take("w", 5) == []
    assert (await world.jobs())[running.custom_id].state is JobState.CANCELLED
    assert await world.queue.depth() == QueueDepth(0, 0, 0, 0, 0)
    assert (await world.queue.retry_dead("batch", frozenset({JobState.CANCELLED}))).num_jobs == 600
    taken = [lease.custom_id for _ in range(4) for lease in await world.queue.take("w", 600)]
    assert len(taken) == len(set(taken)) == 600


async def test_a_batch_that_is_completed_cannot_be_cancelled(world: World) -> None:
    """It takes more jobs, as before; one that is still handed in is cancelled though nothing of it waits."""
    await fill(world, "a")
    assert await world.queue.finish(await take_one(world), Outcome(JobState.DONE, "text"))
    assert await world.queue.cancel_batch("batch") == 0
    assert (await world.queue.get_batch("batch")).state is BatchState.COMPLETED
    await fill(world, "b")
    assert (await world.jobs())["b"].state is JobState.QUEUED
    assert await world.queue.finish(await take_one(world), Outcome(JobState.DONE, "text"))
    await world.queue.submit("batch", specs("c"))
    assert await world.queue.finish(await take_one(world), Outcome(JobState.DONE, "text"))
    await world.queue.cancel_batch("batch")
    assert (await world.queue.get_batch("batch")).state is BatchState.CANCELLED


async def test_a_retry_stops_where_there_is_no_room(world: World) -> None:
    await fill(world, "a", "b", "c", "d")
    failed = Outcome(JobState.FAILED, error="no", error_code="NOT_FOUND")
    for lease in await world.queue.take("w", 4):
        assert await world.queue.finish(lease, failed)
    states = frozenset({JobState.FAILED})
    assert await world.queue.retry_dead("batch", states, 1) == Retried(1, SubmitOutcome.OVER_QUOTA)
    assert await world.queue.retry_dead("batch", states, 1) == Retried(0, SubmitOutcome.OVER_QUOTA)
    assert await world.queue.retry_dead("batch", states, 3) == Retried(2, SubmitOutcome.OVER_QUOTA)
    assert await world.queue.retry_dead("batch", states, 4) == Retried(1)
    assert await world.queue.retry_dead("batch", states, 0) == Retried(0), "nothing is left that needed room"


async def test_a_job_waits_in_one_place_only(world: World) -> None:
    await fill(world, "a")
    await world.queue.cancel_batch("batch")
    await world.queue.retry_dead("batch", frozenset({JobState.CANCELLED}))
    if world.redis is not None:  # a gateway of release 0.2 that cancels leaves the entry
        await world.redis.xadd(f"{world.prefix}s:normal:me", {"job": (await world.jobs())["a"].job_id})
    assert await world.queue.retry(await take_one(world), "later", 50.0)
    assert await world.queue.take("w", 5) == []


async def test_retention(world: World) -> None:
    await fill(world, "a", "b")
    first, second = await world.queue.take("w", 2)
    await world.queue.finish(first, replace(DONE, content_key="kept"))
    await world.elapse(POLICY.retention_s + 1)
    assert await world.queue.sweep() == 0, "a job is left"
    await world.queue.finish(second, DONE)
    await world.elapse(POLICY.retention_s / 2)
    await world.queue.submit("batch", specs("c"))
    await world.elapse(POLICY.retention_s)
    assert await world.queue.sweep() == 0, "a job came"
    await world.queue.finish(await take_one(world), Outcome(JobState.FAILED))
    await world.elapse(POLICY.retention_s + 1)
    assert await world.queue.sweep() == 3
    assert await world.queue.sweep() == 0
    assert await world.queue.list_batches("me") == []
    assert await world.queue.find_result("kept") is None
    with pytest.raises(UnknownBatch):
        await world.queue.get_batch("batch")
    assert await world.queue.depth() == QueueDepth(0, 0, 0, 0, 0)


async def test_batches_without_a_job_keep_no_other_one_from_going(world: World) -> None:
    """A gateway pauses for a minute where nothing was deleted, and hand-ins for which there is no room leave many."""
    for number in range(20):
        await world.queue.open_batch(BatchSpec(f"empty{number}", "me"))
    await world.elapse(1)
    await fill(world, "a")
    await world.queue.finish(await take_one(world), DONE)
    await world.elapse(POLICY.retention_s + 1)
    assert await world.queue.sweep() == 1
    assert await world.queue.list_batches("me") == []


async def test_workers_that_have_jobs_are_counted(world: World) -> None:
    await fill(world, *map(str, range(9)))
    await world.queue.open_batch(BatchSpec("another", owner="you"))
    await world.queue.submit("another", specs("a", priority=Priority.HIGH))
    assert await world.queue.num_busy() == 0
    first, second = await world.queue.take("w1", 2)
    (third,) = await world.queue.take("w2", 1)
    await world.queue.take("w3", 1)
    await world.queue.take("idle", 0)
    assert await world.queue.num_busy() == 3
    assert await world.queue.finish(first, DONE) and await world.queue.num_busy() == 3, "it has another job"
    assert await world.queue.retry(second, "later", 50.0) and await world.queue.num_busy() == 2
    assert await world.queue.crash(third, "it died") and await world.queue.num_busy() == 1
    await world.elapse(LEASE_S + 1)
    assert await world.queue.num_busy() == 1, "until somebody takes what it had"
    assert len(await world.queue.take("w4", 20)) == 9 and await world.queue.num_busy() == 1


async def test_ping(world: World) -> None:
    await world.queue.ping()
