"""In a checkout the services also start by the names of their own folder."""

import os
import signal
import sys
from pathlib import Path

import pytest

from slipstream.stack.local import Stack
from tests.support.processes import START_S, logged, new_process

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("started_afresh")]


async def test_a_gateway_by_its_folder(stack: Stack, tmp_path: Path) -> None:
    process = new_process("gateway", tmp_path, "--target", stack.processes["target"].address)
    process.argv = (sys.executable, "-m", "slipstream.services.gateway", *process.argv[3:])
    await process.start()
    try:
        await process.wait_serving(START_S)
        os.kill(process.pid, signal.SIGTERM)
        assert await process.wait_exit() == 0
    finally:
        process.kill()


@pytest.mark.parametrize("name", [pytest.param("target", marks=pytest.mark.long), "draft"])
async def test_a_model_service_by_its_folder(tmp_path: Path, name: str) -> None:
    process = new_process(name, tmp_path, "--model", "./nowhere")
    process.argv = (sys.executable, "-m", f"services.{name}", *process.argv[3:])
    await process.start()
    assert await process.wait_exit() == 2
    (entry,) = logged(process.log_path, "service.failed")
    assert "./nowhere" in entry["error"]
