"""What tests fork is what a stack would start: a process of its own, that ends as others do."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from slipstream.stack.local import Stack
from tests.support.forked_services import fork_server_pids
from tests.support.processes import START_S, new_process, our_children, read_log, running

pytestmark = pytest.mark.asyncio(loop_scope="session")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
async def test_its_group_its_log_its_end(stack: Stack, tmp_path: Path, number: int, status: int) -> None:
    process = new_process("gateway", tmp_path, "--target", stack.processes["target"].address)
    for _ in range(2):
        await process.start()
        await process.wait_serving(START_S)
        assert parent_of(process.pid) in fork_server_pids() and process.pid in our_children()
        assert os.getpgid(process.pid) == process.pid
        assert read_log(process.log_path)[-1]["pid"] == process.pid
        os.kill(process.pid, number)
        assert await process.wait_exit() == process.exit_status == status
        assert process.pid not in our_children() and not process.is_serving
    await process.stop(START_S)


async def test_what_imports_would_see_is_not_forked(stack: Stack, tmp_path: Path) -> None:
    target = ("--target", stack.processes["target"].address)
    async with running("gateway", tmp_path, *target, HF_HUB_OFFLINE="1") as process:
        assert parent_of(process.pid) == os.getpid()


async def test_it_does_not_outlive_the_process_that_it_is_bound_to(stack: Stack, tmp_path: Path) -> None:
    """Which is not its parent any more, or never was."""
    target = ("--target", stack.processes["target"].address)
    process = new_process("gateway", tmp_path, *target, SLIPSTREAM_PARENT_PID="1")
    await process.start()
    assert await asyncio.wait_for(process.wait_exit(), START_S) == 0
