"""How services end: SIGTERM lets open captions finish, a second one does not, and none outlives its parent."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from slipstream.errors import ServiceUnavailable
from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.rpc.calls import open_channel
from slipstream.rpc.guards import LEAVING, STOPPING
from slipstream.rpc.probe import probe
from slipstream.rpc.v1 import gateway_pb2_grpc
from slipstream.stack import local
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from tests.faults.conftest import ENDLESS, FragileStack, Strike
from tests.support.gateway_client import Captioned, caption, options_message, refusal
from tests.support.processes import START_S, STOP_S, eventually, logged, new_process, read_log, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")


def is_running(process: Path) -> bool:
    """Whether the process with this folder below /proc is there, and no zombie."""
    try:
        return "\nState:\tZ" not in (process / "status").read_text()
    except FileNotFoundError:
        return False


@pytest_asyncio.fixture(loop_scope="session")
async def patient(stack: Stack, tmp_path: Path) -> AsyncIterator[ServiceProcess]:
    """A gateway that would wait an hour for open captions."""
    process = new_process("gateway", tmp_path, "--target", stack.processes["target"].address, "--drain-s", "3600")
    await process.start()
    await process.wait_serving(START_S)
    yield process
    process.kill()


@pytest.mark.parametrize("name", ["gateway", "target", "draft"])
async def test_sigterm_lets_a_caption_finish(fragile: FragileStack, name: str) -> None:
    process = fragile.process(name)
    starts, exits = process.starts, asyncio.ensure_future(process.wait_exit())
    stop = Strike(lambda c: len(c.token_ids) >= 10, lambda: os.kill(process.pid, signal.SIGTERM))
    captioned = await fragile.caption(stop, max_new_tokens=96)
    assert captioned.summary.num_tokens == 96
    assert await exits == 0
    assert logged(process.log_path, "service.stopped")
    await fragile.stack.wait_started(name, starts + 1)
    await fragile.all_serving()
    await fragile.check(captioned)


async def test_sigterm_without_captions(stack: Stack, tmp_path: Path) -> None:
    async with running("gateway", tmp_path, "--target", stack.processes["target"].address) as process:
        os.kill(process.pid, signal.SIGTERM)
        assert await process.wait_exit() == 0
        assert [entry["event"] for entry in read_log(process.log_path)] == ["service.ready", "service.stopped"]


async def test_a_second_sigterm_ends_at_once(patient: ServiceProcess) -> None:
    async with open_channel(patient.address) as channel:
        call = gateway_pb2_grpc.GatewayStub(channel).Caption()
        await call.write(options_message())
        assert (await call.read()).stage.stage == "receive"
        os.kill(patient.pid, signal.SIGTERM)
        refused = None
        while refused is None or refused[0] != grpc.StatusCode.UNAVAILABLE:
            refused = await refusal(channel, [options_message()])
        assert refused[1] == LEAVING
        assert await probe(patient.address) == "NOT_SERVING", "a lame duck still says so"
        assert patient.exit_status is None and not call.done()
        os.kill(patient.pid, signal.SIGTERM)
        assert await asyncio.wait_for(patient.wait_exit(), 60) == 0
        assert await call.code() != grpc.StatusCode.OK
    read_log(patient.log_path)


async def test_whoever_ends_late_hears_of_a_second_sigterm(tmp_path: Path) -> None:
    """Such as the archive's worker, whose jobs may go on for longer than calls."""
    address, log = f"unix:{tmp_path / 's.sock'}", tmp_path / "fake.log"
    argv = (sys.executable, "-m", "tests.cli.fake_service", "--listen", address, "--behaviour", "linger")
    process = ServiceProcess("fake", argv, address, log, os.environ)
    await process.start()
    try:
        await process.wait_serving(START_S)
        os.kill(process.pid, signal.SIGTERM)
        await eventually(lambda: logged(log, "service.lingers"))
        os.kill(process.pid, signal.SIGTERM)
        assert await asyncio.wait_for(process.wait_exit(), 60) == 0
    finally:
        process.kill()


async def test_what_outlasts_the_drain_is_told(stack: Stack, tmp_path: Path) -> None:
    flags = ("--target", stack.processes["target"].address, "--drain-s", "0.2")
    async with running("gateway", tmp_path, *flags) as process, open_channel(process.address) as channel:
        upload = gateway_pb2_grpc.GatewayStub(channel).Caption()
        await upload.write(options_message())
        assert (await upload.read()).stage.stage == "receive"
        os.kill(process.pid, signal.SIGTERM)
        assert await upload.code() == grpc.StatusCode.UNAVAILABLE
        assert await upload.details() == STOPPING
        assert await process.wait_exit() == 0


async def test_a_busy_stack_ends_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service needs to be killed. How long it takes is measured by `bench.faults`, not here."""
    monkeypatch.setattr(local, "LAST_GRACE_S", STOP_S)
    options = replace(world.stack_options("--drain-s", "0.2"), target_model=world.endless_target(), stop_grace_s=STOP_S)
    begun = asyncio.Event()

    def note(captioned: Captioned) -> bool:
        if captioned.token_ids:  # the video is sent: a word that meets a message on its way may be lost
            begun.set()
        return False

    async with Stack(options) as stack, open_channel(stack.gateway_address) as channel:
        captioning = asyncio.create_task(
            caption(channel, world.clips[0], on_event=note, prompt=PROMPT, max_new_tokens=ENDLESS)
        )
        await begun.wait()
        leaving = asyncio.create_task(stack.__aexit__(None, None, None))
        with pytest.raises(ServiceUnavailable, match=STOPPING):
            await captioning
        await leaving
        assert {process.exit_status for process in stack.processes.values()} == {0}


@pytest.mark.usefixtures("started_afresh")
async def test_sigterm_while_it_starts(tmp_path: Path) -> None:
    gateway = new_process("gateway", tmp_path, "--target", "unix:/nowhere.sock")
    await gateway.start()
    await eventually(lambda: (tmp_path / "gateway.sock.lock").exists())
    await asyncio.sleep(0.5)
    os.kill(gateway.pid, signal.SIGTERM)
    assert await asyncio.wait_for(gateway.wait_exit(), 60) == 0
    read_log(gateway.log_path)


@pytest.mark.usefixtures("started_afresh")
async def test_a_draft_that_is_stopped_while_it_loads(world: World, tmp_path: Path) -> None:
    draft = new_process("draft", tmp_path, "--model", str(world.pair.draft), "--threads", "1")
    await draft.start()
    await eventually(lambda: (tmp_path / "draft.sock.lock").exists(), START_S)
    os.kill(draft.pid, signal.SIGTERM)
    assert await asyncio.wait_for(draft.wait_exit(), START_S) == 0
    read_log(draft.log_path)


async def test_no_service_outlives_its_parent(stack: Stack, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "slipstream.services.gateway", "--listen", f"unix:{tmp_path / 'g.sock'}", "--target"]
    script = (
        "import os, subprocess, sys, time\n"
        f"os.environ[{PARENT_PID_VARIABLE!r}] = str(os.getpid())\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *argv, stack.processes["target"].address, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = Path("/proc") / (await parent.stdout.readline()).decode().strip()
    await eventually((tmp_path / "g.sock").exists)
    assert is_running(child)
    parent.kill()
    await parent.wait()
    await eventually(lambda: not is_running(child))
