"""Partial summaries of a long film, kept as notes of its job: none is made twice, whoever goes on."""

import asyncio
from dataclasses import replace

import pytest

from slipstream.archive.parts import PartLimits, PutAnswer
from slipstream.archive.queue import JobState, Lease, QueuePolicy
from tests.support.film_world import SEGMENTS, SUMMED_UP, long_film

SUMS = ["-1-0", "-1-1", "-1-2", "-1-3", "-2-0", "-2-1", ""]


@pytest.mark.parametrize("when", ["before it is kept", "once it is kept"])
async def test_a_run_that_ends_at_any_partial_summary_is_gone_on_with_behind_it(when: str) -> None:
    undisturbed = long_film()
    await undisturbed.ended(await undisturbed.submit(**SUMMED_UP))
    assert undisturbed.models.summed_up == SUMS
    world = long_film()
    put_note = world.queue.put_note

    async def die(lease: Lease, name: str, data: bytes) -> PutAnswer:
        if when == "once it is kept":
            await put_note(lease, name, data)
        raise asyncio.CancelledError

    lease, alive = await world.submit(**SUMMED_UP), SUMS
    for _ in SUMS[:-1]:
        world.queue.put_note = die  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await world.runner.run(lease, world.progress.append)
        assert world.models.summed_up.pop() == alive[0], "the first that is missing is made, and no other"
        alive = alive[1:] if when == "once it is kept" else alive
        await world.queue.retry(lease, "it died", 0.0, counted=False)
        lease = await world.take()
    world.queue.put_note = put_note  # type: ignore[method-assign]
    assert (await world.ended(lease)).state is JobState.DONE
    assert world.models.summed_up == alive and len(world.models.captioned) == SEGMENTS
    assert await world.parts() == [
        replace(part, receipt=part.receipt and replace(part.receipt, runs=mine.receipt.runs if mine.receipt else 0))
        for part, mine in zip(await undisturbed.parts(), await world.parts(), strict=True)
    ]
    assert not next(iter(world.queue._jobs.values())).notes, "they go with the summary"


@pytest.mark.parametrize("note", [b"", b"\x01 damaged", b"\x02 another release's"])
async def test_a_note_that_cannot_be_read_is_made_again(note: bytes) -> None:
    world = long_film()
    find_note, found = world.queue.find_note, [note]

    async def damaged(lease: Lease, name: str) -> bytes | None:
        return found.pop() if found else await find_note(lease, name)

    world.queue.find_note = damaged  # type: ignore[method-assign]
    await world.ended(await world.submit(**SUMMED_UP))
    assert world.models.summed_up == SUMS


async def test_a_film_without_room_for_notes_is_summed_up_all_the_same() -> None:
    undisturbed = long_film()
    await undisturbed.ended(await undisturbed.submit(**SUMMED_UP))
    needed = (await undisturbed.queue.get_batch("batch")).parts_bytes
    world = long_film(QueuePolicy(parts=PartLimits(max_job_bytes=needed + 32)))
    put_note, answers = world.queue.put_note, list[PutAnswer]()

    async def put(lease: Lease, name: str, data: bytes) -> PutAnswer:
        answers.append(await put_note(lease, name, data))
        return answers[-1]

    world.queue.put_note = put  # type: ignore[method-assign]
    assert (await world.ended(await world.submit(**SUMMED_UP))).state is JobState.DONE
    assert PutAnswer.FULL in answers and world.models.summed_up == SUMS
    assert (await world.parts())[-1].caption is not None
