"""Who is blamed when what runs a job dies, by both queues: poison is found, and its neighbours are not charged."""

from dataclasses import replace

import pytest

from slipstream.archive.parts import PutAnswer
from slipstream.archive.queue import BeatAnswer, JobState, Lease
from tests.archive.worlds import DONE, POLICY, World, fill, specs, take_one
from tests.support.memory_table import CAME_BACK

LEASE_S = POLICY.lease_s
DIED = f"whatever ran it died {POLICY.max_crashes} times"


async def test_a_poison_job_dies_alone(world: World) -> None:
    """Each death of a worker takes all that ran there with it, until the suspect is singled out."""
    await fill(world, "poison", *map("good{}".format, range(8)))
    held: list[Lease] = []
    for round_number in range(30):
        worker = f"w{round_number}"
        held = await world.queue.take(worker, 4)
        if not held and (await world.queue.depth()).queued == 0:
            break
        if any(lease.custom_id == "poison" for lease in held):
            assert sum(lease.is_suspect for lease in held) <= 1
            await world.elapse(LEASE_S + 1)
        else:
            for lease in held:
                assert await world.queue.finish(lease, DONE)
    jobs = await world.jobs()
    assert jobs.pop("poison").state is JobState.DEAD
    assert {job.state for job in jobs.values()} == {JobState.DONE}
    assert max(job.crashes for job in jobs.values()) < POLICY.max_crashes


async def make_suspect(world: World) -> Lease:
    for _ in range(2):
        assert await world.queue.crash(await take_one(world), "the target died")
    lease = await take_one(world)
    assert lease.is_suspect and lease.crashes == 2
    return lease


async def test_beside_a_suspect_only_the_suspect_is_blamed(world: World) -> None:
    await fill(world, "poison")
    suspect = await make_suspect(world)
    await world.queue.submit("batch", specs("n1", "n2"))
    neighbours = await world.queue.take("w", 5, suspects=False)
    assert await world.queue.crash(neighbours[0], "the target died")
    assert await world.queue.crash(suspect, "the target died")
    assert await world.queue.crash(neighbours[1], "the target died")
    jobs = await world.jobs()
    assert jobs["poison"].state is JobState.DEAD
    assert jobs["poison"].error == "whatever ran it died 3 times: the target died"
    assert (jobs["n1"].crashes, jobs["n2"].crashes) == (0, 0)
    await world.elapse(LEASE_S + 1)
    for lease in await world.queue.take("w", 5):
        assert await world.queue.crash(lease, "the target died again")
    assert {job.crashes for name, job in (await world.jobs()).items() if name != "poison"} == {1}


async def test_one_suspect_at_a_time_and_never_for_who_refuses_them(world: World) -> None:
    await fill(world, "a", "b")
    for _ in range(2):
        for lease in await world.queue.take("w", 2):
            await world.queue.crash(lease, "died")
    assert (await world.queue.depth()).suspects == 2
    assert await world.queue.take("w", 5, suspects=False) == []
    (first,) = await world.queue.take("w", 5)
    assert await world.queue.take("other", 5) == [], "another worker's target may be the same"
    assert await world.queue.finish(first, DONE)
    assert len(await world.queue.take("other", 5)) == 1


async def test_the_excuse_wears_out(world: World) -> None:
    await fill(world, "poison")
    suspect = await make_suspect(world)
    await world.queue.submit("batch", specs("n"))
    for _ in range(2 * POLICY.max_crashes + 1):
        (neighbour,) = await world.queue.take("w", 5, suspects=False)
        await world.queue.crash(neighbour, "died")
    assert (await world.jobs())["n"].crashes == 1
    assert await world.queue.beat([suspect], {}) == [BeatAnswer.KEEP]


async def lives(world: World, lease: Lease, how: str) -> None:
    """The worker that had it says something of the run that it lost."""
    if how == "beat":
        assert await world.queue.beat([lease], {}) == [BeatAnswer.LOST]
    elif how == "finish":
        assert not await world.queue.finish(lease, DONE)
    else:
        await world.queue.retry(lease, "it was cut off", 0.0)


@pytest.mark.parametrize("how", ["beat", "finish", "retry"])
async def test_a_job_is_not_to_blame_for_workers_that_come_back(world: World, how: str) -> None:
    """Frozen or cut off one after the other, each with the job in its hands. A job that stops its workers for so long
    does so again and again, so the excuse wears out."""
    await fill(world, "a")
    lease = await take_one(world, "w")
    for number in range(2 * POLICY.max_crashes):
        await world.elapse(LEASE_S + 1)
        again = await take_one(world, f"w{number}")
        assert (again.crashes, again.is_suspect) == (1, False)
        await lives(world, lease, how)
        await lives(world, lease, how)
        assert (await world.jobs())["a"].crashes == 0
        lease = again
    for number in range(POLICY.max_crashes):
        await world.elapse(LEASE_S + 1)
        found = await world.queue.take(f"v{number}", 1) or await world.queue.take(f"v{number}", 1)
        await lives(world, lease, how)
        assert (await world.jobs())["a"].crashes == number + 1
        lease = found[0] if found else lease
    assert (await world.jobs())["a"].state is JobState.DEAD


async def test_what_a_living_worker_gives_up_is_no_death(world: World) -> None:
    """A server that led before may tell it that it has lost what it was just given; nobody else hears of that."""
    await fill(world, "a", "b")
    (kept,) = await world.queue.take("w", 1)
    held = await take_one(world, "w")
    for number in range(2 * POLICY.max_crashes + 2):
        for _ in range(4):
            await world.elapse(LEASE_S * 0.26)
            assert await world.queue.beat([kept], {}) == [BeatAnswer.KEEP]
        (again,) = await world.queue.take("w", 1)
        excused = number < 2 * POLICY.max_crashes
        assert (again.job_id, again.crashes) == (held.job_id, 0 if excused else number + 1 - 2 * POLICY.max_crashes)


async def test_a_worker_that_was_heard_of_before_it_died_has_died(world: World) -> None:
    """It renewed all that it had a fifth of a lease before at the most."""
    await fill(world, "a")
    await take_one(world, "w")
    await world.elapse(LEASE_S / 5)
    assert await world.queue.take("w", 0) == []
    await world.elapse(LEASE_S * 4 / 5 + 1)
    assert (await take_one(world, "v")).crashes == 1


async def test_who_takes_its_own_job_back_was_silent(world: World) -> None:
    """A job that keeps its worker's process from running for a whole lease is to blame."""
    await fill(world, "a")
    await take_one(world, "w")
    await world.elapse(LEASE_S + 1)
    assert (await take_one(world, "w")).crashes == 1


async def lose_all(world: World) -> list[Lease]:
    """The runs of a job whose workers fell silent one after the other, until it was dead of it."""
    await fill(world, "a")
    held = await world.queue.take("w0", 1)
    for number in range(1, POLICY.max_crashes):
        await world.elapse(LEASE_S + 1)
        found = await world.queue.take(f"w{number}", 1)
        held += found or await world.queue.take(f"w{number}", 1)
    await world.elapse(LEASE_S + 1)
    assert await world.queue.take("v", 1) == []
    assert (await world.jobs())["a"].error == DIED
    return held


@pytest.mark.parametrize("how", ["beat", "finish", "retry"])
@pytest.mark.parametrize("number", range(POLICY.max_crashes))
async def test_a_dead_job_whose_worker_comes_back_stays_dead_and_says_so(world: World, how: str, number: int) -> None:
    """That it is dead may have been told already, so what becomes of it is up to whoever reads why."""
    held = await lose_all(world)
    await lives(world, held[number], how)
    job = (await world.jobs())["a"]
    assert (job.state, job.crashes, job.error) == (JobState.DEAD, POLICY.max_crashes - 1, DIED + CAME_BACK)
    for lease in held:
        await lives(world, lease, how)
    job = (await world.jobs())["a"]
    assert (job.state, job.crashes, job.error) == (JobState.DEAD, 0, DIED + CAME_BACK), "it is said once"
    assert (await world.queue.retry_dead("batch")).num_jobs == 1
    assert await world.queue.finish(await take_one(world), DONE)


async def test_a_job_that_is_dead_of_its_own_failures_says_nothing_of_its_workers(world: World) -> None:
    await fill(world, "a")
    lost = await take_one(world, "w")
    await world.elapse(LEASE_S + 1)
    for _ in range(POLICY.max_attempts):
        assert await world.queue.retry(await take_one(world, "v"), "it is too dark", 0.0)
        await world.elapse(1)
    await lives(world, lost, "beat")
    job = (await world.jobs())["a"]
    assert (job.state, job.error) == (JobState.DEAD, "it is too dark")


@pytest.mark.parametrize("fresh", ["part", "note", "retry_dead"])
async def test_who_comes_back_takes_nothing_off_that_is_counted_since(world: World, fresh: str) -> None:
    """Named by the mutation guard: an old death is taken off the new count."""
    await fill(world, "a")
    lost = await take_one(world, "w")
    await world.elapse(LEASE_S + 1)
    held = await take_one(world, "v")
    if fresh == "retry_dead":
        for _ in range(POLICY.max_attempts):
            assert await world.queue.retry(held, "it is too dark", 0.0)
            held = (await world.queue.take("v", 1) or [held])[0]
        assert (await world.queue.retry_dead("batch")).num_jobs == 1
        held = await take_one(world, "v")
    else:
        await world.queue.open_parts(held, "key", 2)
        put = world.queue.put_part(held, 0, b"a", {}) if fresh == "part" else world.queue.put_note(held, "n", b"a")
        assert await put is PutAnswer.KEPT
    assert await world.queue.crash(held, "the target died")
    await lives(world, lost, "beat")
    assert (await world.jobs())["a"].crashes == 1


@pytest.mark.parametrize("fresh", ["part", "retry_dead"])
async def test_an_excuse_that_wore_out_is_fresh_when_the_counts_are(world: World, fresh: str) -> None:
    """Named by the mutation guard: an excuse is worn out for ever."""
    await fill(world, "a")
    held = await take_one(world)
    for number in range(2 * POLICY.max_crashes + 1):
        await world.elapse(LEASE_S + 1)
        lost, held = held, await take_one(world, f"w{number}")
        await lives(world, lost, "beat")
    assert (await world.jobs())["a"].crashes == 1, "it is worn out"
    if fresh == "part":
        await world.queue.open_parts(held, "key", 2)
        assert await world.queue.put_part(held, 0, b"a", {}) is PutAnswer.KEPT
    else:
        while (await world.jobs())["a"].state is not JobState.DEAD:
            assert await world.queue.crash(held, "the target died")
            held = (await world.queue.take("v", 1) or [held])[0]
        assert (await world.queue.retry_dead("batch")).num_jobs == 1
        held = await take_one(world, "v")
    await world.elapse(LEASE_S + 1)
    assert (await take_one(world, "u")).crashes == 1
    await lives(world, held, "beat")
    assert (await world.jobs())["a"].crashes == 0


async def test_who_has_died_excuses_nothing(world: World) -> None:
    """Another worker's word, or one of another run, is no sign of life."""
    await fill(world, "a")
    lost = await take_one(world, "w")
    await world.elapse(LEASE_S + 1)
    held = await take_one(world, "v")
    for stranger in (replace(lost, worker="u"), replace(lost, epoch=7), replace(held, worker="w")):
        assert await world.queue.beat([stranger], {}) == [BeatAnswer.LOST]
    assert (await world.jobs())["a"].crashes == 1
