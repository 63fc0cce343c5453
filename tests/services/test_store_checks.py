"""What a gateway asks the queue's store of how it keeps jobs, and which stores it takes."""

import asyncio
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from slipstream.archive import service as service_module
from slipstream.archive.queue import QueueUnavailable
from slipstream.archive.redis_failover import Keeping, ask_keeping
from slipstream.errors import InvalidConfig
from slipstream.stack.redis_server import EmbeddedServer
from tests.services.test_archive_service import CONFIG, Gateway
from tests.support.processes import eventually, free_ports
from tests.support.redis_group import RedisGroup


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"appendonly": "no"}, "keeps no log"),
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, "allkeys-lru evicts them"),
        ({"appendfsync": "everysec"}, "reaches the disk late \\(appendfsync everysec"),
    ],
)
async def test_a_store_that_may_lose_jobs_is_refused_unless_it_is_taken_as_it_is(
    settings: dict[str, str], reason: str, tmp_path: Path
) -> None:
    async with EmbeddedServer(tmp_path) as server, Redis.from_url(server.url) as redis:
        for name, value in settings.items():
            await redis.config_set(name, value)
        config = replace(CONFIG, redis=server.url)
        refused, warned = Gateway(config), Gateway(replace(config, redis_unsafe=True))
        with capture_logs() as logs:
            refused.archive.start()
            await asyncio.wait_for(refused.lifecycle.failed.wait(), 30)
            assert isinstance(refused.lifecycle.failure, InvalidConfig)
            assert re.search(reason, str(refused.lifecycle.failure))
            warned.archive.start()
            await eventually(lambda: any(entry["event"] == "queue.unsafe" for entry in logs))
        assert not warned.lifecycle.failed.is_set()
        for gateway in (refused, warned):
            await gateway.archive.close()


@pytest.mark.parametrize(
    ("commands", "replicas", "unasked", "ending"),
    [
        (("+ping",), 0, "INFO", "INFO"),
        (("+ping",), 1, "INFO", "as many replicas as --redis-wait says are waited for, not all"),
        (("+ping", "+info"), 1, "CONFIG GET appendfsync", "CONFIG GET appendfsync"),
        (("+ping", "+info", "+config|get"), 0, "", ""),
    ],
)
async def test_a_user_that_may_not_ask_is_warned_once(
    commands: tuple[str, ...],
    replicas: int,
    unasked: str,
    ending: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "LEADER_S", 0.01)
    questions = counted_questions(monkeypatch)
    async with EmbeddedServer(tmp_path) as server, Redis.from_url(server.url) as admin:
        await admin.execute_command("ACL", "SETUSER", "me", "on", ">secret", "~*", "nocommands", *commands)
        url = server.url.replace("unix://", "unix://me:secret@")
        gateway = Gateway(replace(CONFIG, redis=url, redis_wait=replicas))
        with capture_logs() as logs:
            gateway.archive.start()
            await eventually(lambda: len(questions) > 3)
        assert {each.unasked for each in questions} == {unasked} and not gateway.lifecycle.failed.is_set()
        warnings = [entry["reason"] for entry in logs if entry["event"] == "queue.unchecked"]
        assert len(warnings) == bool(unasked) and all(each.endswith(ending) for each in warnings)
        await gateway.archive.close()


def counted_questions(monkeypatch: pytest.MonkeyPatch) -> list[Keeping]:
    """What the store has said so far of how it keeps jobs."""
    said: list[Keeping] = []

    async def ask(url: str) -> Keeping:
        said.append(await ask_keeping(url))
        return said[-1]

    monkeypatch.setattr(service_module, "ask_keeping", ask)
    return said


def test_replicas_make_up_for_a_log_that_is_late_and_for_nothing_else() -> None:
    assert Keeping(flushes="everysec").fault(0) and not Keeping(flushes="everysec").fault(1)
    assert not Keeping(flushes="").fault(0) and not Keeping(flushes="always").fault(0)
    assert Keeping(forgets="it keeps no log").fault(2) == "it keeps no log"


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.long
async def test_who_leads_after_a_failover_is_asked_as_well(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replicas keep no log, which nobody has noticed so far."""
    monkeypatch.setattr(service_module, "LEADER_S", 0.05)
    questions = counted_questions(monkeypatch)
    async with RedisGroup(tmp_path, hasty=True) as group:
        first = await group.leader()
        for port in group.servers.keys() - {first}:
            async with Redis(host="127.0.0.1", port=port) as redis:
                await redis.config_set("appendonly", "no")
        gateway = Gateway(replace(CONFIG, redis=group.url, redis_wait=replicas))
        gateway.archive.start()
        await eventually(lambda: questions)
        await group.fail_over(0.0)
        await asyncio.wait_for(gateway.lifecycle.failed.wait(), 60)
        assert isinstance(gateway.lifecycle.failure, InvalidConfig)
        assert "may lose accepted jobs" in str(gateway.lifecycle.failure)
        assert len({each.run_id for each in questions}) == 2 and not questions[0].forgets and questions[-1].forgets
        await gateway.archive.close()


async def test_a_server_that_does_not_lead_is_not_judged(tmp_path: Path) -> None:
    """While it copies from its leader, its log is off."""
    one, two = free_ports(2)
    async with EmbeddedServer(tmp_path / "one", port=one), EmbeddedServer(tmp_path / "two", port=two):
        async with Redis(host="127.0.0.1", port=two) as redis:
            await redis.execute_command("REPLICAOF", "127.0.0.1", one)
        with pytest.raises(QueueUnavailable, match="does not lead"):
            await ask_keeping(f"redis://127.0.0.1:{two}")


async def test_who_has_no_descriptor_left_asks_later(tmp_path: Path) -> None:
    """The gateway had ended, and whatever it captioned with it."""
    held = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with EmbeddedServer(tmp_path) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, held[1]))
        try:
            with pytest.raises(QueueUnavailable, match="not reachable: Too many open files"):
                await ask_keeping(server.url)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, held)
        assert (await ask_keeping(server.url)).flushes == "always"


class SlowServer(EmbeddedServer):
    """Takes some seconds to load a few thousand writes, and hears callers meanwhile."""

    def _command(self) -> list[str]:
        return [*super()._command(), "--key-load-delay", "500"]

    async def _wait_ready(self) -> None:
        """Those who ask are to see it load."""


async def test_a_server_that_loads_is_not_judged(tmp_path: Path) -> None:
    """Until it has read its log that is off, and a restart of the queue's server would end all gateways."""
    async with EmbeddedServer(tmp_path) as server, Redis.from_url(server.url) as redis:
        writes = redis.pipeline(transaction=False)
        for number in range(6000):
            writes.set(f"key {number}", 1)
        await writes.execute()
    slow, heard = SlowServer(tmp_path), list[str]()
    await slow.start()
    try:

        async def kept() -> bool:
            try:
                keeping = await ask_keeping(slow.url)
            except QueueUnavailable as error:
                heard.append(str(error))
                return False
            assert not keeping.fault(0)
            return True

        await eventually(kept)
        assert any("loads its data" in each for each in heard)
    finally:
        await slow.close()


async def test_the_passwords_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that is taken away after the start ends no gateway."""
    monkeypatch.setattr(service_module, "LEADER_S", 0.01)
    questions = counted_questions(monkeypatch)
    password = tmp_path / "password"
    password.write_text("secret")
    async with EmbeddedServer(tmp_path) as server, Redis.from_url(server.url) as admin:
        await admin.config_set("requirepass", "secret")
        gateway = Gateway(replace(CONFIG, redis=server.url, redis_password_file=str(password)))
        gateway.archive.start()
        await eventually(lambda: questions)
        password.unlink()
        num_questions = len(questions)
        await eventually(lambda: len(questions) > num_questions + 1)
        assert not gateway.lifecycle.failed.is_set()
        await gateway.archive.close()


async def test_a_store_that_is_not_there_yet_is_asked_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "CHECK_S", 0.02)
    server = EmbeddedServer(tmp_path)
    gateway, asked = Gateway(replace(CONFIG, redis=server.url)), asyncio.Event()

    async def ask(url: str) -> Keeping:
        try:
            keeping = await ask_keeping(url)
        except QueueUnavailable:
            missed.set()
            raise
        asked.set()
        return keeping

    missed = asyncio.Event()
    monkeypatch.setattr(service_module, "ask_keeping", ask)
    gateway.archive.start()
    await asyncio.wait_for(missed.wait(), 30)
    async with server:
        await asyncio.wait_for(asked.wait(), 30)
        assert not gateway.lifecycle.failed.is_set()
        await gateway.archive.close()
