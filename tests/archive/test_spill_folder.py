"""A folder of results that is in disorder: nothing is lost, and what it does not concern goes on."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from redis.asyncio import Redis

from slipstream.archive import result_reader
from slipstream.archive.queue import BatchSpec, BatchState, DamagedRecord, JobState
from slipstream.archive.results_folder import ResultsFolder
from slipstream.errors import InvalidConfig, ObjectUnavailable, PermissionDenied
from tests.archive.spilled import NAMES, Spill, files_in
from tests.archive.worlds import DONE, specs


@pytest.fixture
async def spill(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Spill]:
    made = Spill(redis_url, f"file://{tmp_path}", request.node.name)
    yield made
    await made.queue.close()


async def test_a_chunk_that_cannot_be_read_holds_up_its_own_batch_alone(
    spill: Spill, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await spill.fill(*NAMES)
    await spill.queue.open_batch(BatchSpec("neighbour", "me"))
    await spill.queue.submit("neighbour", specs(*NAMES[:10]))
    (chunk,) = files_in(tmp_path, "chunk-*")
    kept = chunk.read_bytes()
    chunk.write_bytes(kept[:-5])
    async with asyncio.timeout(120):
        while (await spill.queue.get_batch("neighbour")).counts[JobState.DONE] < 10:
            for lease in await spill.queue.take("w", 20):
                await spill.queue.finish(lease, DONE)
            await spill.feeder.step(), await spill.compactor.step()
    assert "feed.unreadable" in (said := capsys.readouterr().out) and chunk.name in said
    assert (await spill.queue.get_batch("batch")).counts[JobState.QUEUED] == 50
    chunk.write_bytes(kept)
    await spill.work()
    assert [(job.custom_id, job.state) for job in await spill.list()] == [(name, JobState.DONE) for name in NAMES]


async def test_what_is_written_is_on_the_disk_also_where_somebody_was_killed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Redis forgets what is in a file, and a loss of power takes what the kernel alone has."""
    written: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: written.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    base = tmp_path / "ü %41#"
    folder = ResultsFolder(f"file://{str(base).replace('%', '%25')}")
    for _ in range(2):
        written.clear()
        assert await folder.put("batch/part", b"lines") is None
        assert written == [str(path) for path in (base / "batch/part", base / "batch", base)]
    folders_alone = Mock(side_effect=[None, OSError(errno.EINVAL, ""), OSError(errno.EINVAL, "")])
    monkeypatch.setattr(os, "fsync", folders_alone)  # as on some shares
    assert await folder.put("batch/other", b"lines") is None
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ObjectUnavailable, match="No space left"):
        await folder.put("batch/another", b"lines")


@contextmanager
def unmounted(folder: Path) -> Iterator[None]:
    """Its disk is away, and what is there instead stays as it is."""
    disk = folder.rename(folder.with_name("disk"))
    folder.mkdir()
    yield
    folder.rmdir()
    disk.rename(folder)


async def test_nothing_is_written_where_a_disk_was_mounted(
    spill: Spill, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody would see it there once the disk is back, and Redis would have forgotten it."""
    await spill.folder.check()
    await spill.fill(*NAMES)
    with unmounted(tmp_path):
        for lease in await spill.queue.take("w", 50):
            await spill.queue.finish(lease, DONE)
        while await spill.compactor.step():
            pass
        with pytest.raises(ObjectUnavailable, match="is gone, so this is not the folder that it was: mount it again"):
            await spill.queue.submit("batch", specs("one that has no room"))
    assert "results.not_written" in capsys.readouterr().out
    async with Redis.from_url(spill.url) as redis:
        await redis.hdel(f"{{{spill.name}}}:b:batch", "blocked")
    await spill.work()
    assert [(job.custom_id, job.state) for job in await spill.list()] == [(name, JobState.DONE) for name in NAMES]


async def test_who_starts_ahead_of_the_disk_with_the_results_waits_for_it(
    spill: Spill, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await spill.queue.check_folder()
    await spill.fill(*NAMES[:60])
    await spill.work(30)
    assert files_in(tmp_path, "part-*")
    again = Spill(spill.url, f"file://{tmp_path}", spill.name)
    with unmounted(tmp_path):
        await again.queue.check_folder()
        with pytest.raises(ObjectUnavailable, match="mount it again"):
            await again.folder.put("batch/part", b"lines")
    assert "results.away" in capsys.readouterr().out
    assert await again.folder.put("batch/part", b"lines") is None
    await again.queue.close()


async def test_files_that_were_put_there_again_are_read(
    spill: Spill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a backup: the same bytes, and another object for the store."""
    monkeypatch.setattr(result_reader, "CACHE_BYTES", 0)
    await spill.fill(*NAMES)
    await spill.work()
    before = await spill.list()
    files = files_in(tmp_path, "part-*.jsonl.gz")
    assert len(files) > 1
    for file in files:
        copy = file.with_suffix(".copy")
        copy.write_bytes(file.read_bytes())
        copy.replace(file)
    assert await spill.list() == before


@pytest.mark.parametrize("num_fed", [0, 4])
async def test_a_batch_that_is_cancelled_ends_without_a_chunk_that_is_gone(
    spill: Spill, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_fed: int
) -> None:
    await spill.fill(*NAMES)
    (chunk,) = files_in(tmp_path, "chunk-*")
    while (due := await spill.queue.next_chunk("another")) is None:
        for lease in await spill.queue.take("w", 20):
            await spill.queue.finish(lease, DONE)
        await spill.compactor.step()
    assert not num_fed or await spill.queue.feed(due, 0, specs(*NAMES[100 : 100 + num_fed]))
    chunk.unlink()
    async with Redis.from_url(spill.url) as redis:
        await redis.delete(f"{{{spill.name}}}:feeder")
    await spill.work()
    assert (await spill.state(), "feed.unreadable" in capsys.readouterr().out) == (BatchState.IN_PROGRESS, True)
    assert (await spill.queue.get_batch("batch")).counts[JobState.QUEUED] == 50 - num_fed
    await spill.queue.cancel_batch("batch")
    await spill.work()
    assert "feed.given_up" in capsys.readouterr().out
    counts = (await spill.queue.get_batch("batch")).counts
    assert (counts[JobState.DONE], counts[JobState.CANCELLED]) == (100 + num_fed, 50 - num_fed)
    assert await spill.state() is BatchState.CANCELLED and len(await spill.list()) == 100 + num_fed
    assert "chunks" not in await spill.keys() and (await spill.queue.depth()).queued == 0


async def test_a_damaged_entry_of_a_finished_job_holds_up_its_own_batch_alone(
    spill: Spill, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await spill.fill(*NAMES[:3])
    await spill.queue.open_batch(BatchSpec("neighbour", "me"))
    await spill.queue.submit("neighbour", specs("n"))
    for lease in await spill.queue.take("w", 20):
        await spill.queue.finish(lease, DONE)
    async with Redis.from_url(spill.url) as redis:
        ended = f"{{{spill.name}}}:b:batch:ended"
        kept = (await redis.lrange(ended, 0, 0))[0]  # type: ignore[misc]
        await redis.lset(ended, 0, "\x1f" + kept.decode())  # type: ignore[misc]
        await spill.compactor.step(), await spill.compactor.step()
        assert "results.not_written" in (said := capsys.readouterr().out) and "neighbour/part-neighbour-00000" in said
        assert not files_in(tmp_path, "part-*")
        await redis.lset(ended, 0, kept)  # type: ignore[misc]
        await redis.hdel(f"{{{spill.name}}}:b:batch", "blocked")  # type: ignore[misc]
    await spill.work()
    assert files_in(tmp_path, "part-*.jsonl.gz")


async def test_a_damaged_entry_of_a_chunk_holds_up_its_own_batch_alone(spill: Spill) -> None:
    await spill.fill(*NAMES)
    await spill.queue.open_batch(BatchSpec("neighbour", "me"))
    await spill.queue.submit("neighbour", specs(*NAMES[:3]))
    async with Redis.from_url(spill.url) as redis:
        chunks = f"{{{spill.name}}}:b:batch:chunks"
        kept = (await redis.lrange(chunks, 0, 0))[0]  # type: ignore[misc]
        await redis.lset(chunks, 0, "\x1f")  # type: ignore[misc]
        for lease in await spill.queue.take("w", 100):
            await spill.queue.finish(lease, DONE)
        while await spill.compactor.step():
            pass
        with pytest.raises(DamagedRecord):
            await spill.feeder.step()
        assert await spill.feeder.step()
        assert len(await spill.queue.take("w", 5)) == 3
        await redis.lset(chunks, 0, kept)  # type: ignore[misc]
    await spill.work()
    assert (await spill.queue.get_batch("batch")).counts[JobState.DONE] == 150


async def test_a_folder_without_rights_loses_nothing(
    spill: Spill, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(name: str, data: bytes) -> bytes | None:
        raise PermissionDenied("the credentials of this server do not open it")

    await spill.fill(*NAMES[:20])
    for lease in await spill.queue.take("w", 20):
        await spill.queue.finish(lease, DONE)
    with monkeypatch.context() as closed:
        closed.setattr(spill.folder, "put", refuse)
        with pytest.raises(InvalidConfig, match="--results-to: the credentials"):
            await spill.folder.check()
        while await spill.compactor.step():
            pass
        assert "results.not_written" in capsys.readouterr().out
        with pytest.raises(PermissionDenied):
            await spill.fill(*NAMES)
    assert len([key for key in await spill.keys() if key.startswith("j:")]) == 100, "what had room is there"
    async with Redis.from_url(spill.url) as redis:
        await redis.hdel(f"{{{spill.name}}}:b:batch", "blocked")
    await spill.fill(*NAMES)
    await spill.work()
    assert [(job.custom_id, job.state) for job in await spill.list()] == [(name, JobState.DONE) for name in NAMES]


async def _snapshot(redis: Any, prefix: str) -> dict[bytes, bytes]:
    return {key: await redis.dump(key) for key in await redis.keys(f"{prefix}*")}


async def _go_back(redis: Any, prefix: str, kept: dict[bytes, bytes]) -> None:
    await redis.delete(*await redis.keys(f"{prefix}*"))
    for key, data in kept.items():
        await redis.restore(key, 0, data)


async def test_a_gateway_reads_the_files_of_a_store_that_came_back_without_its_latest_writes(spill: Spill) -> None:
    """As behind a failover: it knows of a file in whose place there is another, of other jobs."""
    prefix = f"{{{spill.name}}}:"
    await spill.fill(*NAMES[:5])
    await spill.work()
    async with Redis.from_url(spill.url) as redis:
        kept = await _snapshot(redis, prefix)
        await spill.fill(*NAMES[5:10])
        await spill.work()
        assert [job.custom_id for job in await spill.list()] == NAMES[:10]
        await _go_back(redis, prefix, kept)
    assert [job.custom_id for job in await spill.list()] == NAMES[:5]
    await spill.fill(*NAMES[20:25])
    await spill.work()
    await spill.fill(*NAMES[30:35])
    await spill.work()
    assert [job.custom_id for job in await spill.list()] == [*NAMES[:5], *NAMES[20:25], *NAMES[30:35]]
