"""The queue on a real server that is frozen, killed, full or strict: durable or refused, never in between."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from slipstream.archive import redis_store
from slipstream.archive.compactor import Compactor
from slipstream.archive.feeder import Feeder
from slipstream.archive.queue import (
    BatchSpec,
    JobState,
    Lease,
    Outcome,
    QueuePolicy,
    QueueUnavailable,
)
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.redis_store import NOT_NOW
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import FilePlan, SpillQueue
from slipstream.archive.worker import Worker
from slipstream.errors import InvalidConfig
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import DONE, queue_at, specs, until


async def retried(call: Any) -> Any:
    """The call's answer, made again until the store takes it."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(QueueUnavailable):
                return await call()
            await asyncio.sleep(0.05)


async def total(queue: RedisQueue) -> int:
    return (await queue.get_batch("batch")).total


async def num_done(queue: RedisQueue) -> int:
    return (await queue.get_batch("batch")).counts[JobState.DONE]


async def test_what_was_accepted_survives_kill_and_running_jobs_commit_later(server: EmbeddedServer) -> None:
    async with queue_at(server.url) as queue:
        await queue.open_batch(BatchSpec("batch"))
        await queue.submit("batch", specs(*map(str, range(50))))
        (lease,) = await queue.take("w", 1)
        await server.kill()
        for call in (
            queue.ping(),
            queue.submit("batch", specs("new")),
            queue.finish(lease, DONE),
            queue.beat([lease], {}),
        ):
            with pytest.raises(QueueUnavailable, match="not reachable"):
                await call
        await server.start()
        assert await queue.finish(lease, DONE)
        assert await total(queue) == 50
        assert len(await queue.take("w", 100)) == 49


async def test_a_frozen_store_fails_fast_and_a_take_without_answer_is_repeated(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with queue_at(server.url) as queue:
        await queue.open_batch(BatchSpec("batch"))
        await queue.submit("batch", specs("a", "b"))
        await queue.take("w", 0)  # the server knows the script, so that one message is all it takes
        monkeypatch.setattr(redis_store, "CALL_S", 0.3)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(QueueUnavailable):
                await queue.take("w", 1)
            with pytest.raises(QueueUnavailable):
                await queue.submit("batch", specs("c"))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        monkeypatch.setattr(redis_store, "CALL_S", 5.0)

        async def was_taken() -> bool:  # what was sent while it was frozen is carried out now
            return (await queue.depth()).running > 0

        await until(was_taken)
        (lease,) = await queue.take("w", 1)
        assert (lease.custom_id, lease.epoch, lease.crashes) == ("a", 1, 0)
        assert [lease.custom_id for lease in await queue.take("w", 1)] == ["b"]
        await queue.submit("batch", specs("c"))
        assert await total(queue) == 3


async def test_a_freeze_longer_than_the_lease_makes_no_healthy_job_run_twice(server: EmbeddedServer) -> None:
    policy = QueuePolicy(lease_s=1.5)
    runs: list[str] = []
    started, may_end = asyncio.Event(), asyncio.Event()

    async def handler(lease: Lease, progress: Any) -> Outcome:
        runs.append(lease.custom_id)
        started.set()
        await may_end.wait()
        return DONE

    async with queue_at(server.url, policy) as one, queue_at(server.url, policy) as other:
        await one.open_batch(BatchSpec("batch"))
        await one.submit("batch", specs("a"))
        workers = [Worker(one, handler, slots=2), Worker(other, handler, slots=2)]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.run())
            await started.wait()
            os.kill(server.pid, signal.SIGSTOP)
            await asyncio.sleep(2 * policy.lease_s)
            os.kill(server.pid, signal.SIGCONT)
            await asyncio.sleep(policy.lease_s)
            may_end.set()
            await until(lambda: num_done(one))
            for worker in workers:
                worker.stop()
    assert runs == ["a"]


async def test_a_call_that_is_cancelled_at_any_moment_ends_its_task(server: EmbeddedServer) -> None:
    async with queue_at(server.url) as queue:

        async def call_forever() -> None:
            while True:
                await queue.depth()

        for num_ticks in range(200):
            task = asyncio.create_task(call_forever())
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=60)
            assert task.cancelled(), f"cancelled after {num_ticks} ticks, and it went on"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a full disk takes a mount of its own")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_on_a_full_disk_nothing_is_accepted_that_is_not_durable(small_disk: Path) -> None:
    async with EmbeddedServer(small_disk) as server, queue_at(server.url) as queue:
        await queue.open_batch(BatchSpec("batch"))
        accepted = 0
        with contextlib.suppress(QueueUnavailable):
            while accepted < 10_000:
                job = replace(specs(str(accepted))[0], payload='"' + "x" * 5000 + '"')
                await queue.submit("batch", [job])
                accepted += 1
        assert 0 < accepted < 10_000
        resize = await asyncio.create_subprocess_exec("mount", "-o", "remount,size=64m", str(small_disk))
        assert await resize.wait() == 0
        if server.is_running:
            await server.kill()
        await retried(server.start)
        assert await retried(lambda: total(queue)) in (accepted, accepted + 1)
        assert await queue.submit("batch", specs("more")) == ["added"]


async def test_a_server_that_would_not_write_is_unavailable_and_says_why(server: EmbeddedServer) -> None:
    async with queue_at(server.url) as queue, Redis.from_url(server.url) as redis:
        await queue.open_batch(BatchSpec("batch"))
        await redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(QueueUnavailable, match="replicas"):
            await queue.ping()
        await redis.config_set("min-replicas-to-write", 0)
        await redis.config_set("maxmemory", 1000)
        with pytest.raises(QueueUnavailable, match="memory"):
            await queue.submit("batch", specs("a"))
        await redis.config_set("maxmemory", 0)
        assert await queue.submit("batch", specs("a")) == ["added"]


COMMANDS = (
    "+evalsha +eval +script|load +time +exists +hget +hset +hdel +hmget +hgetall +hincrby +hincrbyfloat +get +set +del "
    "+pexpire +lrange +rpush +ltrim +llen +zadd +zrem +zcard +zrange +zrangebyscore +zrevrange +xadd +xlen +xack +xdel "
    "+xclaim +xpending +xrange +xreadgroup +xgroup|create +ping"
)
COMMANDS_OF_FILES = "+hstrlen +setbit +getbit"
"""And these, where results leave the store."""


async def test_a_user_with_the_listed_commands_on_its_own_keys_is_enough(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    async with Redis.from_url(server.url) as admin:
        await admin.execute_command(
            *("ACL", "SETUSER", "slipstream", "on", ">secret", "~{slipstream}:*", "nocommands", *COMMANDS.split())
        )
    async with queue_at(server.url.replace("unix://", "unix://slipstream:secret@")) as queue:
        await queue.open_batch(BatchSpec("batch", owner="me"))
        await queue.submit("batch", specs("a", "b", "c"))
        first, second, third = await queue.take("w", 3)
        await queue.beat([first], {first.job_id: "x"})
        assert await queue.retry(first, "x", 5.0) and await queue.crash(second, "x")
        for key in ("dropped", "kept"):
            assert await queue.open_parts(third, key, 1, "all") and await queue.put_note(third, "n", b"x")
            assert await queue.find_note(third, "n") == b"x" and await queue.put_part(third, 0, b"x", {"t": 1.0})
        assert len((await queue.list_parts("batch", third.job_id))[0]) == 1
        assert await queue.finish(third, replace(DONE, content_key="k", tallies={"t": 1.0}))
        assert await queue.find_result("k") == DONE.result
        assert await queue.cancel_batch("batch") == 2 and await queue.retry_dead(
            "batch", frozenset({JobState.CANCELLED})
        )
        await queue.list_batches("me"), await queue.list_jobs("batch"), await queue.depth(), await queue.sweep()
        await queue.num_busy()
        await queue.seal_batch("batch")
        await queue.ping()
    await _spill_with_the_listed_commands(server, tmp_path)
    async with queue_at(server.url.replace("unix://", "unix://slipstream:wrong@")) as queue:
        with pytest.raises(QueueUnavailable, match=r"(?i)password"):
            await queue.ping()


@pytest.mark.parametrize(
    ("less", "more"), [("-time", "+time"), ("-xadd", "+xadd"), ("-evalsha", "+evalsha"), ("resetkeys", "allkeys")]
)
async def test_a_user_who_may_not_now_may_later(server: EmbeddedServer, less: str, more: str) -> None:
    """In a script and outside: nothing is damaged by that, so what was made waits."""
    async with Redis.from_url(server.url) as admin, queue_at(server.url) as queue:
        await queue.open_batch(BatchSpec("batch", owner="me"))
        await admin.execute_command("ACL", "SETUSER", "default", less)
        with pytest.raises(QueueUnavailable, match="refuses"):
            await queue.submit("batch", specs("a"))
        await admin.execute_command("ACL", "SETUSER", "default", more)
        assert set(await queue.submit("batch", specs("a"))) <= {"added", "known"}


async def test_a_replica_without_its_leader_is_not_damaged(server: EmbeddedServer) -> None:
    """It may be told to answer nothing then (MASTERDOWN)."""
    async with Redis.from_url(server.url) as redis, queue_at(server.url) as queue:
        await queue.open_batch(BatchSpec("batch", owner="me"))
        await redis.config_set("replica-serve-stale-data", "no")
        await redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        for ask in (lambda: queue.get_batch("batch"), lambda: queue.take("w", 1)):
            with pytest.raises(QueueUnavailable, match=r"refuses: Link with MASTER is down"):
                await cast(Any, ask)()
        await redis.execute_command("REPLICAOF", "NO", "ONE")
        assert await queue.submit("batch", specs("a")) == ["added"]


def test_what_older_servers_say_of_a_user_in_a_script() -> None:
    """Redis 6.2."""
    for what in ("run this command or subcommand", "access at least one of the keys mentioned"):
        assert NOT_NOW.search(f"The user executing the script can't {what}")


async def _spill_with_the_listed_commands(server: EmbeddedServer, folder: Path) -> None:
    async with Redis.from_url(server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "slipstream", *COMMANDS_OF_FILES.split())
    url, files = server.url.replace("unix://", "unix://slipstream:secret@"), ResultsFolder(f"file://{folder}/results")
    queue = SpillQueue(url, files, policy=QueuePolicy(queue_bytes=400_000))
    try:
        compactor, feeder = Compactor(queue, files, 1, 0.0), Feeder(queue, files)
        await queue.open_batch(BatchSpec("spilled", owner="me"))
        names = [str(number) for number in range(150)]
        await queue.submit("spilled", specs(*names))
        while leases := await queue.take("w", 10):
            for lease in leases:
                assert await queue.open_parts(lease, "key", 1) and await queue.put_part(lease, 0, b"x", {})
                assert await queue.finish(lease, replace(DONE, content_key=lease.custom_id))
            while await compactor.step() or await feeder.step():
                pass
        jobs, _ = await queue.list_jobs("spilled", limit=500)
        assert [job.custom_id for job in jobs] == names
        assert [part.data for part in (await queue.list_parts("spilled", jobs[0].job_id))[0]] == [b"x"]
        await queue.put_off_file(FilePlan("spilled", 0, ()), 1.0), await queue.pass_turn("spilled"), await queue.sweep()
    finally:
        await queue.close()


async def test_callers_that_hold_all_connections_hinder_no_worker(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand watchers of one tenant must not make another's leases expire."""
    calls: list[str] = []
    queue = RedisQueue(redis_url, "lanes", connections=2, on_call=lambda script, seconds: calls.append(script))
    try:
        await queue.open_batch(BatchSpec("batch"))
        await queue.submit("batch", specs("a", "b"))
        monkeypatch.setattr(redis_store, "CALL_S", 60.0)
        await asyncio.gather(*(queue.list_batches() for _ in range(500)))
        assert all(queue._store._clients[use].connection_pool.max_connections <= 4 for use in queue._store._clients)
        pool = queue._store._clients[""].connection_pool
        held = [await pool.get_connection() for _ in range(2)]
        monkeypatch.setattr(redis_store, "CALL_S", 0.2)
        with pytest.raises(QueueUnavailable):
            await queue.list_batches()
        monkeypatch.setattr(redis_store, "CALL_S", 5.0)
        first, second = await queue.take("w", 2)
        assert await queue.beat([first], {}) == ["keep"]
        assert await queue.finish(first, DONE) and await queue.retry(second, "x", 0.0)
        await queue.ping()
        for connection in held:
            await pool.release(connection)
        assert len(await queue.list_batches()) == 1
        assert {"submit", "batches", "take", "beat", "finish", "retry", "ping"} <= set(calls)
    finally:
        await queue.close()


async def test_turns_survive_the_death_of_the_store(server: EmbeddedServer) -> None:
    async with queue_at(server.url) as queue:
        for owner in ("a", "b"):
            await queue.open_batch(BatchSpec(owner, owner))
            await queue.submit(owner, specs(*(f"{owner}{index}" for index in range(20)), cost=2))
        (last,) = await queue.take("w", 1)
        for _ in range(6):
            await server.kill()
            await server.start()
            (lease,) = await retried(lambda: queue.take("w", 1))
            assert lease.owner != last.owner
            last = lease


async def test_nobody_there_and_nonsense(tmp_path: Path) -> None:
    async with queue_at(f"unix://{tmp_path}/no.sock") as queue:
        with pytest.raises(QueueUnavailable, match="not reachable"):
            await queue.ping()
    for nonsense in ("http://localhost", "foo://x", "localhost", "redis://x:port", "redis://x?db=y", ""):
        with pytest.raises(InvalidConfig, match="--redis: no URL of a Redis server"):
            RedisQueue(nonsense)


async def test_why_a_server_is_not_reachable_is_said(tmp_path: Path) -> None:
    queue = RedisQueue(f"unix://{tmp_path}/none.sock")
    with pytest.raises(QueueUnavailable, match=r"none\.sock.*No such file"):
        await queue.ping()
    await queue.close()


async def test_why_sentinels_tell_of_no_leader_is_said() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while commands := (await reader.read(65_536)).count(b"*"):
            writer.write(b"-NOAUTH Authentication required.\r\n" * commands)
        writer.close()

    strict = await asyncio.start_server(refuse, "127.0.0.1")
    queue = RedisQueue(f"sentinel://127.0.0.1:{strict.sockets[0].getsockname()[1]}/mine")
    with pytest.raises(
        QueueUnavailable, match=r"0 of 1 sentinels answer, .* leads mine; asking one failed: Authentication"
    ):
        await queue.ping()
    await queue.close()
    strict.close()
