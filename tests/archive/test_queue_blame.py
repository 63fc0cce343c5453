"""Who is blamed when what runs a job dies, by both queues: poison is found, and its neighbours are not charged."""

from slipstream.archive.queue import BeatAnswer, JobState, Lease
from tests.archive.worlds import DONE, POLICY, World, fill, specs, take_one

LEASE_S = POLICY.lease_s


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
