"""What both queues promise of a job's parts, one promise a test."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import pytest

from slipstream.archive.parts import PartLimits, PartRecord, PartsState, PutAnswer
from slipstream.archive.queue import BatchState, DamagedRecord, JobState, Lease, Outcome, UnknownBatch, job_id
from slipstream.archive.redis_rows import DIGEST_BYTES
from slipstream.errors import LimitExceeded
from tests.archive.worlds import DONE, POLICY, World, fill, take_one

NO_TALLIES: Mapping[str, float] = {}


async def put(world: World, lease: Lease, *numbers: int, by: str = "") -> list[PutAnswer]:
    """Parts that say their number and who wrote them."""
    return [await world.queue.put_part(lease, n, f"part {n} {by}".encode(), {"tokens": n}) for n in numbers]


async def parts(world: World, name: str = "a") -> dict[int, bytes]:
    found, after = await world.queue.list_parts("batch", job_id("batch", name))
    assert after == 0
    return {part.number: part.data for part in found}


async def test_who_takes_a_job_next_goes_on_behind_its_parts(world: World) -> None:
    await fill(world, "a")
    lease = await take_one(world)
    assert await world.queue.open_parts(lease, "key") == PartsState(0, "", ())
    assert await world.queue.open_parts(lease, "key", 3, "1-3") == PartsState(3, "1-3", ())
    assert await world.queue.open_parts(lease, "key", 4, "1-4") == PartsState(3, "1-3", ()), "told once"
    assert await put(world, lease, 0, 1) == [PutAnswer.KEPT, PutAnswer.KEPT]
    assert await world.queue.retry(lease, "the reader is away", 0.0)
    job = (await world.jobs())["a"]
    assert (job.parts_done, job.parts_total) == (2, 3)
    later = await take_one(world, "w2")
    state = await world.queue.open_parts(later, "key")
    assert state == PartsState(3, "1-3", (0, 1)) and state.missing == (2,)
    assert await put(world, later, 2, by="w2") == [PutAnswer.KEPT]
    assert await world.queue.finish(later, replace(DONE, tallies={"pages": 3}))
    assert await parts(world) == {0: b"part 0 ", 1: b"part 1 ", 2: b"part 2 w2"}
    batch = await world.queue.get_batch("batch")
    assert (batch.parts_done, batch.parts_total) == (3, 3) and batch.parts_bytes >= sum(
        map(len, (await parts(world)).values())
    )
    assert batch.tallies == {"tokens": 3.0, "pages": 3.0}


async def test_a_part_is_written_once(world: World) -> None:
    """Named by the mutation guard: no look at what is there."""
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 2)
    assert await put(world, lease, 1) == [PutAnswer.KEPT]
    assert await put(world, lease, 1, by="again") == [PutAnswer.KNOWN]
    assert await parts(world) == {1: b"part 1 "}
    assert (await world.queue.get_batch("batch")).parts_done == 1


async def test_a_late_part_of_who_lost_the_lease_is_refused(world: World) -> None:
    """Named by the mutation guard: no owner check."""
    await fill(world, "a")
    stale = await take_one(world, "w1")
    await world.queue.open_parts(stale, "key", 3)
    await put(world, stale, 0)
    await world.lose(stale)
    lease = await take_one(world, "w2")
    assert await put(world, stale, 1, by="stale") == [PutAnswer.LOST]
    assert await world.queue.open_parts(stale, "other key") is None, "it must not drop what is there"
    assert await put(world, replace(lease, worker="other"), 1) == [PutAnswer.LOST]
    assert await put(world, lease, 1, 2) == [PutAnswer.KEPT] * 2
    assert await world.queue.finish(lease, DONE)
    for late in (stale, lease):
        assert await put(world, late, 2) == [PutAnswer.LOST], "the job has ended"
    assert await parts(world) == {0: b"part 0 ", 1: b"part 1 ", 2: b"part 2 "}


async def test_parts_of_other_options_are_dropped(world: World) -> None:
    """Named by the mutation guard: no look at the key."""
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 3, "old")
    await put(world, lease, 0, 2)
    assert await world.queue.open_parts(lease, "other") == PartsState(0, "", ())
    assert await parts(world) == {}
    batch = await world.queue.get_batch("batch")
    assert (batch.parts_done, batch.parts_total, batch.parts_bytes) == (0, 0, 0)
    assert await world.queue.open_parts(lease, "other", 1, "new") == PartsState(1, "new", ())
    await put(world, lease, 0)
    assert await world.queue.finish(lease, DONE)
    assert (await world.queue.get_batch("batch")).tallies == {"tokens": 0.0}, "those that were dropped count nowhere"


async def test_a_job_that_failed_keeps_its_parts_and_goes_on_when_it_is_retried(world: World) -> None:
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 3)
    await put(world, lease, 0, 1)
    assert await world.queue.finish(lease, Outcome(JobState.FAILED, error="page 3 cannot be read", error_code="X"))
    batch = await world.queue.get_batch("batch")
    assert (batch.state, batch.tallies) == (BatchState.COMPLETED, {}), "totals are of jobs that are done"
    assert sorted(await parts(world)) == [0, 1]
    assert (await world.queue.retry_dead("batch", frozenset({JobState.FAILED}))).num_jobs == 1
    lease = await take_one(world)
    state = await world.queue.open_parts(lease, "key")
    assert state is not None and state.done == (0, 1)


async def test_a_job_is_not_done_while_parts_are_missing(world: World) -> None:
    """Named by the mutation guard: no count of the parts."""
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 2)
    await put(world, lease, 1)
    with suppress(DamagedRecord):
        await world.queue.finish(lease, DONE)
    assert (await world.jobs())["a"].state is JobState.RUNNING
    await put(world, lease, 0)
    assert await world.queue.finish(lease, DONE)


async def test_a_job_that_gets_on_is_no_poison(world: World) -> None:
    """Named by the mutation guard: no progress. It outlives more deaths than a job may have, one a part; without a new
    part it dies of as few as any other."""
    num_parts = 2 * POLICY.max_crashes
    await fill(world, "a")
    for number in range(num_parts):
        lease = await take_one(world, f"w{number}")
        await world.queue.open_parts(lease, "key", num_parts + 1)
        assert await put(world, lease, number) == [PutAnswer.KEPT]
        await world.lose(lease)
    for _ in range(POLICY.max_crashes - 1):
        lease = await take_one(world, "last")
        assert await world.queue.crash(lease, "it died")
    job = (await world.jobs())["a"]
    assert (job.state, job.parts_done) == (JobState.DEAD, num_parts)
    assert (await world.queue.retry_dead("batch")).num_jobs == 1
    state = await world.queue.open_parts(await take_one(world), "key")
    assert state is not None and state.missing == (num_parts,)


async def test_a_suspect_that_got_on_is_none_after_its_run(world: World) -> None:
    """Named by the mutation guard: a suspect's place."""
    await fill(world, "a", "b")
    for _ in range(2):
        lease = next(lease for lease in await world.queue.take("w", 2) if lease.custom_id == "a")
        await world.queue.crash(lease, "it died")
    lease = next(lease for lease in await world.queue.take("w", 2) if lease.custom_id == "a")
    assert lease.is_suspect
    await world.queue.open_parts(lease, "key", 2)
    await put(world, lease, 0)
    assert (await world.jobs())["a"].crashes == 0
    await world.lose(lease)
    again = next(lease for lease in await world.queue.take("w2", 2) if lease.custom_id == "a")
    assert (again.is_suspect, again.crashes) == (False, 1)


async def test_failures_count_from_the_last_part_on(world: World) -> None:
    await fill(world, "a")
    for number in range(2 * POLICY.max_attempts):
        lease = await take_one(world)
        await world.queue.open_parts(lease, "key", 100)
        await put(world, lease, number)
        assert await world.queue.retry(lease, "target lost", 0.0)
        assert (await world.jobs())["a"].attempts == 1


async def test_what_a_job_keeps_is_bounded(world: World) -> None:
    """Named by the mutation guard: no bound of the bytes."""
    world.queue.policy = replace(POLICY, parts=PartLimits(max_parts=4, max_part_bytes=100, max_job_bytes=300))
    await fill(world, "a")
    lease = await take_one(world)
    with pytest.raises(LimitExceeded):
        await world.queue.open_parts(lease, "key", 5)
    await world.queue.open_parts(lease, "key", 4)
    with pytest.raises(LimitExceeded):
        await world.queue.put_part(lease, 0, b"x" * 101, NO_TALLIES)
    answers = [await world.queue.put_part(lease, number, b"x" * 90, NO_TALLIES) for number in range(3)]
    assert answers == [PutAnswer.KEPT, PutAnswer.KEPT, PutAnswer.FULL]
    assert sorted(await parts(world)) == [0, 1]


async def test_parts_are_listed_from_any_place_on(world: World) -> None:
    await fill(world, "a", "b")
    lease, _ = await world.queue.take("w", 2)
    await world.queue.open_parts(lease, "key", 9)
    await put(world, lease, 1, 3, 4, 8)
    seen, after = [], 0
    while True:
        page, after = await world.queue.list_parts("batch", lease.job_id, after, limit=3)
        seen += [part.number for part in page]
        if not after:
            break
    assert seen == [1, 3, 4, 8]
    assert await world.queue.list_parts("batch", job_id("batch", "b")) == ([], 0)
    for batch, job in (("other", lease.job_id), ("batch", "no job")):
        with pytest.raises(UnknownBatch):
            await world.queue.list_parts(batch, job)


async def test_a_list_of_large_parts_ends_early(world: World) -> None:
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 9)
    for number in range(5):
        await world.queue.put_part(lease, number, b"x" * 2**19, NO_TALLIES)
    found, after = await world.queue.list_parts("batch", lease.job_id)
    assert (len(found), after) == ((5, 0) if world.redis is None else (2, 2))


async def test_parts_go_with_their_batch(world: World) -> None:
    """Named by the mutation guard: no end of parts."""
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 1)
    await put(world, lease, 0)
    await world.queue.finish(lease, DONE)
    if world.redis is not None:
        assert await world.redis.hget(f"{world.prefix}totals", "part_bytes") == b"%d" % (32 + len(b"part 0 "))
    await world.elapse(POLICY.retention_s + 1)
    assert await world.queue.sweep() == 1
    with pytest.raises(UnknownBatch):
        await world.queue.list_parts("batch", lease.job_id)
    if world.redis is not None:
        left = {key.decode().removeprefix(world.prefix) for key in await world.redis.keys(f"{world.prefix}*")}
        assert not [key for key in left if key.startswith(("p:", "d:", "m:", "j:", "b:"))]
        assert await world.redis.hget(f"{world.prefix}totals", "part_bytes") == b"0"


async def test_a_part_that_was_damaged_in_the_store_says_so(world: World) -> None:
    if world.redis is None:
        return
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 2)
    await put(world, lease, 0, 1)
    await world.redis.hset(f"{world.prefix}p:{lease.job_id}", "0", b"?" * 50)
    damaged, sound = (await world.queue.list_parts("batch", lease.job_id))[0]
    assert damaged.damage and not damaged.data and sound == PartRecord(1, b"part 1 ")


# -- notes ------------------------------------------------------------------------------------------------------------


async def test_a_note_is_for_later_runs_and_goes_with_the_last_part(world: World) -> None:
    """Named by the mutation guard: notes outlive their use."""
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 2)
    assert await world.queue.find_note(lease, "sum") is None
    assert await world.queue.put_note(lease, "sum", b"first") is PutAnswer.KEPT
    assert await world.queue.put_note(lease, "sum", b"first") is PutAnswer.KNOWN
    assert await world.queue.put_note(lease, "other", b"second") is PutAnswer.KEPT
    await put(world, lease, 0)
    assert await parts(world) == {0: b"part 0 "}, "no note is listed"
    before = (await world.queue.get_batch("batch")).parts_bytes
    assert before == sum(DIGEST_BYTES + len(each) for each in (b"first", b"second", b"part 0 "))
    await world.lose(lease)
    later = await take_one(world, "w2")
    state = await world.queue.open_parts(later, "key")
    assert state is not None and state.missing == (1,)
    assert [await world.queue.find_note(later, name) for name in ("sum", "other")] == [b"first", b"second"]
    await put(world, later, 1)
    assert [await world.queue.find_note(later, name) for name in ("sum", "other")] == [None, None]
    assert await world.queue.finish(later, DONE)
    batch = await world.queue.get_batch("batch")
    assert (batch.parts_bytes, batch.parts_done) == (2 * (DIGEST_BYTES + len(b"part 0 ")), 2)
    if world.redis is not None:
        assert await world.redis.hget(f"{world.prefix}totals", "part_bytes") == b"%d" % batch.parts_bytes
        assert sorted(await world.redis.hkeys(f"{world.prefix}p:{lease.job_id}")) == [b"0", b"1"]


async def test_a_late_note_of_who_lost_the_lease_is_refused(world: World) -> None:
    """Named by the mutation guard: no owner check."""
    await fill(world, "a")
    stale = await take_one(world, "w1")
    await world.queue.open_parts(stale, "key", 2)
    await world.lose(stale)
    lease = await take_one(world, "w2")
    assert await world.queue.put_note(stale, "sum", b"stale") is PutAnswer.LOST
    assert await world.queue.find_note(lease, "sum") is None
    await put(world, lease, 0, 1)
    assert await world.queue.finish(lease, DONE)
    assert await world.queue.put_note(lease, "sum", b"late") is PutAnswer.LOST, "the job has ended"


async def test_notes_of_other_options_are_dropped(world: World) -> None:
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 2)
    await world.queue.put_note(lease, "sum", b"old")
    await world.queue.open_parts(lease, "other", 2)
    assert await world.queue.find_note(lease, "sum") is None
    assert (await world.queue.get_batch("batch")).parts_bytes == 0


async def test_a_job_that_makes_notes_is_no_poison(world: World) -> None:
    await fill(world, "a")
    for number in range(2 * POLICY.max_crashes):
        lease = await take_one(world, f"w{number}")
        await world.queue.open_parts(lease, "key", 2)
        assert await world.queue.put_note(lease, str(number), b"note") is PutAnswer.KEPT
        assert (await world.jobs())["a"].crashes == 0
        await world.lose(lease)
    assert (await take_one(world)).crashes == 1


async def test_notes_count_among_what_a_job_keeps_and_leave_room_for_its_last_part(world: World) -> None:
    """Named by the mutation guard: no bound of the notes."""
    world.queue.policy = replace(POLICY, parts=PartLimits(max_part_bytes=200, max_job_bytes=300))
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 2)
    assert await world.queue.put_note(lease, "one", b"x" * 90) is PutAnswer.KEPT
    assert await world.queue.put_note(lease, "two", b"x" * 150) is PutAnswer.FULL
    assert await world.queue.put_note(lease, "one", b"y" * 150) is PutAnswer.KEPT, "in the place of the first"
    assert await world.queue.put_part(lease, 1, b"x" * 90, NO_TALLIES) is PutAnswer.FULL
    assert await world.queue.put_part(lease, 1, b"x" * 60, NO_TALLIES) is PutAnswer.KEPT
    assert await world.queue.put_part(lease, 0, b"x" * 90, NO_TALLIES) is PutAnswer.KEPT


async def test_a_note_that_was_damaged_in_the_store_is_made_again(world: World) -> None:
    if world.redis is None:
        return
    await fill(world, "a")
    lease = await take_one(world)
    await world.queue.open_parts(lease, "key", 2)
    await world.queue.put_note(lease, "sum", b"first")
    (field,) = await world.redis.hkeys(f"{world.prefix}p:{lease.job_id}")
    await world.redis.hset(f"{world.prefix}p:{lease.job_id}", field, b"?" * 50)
    assert await world.queue.find_note(lease, "sum") == b""
    assert await world.queue.put_note(lease, "sum", b"first") is PutAnswer.KEPT
    assert await world.queue.find_note(lease, "sum") == b"first"
