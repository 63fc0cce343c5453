"""A service whose device is lost ends, whatever still waits for the device."""

import subprocess
import sys
from pathlib import Path

from slipstream.errors import DeviceLost

SERVICE = """
import asyncio, threading

from slipstream.errors import DeviceLost
from slipstream.rpc.server import run_service
from slipstream.rpc.service_options import ServiceOptions


async def setup(server, config, lifecycle):
    async def close():
        threading.Event().wait()  # as for a thread in a collective whose other ranks are gone

    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)  # as a copy from the device
    asyncio.get_running_loop().call_later(0.1, lifecycle.fail, DeviceLost("gone"))
    return close


run_service("lost", ServiceOptions, setup)
"""


def test_nothing_that_waits_for_a_lost_device_is_waited_for(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", SERVICE, "--listen", f"unix:{tmp_path / 'socket'}"]
    assert subprocess.run(argv, timeout=60, check=False).returncode == DeviceLost.exit_code
