"""Decoder processes that work, crash, hang, lie and are cancelled: the caller gets an answer and the pool goes on."""

import asyncio
import contextlib
import io
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import psutil
import pytest
import pytest_asyncio
import structlog

from slipstream.errors import InvalidRequest, LimitExceeded, ServiceUnavailable, UnreadableVideo
from slipstream.video.decode import sample_video
from slipstream.video.decoder_process import ConfinedProcess, Decoder, Reaping
from slipstream.video.files import FileThreads
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.pool import DecodePool
from tests.support.media import ClipSpec, even_times_ms, make_clip
from tests.support.processes import eventually, file_threads_rest
from tests.support.variants import one_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = DecodeLimits(timeout_s=20.0)
CLIP = make_clip(ClipSpec(even_times_ms(40), codec_options={"g": "12"}))


@contextmanager
def file_of(data: bytes) -> Iterator[BinaryIO]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield cast(BinaryIO, file)


async def sample(pool: DecodePool, data: bytes, num_frames: int = 4, **options: str) -> SampledVideo:
    with file_of(data) as file:
        return await pool.sample(file, num_frames, **options)


async def still_works(pool: DecodePool) -> None:
    assert len((await sample(pool, CLIP)).frames) == 4


def make_pool(num_workers: int = 1, limits: DecodeLimits = LIMITS, **options: int) -> DecodePool:
    return DecodePool(num_workers, limits, module="tests.support.bad_decoder", **options)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    """One decoder, which does as the file tells it."""
    others = set(psutil.Process().children())
    made = make_pool()
    yield made
    made.close()
    assert set(psutil.Process().children()) <= others


async def test_the_frames_are_those_of_decoding_here(pool: DecodePool) -> None:
    seen: list[tuple[int, int]] = []
    with file_of(CLIP) as file:
        file.seek(100)
        video = await pool.sample(file, 8, on_progress=lambda done, total: seen.append((done, total)))
        assert file.tell() == 100
    plain = sample_video(io.BytesIO(CLIP), 8, LIMITS)
    np.testing.assert_array_equal(video.frames, plain.frames)
    assert {k: v for k, v in vars(video).items() if k != "frames"} == {
        k: v for k, v in vars(plain).items() if k != "frames"
    }
    assert seen == [(done, 8) for done in range(1, 9)]
    assert video.frames.flags["C_CONTIGUOUS"] and not video.frames.flags["WRITEABLE"]


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        (b"crash SIGSEGV", UnreadableVideo, r"crashed on this file \(SIGSEGV\)"),
        (b"crash SIGABRT", UnreadableVideo, r"crashed on this file \(SIGABRT\)"),
        (b"crash SIGKILL", UnreadableVideo, "killed twice on this file"),
        (b"exit", UnreadableVideo, r"crashed on this file \(exit status 3\)"),
        (b"crash SIGXCPU", LimitExceeded, "longer than 20 s"),
        (b"answer not json", UnreadableVideo, "broke on this file"),
        (b"eat", UnreadableVideo, r"crashed on this file \(exit status 1\)"),
        (b"flood", UnreadableVideo, "broke on this file"),
        (b"answer " + b"x" * 60_000, UnreadableVideo, "broke on this file"),
    ],
)
@one_in(2, "order")
async def test_a_bad_end_is_named_and_the_next_file_served(
    pool: DecodePool, order: bytes, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await sample(pool, order)
    await still_works(pool)


async def test_a_captured_decoder_can_do_nothing(pool: DecodePool) -> None:
    with pytest.raises(UnreadableVideo) as refusal:
        await sample(pool, b"probe")
    found = json.loads(str(refusal.value))
    needed = {"PYTHONPATH", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX", "LC_ALL", "LD_LIBRARY_PATH"}
    assert set(found.pop("knows")) <= needed
    denied = dict.fromkeys(set(found) - {"write the video", "raise its limits", "take memory", "open many"}, "EPERM")
    others = {"write the video": "EBADF", "raise its limits": "ValueError", "take memory": "MemoryError"}
    assert found == {**denied, **others, "open many": "EMFILE"}


async def test_what_a_decoder_prints_becomes_events(pool: DecodePool) -> None:
    with structlog.testing.capture_logs() as events:
        with pytest.raises(UnreadableVideo, match="printed"):
            await sample(pool, b"print a\x1b[31mb\xff")
        await eventually(lambda: len(events) >= 3)
    lines = [event["line"] for event in events if event["event"] == "decoder.printed"]
    assert lines == ["one", "a?[31mb\N{REPLACEMENT CHARACTER}", "x" * 600]


async def test_a_hanging_decoder_is_ended_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.video.decoder_process.KILL_SLACK_S", 0.0)
    pool = make_pool(limits=DecodeLimits(timeout_s=0.5))
    try:
        with pytest.raises(LimitExceeded, match=r"longer than 0\.5 s"):
            await sample(pool, b"hang")
        pool._limits = LIMITS
        await still_works(pool)
    finally:
        pool.close()


async def test_cancelling_ends_the_work_at_once(pool: DecodePool) -> None:
    await still_works(pool)
    (decoder,) = pool._decoders
    pid, num_jobs = decoder.process.pid, decoder.num_jobs
    work = asyncio.create_task(sample(pool, b"hang"))
    await eventually(lambda: decoder.num_jobs > num_jobs)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    await eventually(lambda: not psutil.pid_exists(pid))
    await still_works(pool)


def wait_dead(process: psutil.Process) -> None:
    """Returns when a process of ours has ended, reaped or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


async def test_a_decoder_that_died_idle_is_replaced_unnoticed(pool: DecodePool) -> None:
    await still_works(pool)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_dead, psutil.Process(pid))  # on a busy machine it may still answer
    await still_works(pool)
    assert pool.pids != [pid]


async def test_a_decoder_killed_from_outside_in_its_work_is_tried_once_more(pool: DecodePool) -> None:
    tries: list[int] = []

    def kill_the_first(done: int, total: int) -> None:
        if not tries:
            os.kill(pid, signal.SIGKILL)
        tries.append(done)

    with file_of(make_clip(ClipSpec(even_times_ms(60), width=320, height=240))) as file:
        async with asyncio.timeout(120):
            while tries.count(1) != 2:  # else the decoder was done before it was killed
                await still_works(pool)
                (pid,) = pool.pids
                tries.clear()
                assert len((await pool.sample(file, 60, on_progress=kill_the_first)).frames) == 60


async def test_decoders_that_are_killed_together_cost_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' ends may not be seen yet when the first one's is."""
    pool, tries = make_pool(2), list[int]()

    def kill_all(done: int, total: int) -> None:
        if not tries:
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)
        tries.append(done)

    try:
        with file_of(make_clip(ClipSpec(even_times_ms(60), width=320, height=240))) as file:
            async with asyncio.timeout(120):
                while tries.count(1) != 2:  # else the decoder was done before it was killed
                    await asyncio.gather(still_works(pool), still_works(pool))
                    tries.clear()
                    with monkeypatch.context() as unseen:
                        unseen.setattr(Decoder, "is_alive", property(lambda decoder: not decoder.is_killed))
                        assert len((await pool.sample(file, 60, on_progress=kill_all)).frames) == 60
    finally:
        pool.close()


async def test_a_stop_signal_of_a_terminal_does_not_reach_decoders(pool: DecodePool) -> None:
    await still_works(pool)
    (pid,) = pool.pids
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    await still_works(pool)
    assert pool.pids == [pid]


async def test_decoders_are_renewed_after_some_jobs() -> None:
    pool = make_pool(max_jobs=2)
    try:
        seen = []
        for _ in range(4):
            await still_works(pool)
            seen += pool.pids
        assert len(set(seen)) == 3  # the successor of the second pair's decoder has started
    finally:
        pool.close()


async def test_callers_wait_their_turn_first_come_first_served(pool: DecodePool) -> None:
    begun: list[int] = []
    files = FileThreads(max_threads=1)  # several threads may be done with their files in another order

    async def work(number: int) -> None:
        with file_of(CLIP) as file:
            await pool.sample(
                file, 4, files=files, on_progress=lambda done, total: begun.append(number) if done == 1 else None
            )

    async with asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(work(number))
            await asyncio.sleep(0)
    assert begun == list(range(6))


async def test_two_may_read_one_file_at_the_same_time() -> None:
    pool = make_pool(num_workers=2)
    try:
        with file_of(CLIP) as file:
            videos = await asyncio.gather(*(pool.sample(file, 40) for _ in range(6)))
        for video in videos:
            np.testing.assert_array_equal(video.frames, videos[0].frames)
        assert len(pool.pids) == 2
    finally:
        pool.close()


async def test_closing_ends_all_who_wait() -> None:
    pool = make_pool()
    waiting = [asyncio.create_task(sample(pool, b"hang")) for _ in range(2)]
    await asyncio.sleep(0.3)
    pool.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServiceUnavailable] * 2
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        await sample(pool, CLIP)
    assert pool.pids == []


async def test_a_decoder_that_cannot_start_is_said_to_be_the_servers_fault() -> None:
    pool = DecodePool(1, LIMITS, module="tests.support.no_such_module")
    try:
        with pytest.raises(ServiceUnavailable, match="does not start"):
            await sample(pool, CLIP)
    finally:
        pool.close()


async def test_only_regular_files_are_handed_on(pool: DecodePool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with pytest.raises(InvalidRequest, match="regular file"):
                await pool.sample(descriptor, 4)
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("num_frames", [-1, 0, LIMITS.max_frames_sampled + 1])
async def test_unreasonable_numbers_of_frames_start_nothing(pool: DecodePool, num_frames: int) -> None:
    with pytest.raises(InvalidRequest, match="num_frames"):
        await sample(pool, CLIP, num_frames)


async def test_frames_are_freed_with_their_last_user(pool: DecodePool) -> None:
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:frames")

    await file_threads_rest()
    before, num_files = num_mapped(), len(os.listdir("/proc/self/fd"))
    videos = [await sample(pool, CLIP) for _ in range(3)]
    assert num_mapped() == before + 3
    videos.clear()
    with suppress(UnreadableVideo):
        await sample(pool, b"exit")
    await still_works(pool)
    assert num_mapped() == before
    await eventually(lambda: len(os.listdir("/proc/self/fd")) == num_files)


async def test_a_decoder_sees_videos_of_one_owner_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(num_workers=1)
    seen: dict[int, set[str]] = {}
    decode: Any = Decoder.run

    async def noted(decoder: Decoder, *job: Any) -> Any:
        seen.setdefault(decoder.process.pid, set()).add(str(decoder.owner))
        return await decode(decoder, *job)

    monkeypatch.setattr(Decoder, "run", noted)
    try:
        for owner in ("anna", "anna", "ben", "anna", "ben", "ben", "", "anna"):
            await sample(pool, CLIP, owner=owner)
            assert len(pool.pids) <= 2
    finally:
        pool.close()
    assert sorted(map(list, seen.values())) == [[""], ["anna"], ["anna"], ["anna"], ["ben"], ["ben"]]


async def test_a_spare_hides_the_start_when_owners_change() -> None:
    pool = make_pool(num_workers=1)
    try:
        await sample(pool, CLIP, owner="anna")
        await sample(pool, CLIP, owner="ben")
        (spare,) = [decoder for decoder in pool._decoders if decoder.owner is None]
        await spare.wait_ready()
        await sample(pool, CLIP, owner="anna")
        assert (spare.owner, spare.num_jobs) == ("anna", 1)
    finally:
        pool.close()


async def test_two_owners_with_a_decoder_each_replace_none() -> None:
    pool = make_pool(num_workers=2)
    try:
        await asyncio.gather(*(sample(pool, CLIP, owner=owner) for owner in ("anna", "ben")))
        before = set(pool.pids)
        for _ in range(3):
            await asyncio.gather(*(sample(pool, CLIP, owner=owner) for owner in ("ben", "anna")))
        assert before <= set(pool.pids)
    finally:
        pool.close()


async def test_a_pool_that_closes_waits_for_those_that_it_has_just_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[ConfinedProcess] = []

    gone = asyncio.Future[int]()

    async def not_yet(reap: Callable[[], int]) -> int:
        return await gone

    def noted(reaping: Reaping, process: ConfinedProcess) -> None:
        replaced.append(process)
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "to_thread", not_yet)
            add(reaping, process)

    add = Reaping.add
    monkeypatch.setattr(Reaping, "add", noted)
    pool = make_pool(max_jobs=1)
    with pytest.raises(InvalidRequest):
        await sample(pool, b"refuse")
    pool.close()
    assert [process.process.returncode for process in replaced] == [-signal.SIGKILL]
    gone.cancel()


async def test_what_decoders_could_not_give_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.video.decoder_process.PROTECTIONS", ("memory", "gravity"))
    told: list[dict[str, bool]] = []
    with structlog.testing.capture_logs() as events:
        pool = DecodePool(1, LIMITS, on_confined=told.append)
        try:
            for owner in ("anna", "ben"):
                await sample(pool, CLIP, owner=owner)
        finally:
            pool.close()
    assert told == [{"memory": True, "gravity": False}]
    assert [event["missing"] for event in events if event["event"] == "decoder.unprotected"] == [["gravity"]]
