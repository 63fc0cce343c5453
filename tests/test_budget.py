"""Places are given in order, within the budget, and come back whatever happens to their holders."""

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import budget
from slipstream.budget import (
    ROOM_BEHIND_PEOPLE_S,
    Admission,
    MemoryUse,
    Reservation,
    Turns,
    available_bytes,
    host_budget,
    num_cores,
)
from slipstream.engine.startup import ModelServiceConfig
from slipstream.errors import LimitExceeded, Overloaded
from slipstream.stack.local import StackOptions, service_argv

MIB = 1024 * 1024
BEHIND_S = 10.0


def make_admission(max_queued: int = 8, queue_timeout_s: float = 600.0, max_sessions: int = 8) -> Admission:
    return Admission(
        budget_bytes=100 * MIB,
        max_sessions=max_sessions,
        max_queued=max_queued,
        queue_timeout_s=queue_timeout_s,
        what="target",
    )


async def admitted(place: Reservation) -> list[int]:
    """Waits to the end; how many were ahead, each time that changed."""
    return [ahead async for ahead in place.wait()]


@given(st.lists(st.tuples(st.floats(0, 60), st.integers(1, 10_000)), min_size=1, max_size=8), st.floats(1e-4, 0.1))
def test_nobody_goes_first_who_comes_later_than_one_takes(asked: list[tuple[float, int]], unit_s: float) -> None:
    """And of two that come at once the shorter one does."""
    turns = Turns(BEHIND_S)
    turns.observe(1000, 1000 * unit_s)
    given_turns = [turns.turn(came_s, amount) for came_s, amount in asked]
    for (came_s, amount), turn in zip(asked, given_turns, strict=True):
        for (other_s, other_amount), other in zip(asked, given_turns, strict=True):
            if other_s > came_s + amount * unit_s:
                assert other > turn
            if other_s == came_s and other_amount > amount:
                assert other > turn


def test_what_others_took_is_learnt_by_how_much_they_asked_for() -> None:
    turns = Turns(BEHIND_S)
    assert turns.turn(5.0, 10**6) == 5.0  # nothing is known yet
    for amount in (10, 1000, 10, 1000):
        turns.observe(amount, 0.5 if amount == 10 else 2.0)
    few, many = (turns.turn(0.0, amount) for amount in (10, 1000))
    assert few < 0.1 and many == pytest.approx(2.5, rel=0.1)
    assert turns.turn(0.0, 10, in_background=True) == few + BEHIND_S


async def test_what_fits_is_admitted_at_once() -> None:
    admission = make_admission()
    places = [admission.reserve(50 * MIB) for _ in range(2)]
    assert [await admitted(place) for place in places] == [[], []]
    assert (admission.used_bytes, admission.num_admitted) == (100 * MIB, 2)


async def test_what_can_never_fit_is_refused_at_once() -> None:
    admission = make_admission()
    with pytest.raises(LimitExceeded, match="needs 101 MiB of keys and values, but the target has 100 MiB"):
        admission.reserve(101 * MIB)
    assert (admission.num_admitted, admission.num_queued) == (0, 0)


async def test_the_queue_is_first_come_first_served_until_it_is_known_what_captions_take() -> None:
    admission = make_admission()
    first, second = admission.reserve(60 * MIB), admission.reserve(80 * MIB)
    small = admission.reserve(10 * MIB)  # would fit, but it must not overtake the big one for ever
    waits = [asyncio.create_task(admitted(place)) for place in (second, small)]
    await asyncio.sleep(0)
    first.release()
    assert [await wait for wait in waits] == [[0], [1]]
    assert admission.used_bytes == 90 * MIB


async def test_a_short_caption_waits_for_room_before_a_long_one_that_has_just_come() -> None:
    admission = make_admission(max_sessions=1)
    admission._turns.observe(MIB, 1.0)
    first, long, short = (admission.reserve(size * MIB) for size in (1, 90, 5))
    told = [asyncio.create_task(admitted(place)) for place in (long, short)]
    await asyncio.sleep(0)
    first.release()
    assert await told[1] == [0] and long.admitted_at is None
    short.release()
    assert await told[0] == [1, 0]


async def test_who_is_refused_after_a_time_loses_a_quarter_of_it_to_shorter_ones_at_most() -> None:
    admission = make_admission(max_sessions=1, queue_timeout_s=40.0)
    admission._turns.observe(MIB, 1.0)
    admission.reserve(MIB)
    places = [admission.reserve(size * MIB, in_background=size > 80) for size in (5, 80, 90)]
    assert [place.turn - place.asked_at for place in places] == pytest.approx([5.0, 10.0, 30.0])


async def test_what_places_take_is_learnt_by_what_was_asked_for() -> None:
    """As turns are given by that: frames turn out to be smaller than the most that they could become."""
    admission = make_admission(max_sessions=1)
    place = admission.reserve(80 * MIB)
    place.shrink(MIB)
    place.admitted_at -= 8.0  # type: ignore[operator]
    place.release()
    admission.reserve(MIB)
    waiting = admission.reserve(40 * MIB)
    assert waiting.turn - waiting.asked_at == pytest.approx(4.0, rel=0.1)


async def test_one_that_goes_first_and_has_room_does_not_wait_for_the_large_one_that_has_none() -> None:
    admission = make_admission()
    admission._turns.observe(MIB, 1.0)
    admission.reserve(60 * MIB)
    large, small = admission.reserve(80 * MIB), admission.reserve(10 * MIB)
    assert small.admitted_at is not None and large.admitted_at is None
    later = admission.reserve(90 * MIB)
    assert later.admitted_at is None and admission.num_queued == 2


async def test_a_full_queue_refuses_none_that_need_not_wait() -> None:
    admission = make_admission(max_queued=1)
    admission._turns.observe(MIB, 1.0)
    first, archived = admission.reserve(60 * MIB), admission.reserve(80 * MIB, in_background=True)
    small = admission.reserve(10 * MIB)
    assert small.admitted_at is not None and not archived.gave_way
    large = admission.reserve(80 * MIB)
    assert archived.gave_way and admission.reserve(10 * MIB).admitted_at is not None
    with pytest.raises(Overloaded, match="and 1 wait"):
        admission.reserve(90 * MIB)
    first.release()
    assert large.admitted_at is not None


async def test_where_one_gives_way_that_could_not_be_admitted_another_may_be() -> None:
    admission = make_admission(max_queued=1)
    admission.reserve(60 * MIB)
    archived = admission.reserve(80 * MIB, in_background=True)
    archived.turn -= 2 * ROOM_BEHIND_PEOPLE_S
    assert admission.reserve(10 * MIB).admitted_at is not None and archived.gave_way


async def test_those_behind_hear_of_one_that_goes_first() -> None:
    admission = make_admission(max_sessions=1)
    admission._turns.observe(MIB, 1.0)
    first, long = admission.reserve(MIB), admission.reserve(90 * MIB)
    waiting = long.wait()
    assert await anext(waiting) == 0
    short = admission.reserve(MIB)
    assert await anext(waiting) == 1
    short.release()
    assert await anext(waiting) == 0
    first.release()
    assert [ahead async for ahead in waiting] == []


async def test_captions_that_people_wait_for_have_room_first() -> None:
    admission = make_admission(max_sessions=1)
    first, archived = admission.reserve(MIB), admission.reserve(MIB, in_background=True)
    of_people = admission.reserve(MIB)
    assert archived.turn - of_people.turn == pytest.approx(ROOM_BEHIND_PEOPLE_S, abs=1.0)
    first.release()
    assert await admitted(of_people) == [] and archived.admitted_at is None


async def test_where_the_queue_is_full_the_archive_gives_way_to_people_and_not_to_itself() -> None:
    admission = make_admission(max_sessions=1, max_queued=2)
    first, *archived = (admission.reserve(MIB, in_background=True) for _ in range(3))
    waits = [asyncio.create_task(admitted(place)) for place in archived]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="and 2 wait"):
        admission.reserve(MIB, in_background=True)
    of_people = [admission.reserve(MIB) for _ in range(2)]
    for wait in waits:
        with pytest.raises(Overloaded, match="captions that people wait for fill the queue; try again in") as refused:
            await wait
        assert refused.value.retry_after_s is not None
    with pytest.raises(Overloaded, match="and 2 wait"):
        admission.reserve(MIB)
    for place in (first, *of_people):
        assert await admitted(place) == []
        place.release()
    assert (admission.num_admitted, admission.num_queued, admission.used_bytes) == (0, 0, 0)


async def test_who_gave_way_before_it_began_to_wait_is_told_all_the_same() -> None:
    admission = make_admission(max_sessions=1, max_queued=1)
    admission.reserve(MIB)
    archived = admission.reserve(MIB, in_background=True)
    admission.reserve(MIB)
    with pytest.raises(Overloaded, match="that people wait for"):
        await admitted(archived)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.integers(0, 9)), min_size=1, max_size=40))
def test_whatever_comes_all_have_room_in_the_end_and_never_too_much(comers: list[tuple[int, bool, int]]) -> None:
    """Each asks for so much, and then the oldest but so many of those that have room leaves."""

    async def come_and_go() -> None:
        admission, served = make_admission(max_queued=100, max_sessions=3), list[Reservation]()
        waiting = list[Reservation]()
        for size, in_background, leaves in (*comers, *[(0, True, 0)] * len(comers)):
            if size:
                waiting.append(admission.reserve(size * MIB, in_background=in_background))
            served += [place for place in waiting if place.admitted_at is not None and place not in served]
            assert sum(place.num_bytes for place in served if not place._released) == admission.used_bytes <= 100 * MIB
            assert not any(map(admission._fits, admission._queue[:1])), "the first of the queue waits for room alone"
            holding = [place for place in served if not place._released]
            if holding:
                holding[leaves % len(holding)].release()
        served += [place for place in waiting if place.admitted_at is not None and place not in served]
        assert len(served) == len(comers)

    asyncio.run(come_and_go())


async def test_those_who_wait_hear_how_many_are_ahead() -> None:
    admission = make_admission(max_sessions=1)
    places = [admission.reserve(MIB) for _ in range(4)]
    last = asyncio.create_task(admitted(places[3]))
    for place in places[:3]:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        place.release()
    assert await last == [2, 1, 0]


async def test_a_full_queue_refuses_with_a_hint() -> None:
    admission = make_admission(max_queued=1, max_sessions=1)
    admission.reserve(MIB)
    admission.reserve(MIB)
    with pytest.raises(Overloaded, match=r"1 of at most 1 captions .* and 1 wait; try again in about \d+ s") as refused:
        admission.reserve(MIB)
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s > 0


async def test_waiting_has_an_end() -> None:
    admission = make_admission(queue_timeout_s=0.01, max_sessions=1)
    first, second = admission.reserve(MIB), admission.reserve(MIB)
    with pytest.raises(Overloaded, match=r"no place became free within 0.01 s; try again in about") as refused:
        await admitted(second)
    assert refused.value.retry_after_s is not None
    assert admission.num_queued == 0
    first.release()
    assert (admission.num_admitted, admission.used_bytes) == (0, 0)


async def test_a_cancelled_waiter_leaves_the_queue_and_the_next_moves_up() -> None:
    admission = make_admission(max_sessions=1)
    first, second, third = (admission.reserve(MIB) for _ in range(3))
    waits = [asyncio.create_task(admitted(place)) for place in (second, third)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.wait(waits[:1])
    second.release()
    first.release()
    assert (await waits[1])[0] == 1
    assert (admission.num_admitted, admission.num_queued) == (1, 0)


async def test_a_big_waiter_that_leaves_lets_small_ones_in() -> None:
    admission = make_admission()
    admission.reserve(60 * MIB)
    big, small = admission.reserve(80 * MIB), admission.reserve(10 * MIB)
    wait = asyncio.create_task(admitted(small))
    await asyncio.sleep(0)
    big.release()
    assert await wait == [1]


async def test_a_place_is_given_back_once() -> None:
    admission = make_admission()
    place = admission.reserve(10 * MIB)
    place.release()
    place.release()
    assert (admission.num_admitted, admission.used_bytes) == (0, 0)


async def test_who_needs_less_than_was_reserved_lets_the_next_in() -> None:
    admission = make_admission()
    place, waiting = admission.reserve(80 * MIB), admission.reserve(50 * MIB)
    wait = asyncio.create_task(admitted(waiting))
    await asyncio.sleep(0)
    place.shrink(10 * MIB)
    assert await wait == [0]
    place.release()
    assert (admission.num_admitted, admission.used_bytes) == (1, 50 * MIB)


async def test_a_budget_says_what_it_is_for() -> None:
    admission = Admission(
        budget_bytes=MIB, max_sessions=1, max_queued=0, queue_timeout_s=1, what="gateway", of=MemoryUse.FRAMES
    )
    with pytest.raises(LimitExceeded, match=r"2 MiB of frames, but the gateway has 1 MiB .* raise --frames-budget-mb"):
        admission.reserve(2 * MIB)


def test_what_a_container_has_read_of_files_is_no_memory_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint as large as the limit fills it with its pages, which go when somebody needs room."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {10**9} kB\nMemAvailable: {10**9} kB\n")
    monkeypatch.setattr(budget, "MEMORY_INFO", meminfo)
    monkeypatch.setattr(budget, "CGROUP", tmp_path)
    monkeypatch.setattr(budget, "OWN_CGROUP", tmp_path / "none")
    (tmp_path / "memory.max").write_text("16000\n")
    (tmp_path / "memory.current").write_text("15900\n")
    assert available_bytes() == 100
    (tmp_path / "memory.stat").write_text("anon 2000\nfile 13900\nshmem 900\ninactive_file 12000\nactive_file 1000\n")
    assert available_bytes() == 16000 - 15900 + 13000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() == 10**9 * 1024


@pytest.mark.parametrize(
    ("told", "folder", "names"),
    [
        ("0::/job/step\n", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:cpu:/other\n4:memory:/job/step\n",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_task_of_a_scheduler_has_the_limits_of_all_groups_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, folder: str, names: tuple[str, str, str]
) -> None:
    """As Slurm and systemd set them, of both versions, in the tree of the whole machine."""
    limit, used, cached = names
    (meminfo := tmp_path / "meminfo").write_text(f"MemAvailable: {10**9} kB\n")
    (own := tmp_path / "own").write_text(told)
    monkeypatch.setattr(budget, "MEMORY_INFO", meminfo)
    monkeypatch.setattr(budget, "OWN_CGROUP", own)
    monkeypatch.setattr(budget, "CGROUP", tmp_path)
    step = tmp_path / folder / "job" / "step"
    step.mkdir(parents=True)
    assert available_bytes() == 10**9 * 1024
    (step / limit).write_text("9223372036854771712\n")  # none, as version 1 says it
    (step / used).write_text("700\n")
    (step.parent / limit).write_text("1000\n")
    (step.parent / used).write_text("900\n")
    (step.parent / "memory.stat").write_text(f"{cached} 50\n")
    assert available_bytes() == 1000 - 900 + 50


@pytest.mark.parametrize(
    ("told", "folder", "files", "cores"),
    [
        ("0::/pod/box\n", "", {"cpu.max": "max 100000\n"}, 64),
        ("0::/pod/box\n", "", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/pod/box\n", "", {"cpu.max": "50000 100000\n"}, 1),
        ("3:cpu,cpuacct:/pod/box\n", "cpu", {"cpu.cfs_quota_us": "250000\n", "cpu.cfs_period_us": "100000\n"}, 2),
        ("3:cpu,cpuacct:/pod/box\n", "cpu", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
@pytest.mark.parametrize("level", ["pod", "pod/box"])
def test_a_container_has_as_many_threads_as_its_quota_gives_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    told: str,
    folder: str,
    files: dict[str, str],
    cores: int,
) -> None:
    """It may run on all cores of its machine, and on so many of them at a time."""
    (own := tmp_path / "own").write_text(told)
    monkeypatch.setattr(budget, "OWN_CGROUP", own)
    monkeypatch.setattr(budget, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / folder / "pod" / "box").mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / folder / level / name).write_text(content)
    assert num_cores() == cores
    assert ModelServiceConfig(listen="", model="").num_threads == cores
    addresses = dict.fromkeys(("target", "draft", "gateway"), "unix:s")
    argv = service_argv(StackOptions(), "target", addresses)
    assert argv[argv.index("--prefill-threads") + 1] == str(cores)
    assert argv[argv.index("--threads") + 1] == str(max(1, cores // 2))


def test_a_budget_is_told_or_a_share_of_what_there_is() -> None:
    assert host_budget(3, 0.5) == 3 * MIB
    assert 0 < host_budget(0, 0.25) < available_bytes()
