"""The front as a process: how it ends, and what its readiness costs whoever asks how often."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from slipstream.errors import InvalidConfig
from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.services.front import readiness
from slipstream.services.front.gateways import Gateways
from slipstream.services.front.process import run
from slipstream.services.front.readiness import Readiness
from tests.cli.fake_gateway import FakeGateway
from tests.front.test_http_errors import HANG, body_of
from tests.support.front import CHAT, front_at, front_process, post, raw, status_of
from tests.support.processes import eventually, logged

GET_READY = b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def listens(host: str, port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex((host, port)) == 0


async def test_a_second_signal_ends_it_at_once(gateway: FakeGateway, tmp_path: Path) -> None:
    front = front_process(gateway.address, tmp_path, "--drain-s", "600")
    await front.start()
    try:
        await front.wait_serving(240)
        host, _, port = front.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(post(CHAT, body_of(HANG, stream=True)))
        await reader.readuntil(b"A red")
        os.kill(front.pid, signal.SIGTERM)
        await eventually(lambda: not listens(host, int(port)))  # the first one has come
        os.kill(front.pid, signal.SIGTERM)
        rest = await asyncio.wait_for(reader.read(), 60)
        assert b"data: [DONE]" in rest and await asyncio.wait_for(front.wait_exit(), 60) == 0
        writer.close()
    finally:
        await front.stop(30)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_the_log_says_where_it_listens(gateway: FakeGateway, tmp_path: Path, host: str) -> None:
    front = front_process(gateway.address, tmp_path, host=host)
    await front.start()
    try:
        await front.wait_serving(240)
        await eventually(lambda: logged(front.log_path, "service.ready"))  # it may answer just before it says so
        (ready,) = logged(front.log_path, "service.ready")
        assert ready["address"] == front.address
    finally:
        await front.stop(30)


async def test_it_serves_where_nobody_hears_its_log(gateway: FakeGateway, tmp_path: Path) -> None:
    front = front_process(gateway.address, tmp_path)
    front.argv = ("sh", "-c", 'exec "$@" >&- 2>&-', "sh", *front.argv)
    await front.start()
    try:
        await front.wait_serving(240)
        os.kill(front.pid, signal.SIGTERM)
        assert await asyncio.wait_for(front.wait_exit(), 60) == 0
    finally:
        await front.stop(30)


async def test_a_folder_that_cannot_be_ends_the_start(gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"--data: '.*/file/data' cannot be such a folder: Not a directory"):
        async with front_at(gateway.address, data=str(tmp_path / "file" / "data")):
            pass


async def test_many_who_ask_whether_it_is_ready_share_one_look(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, health = [], Gateways.health

    async def counted(gateways: Gateways) -> dict[str, dict[str, str]]:
        looks.append(gateways)
        return await health(gateways)

    monkeypatch.setattr(Gateways, "health", counted)
    monkeypatch.setattr(readiness, "KEPT_S", 600.0)
    async with front_at(gateway.address, data=str(tmp_path)) as address:
        answers = await asyncio.gather(*(raw(address, GET_READY) for _ in range(30)))
        assert len(looks) == 1 and len({status_of(answer) for answer in answers}) == 1


async def test_who_goes_away_takes_nobodys_answer_along(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __init__(self) -> None:
            self.go_on, self.looks = asyncio.Event(), 0

        async def health(self) -> dict[str, dict[str, str]]:
            self.looks += 1
            await self.go_on.wait()
            return {"a:1": {"gateway": "SERVING", "archive": "SERVING"}}

    monkeypatch.setattr(readiness, "KEPT_S", 0.0)
    gateways = Slow()
    ready = Readiness(gateways, "")  # type: ignore[arg-type]
    gone, stays = [asyncio.create_task(ready.find()) for _ in range(2)]
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait({gone})
    gateways.go_on.set()
    assert (await stays).is_ready and gateways.looks == 1
    assert (await ready.find()).is_ready and gateways.looks == 2


def test_a_parent_that_is_no_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--gateway", "127.0.0.1:1"], {PARENT_PID_VARIABLE: "12x"}) == 2
    assert "'12x' is no process id" in "".join(capsys.readouterr())
