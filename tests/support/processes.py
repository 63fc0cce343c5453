"""Single services as processes, outside any stack: to be stopped, killed and started wrongly; and their logs."""

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from inspect import isawaitable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.stack.addresses import gateway_address
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from tests.support.forked_services import fork_server_pids

START_S, STOP_S = 240.0, 30.0


def free_ports(number: int) -> list[int]:
    """Distinct ports that nobody has now, nor is given meanwhile: the system assigns none of these, and each worker of
    the tests has its own."""
    return [int(gateway_address(None).rpartition(":")[2]) for _ in range(number)]


def new_process(name: str, folder: Path, *flags: str, listen: str = "", **env: str) -> ServiceProcess:
    """A service that is not started yet; it listens at `<folder>/<name>.sock` and logs beside it."""
    folder.mkdir(exist_ok=True)
    address = listen or f"unix:{folder / name}.sock"
    argv = [sys.executable, "-m", f"slipstream.services.{name}", "--listen", address, *flags]
    environ = os.environ | {PARENT_PID_VARIABLE: str(os.getpid())} | env
    return ServiceProcess(name, argv, address, folder / f"{name}.log", environ)


@contextlib.asynccontextmanager
async def running(name: str, folder: Path, *flags: str, listen: str = "", **env: str) -> AsyncIterator[ServiceProcess]:
    """A service that serves."""
    process = new_process(name, folder, *flags, listen=listen, **env)
    await process.start()
    try:
        await process.wait_serving(START_S)
        yield process
    finally:
        await process.stop(STOP_S)


@contextlib.asynccontextmanager
async def all_running(*services: AbstractAsyncContextManager[ServiceProcess]) -> AsyncIterator[list[ServiceProcess]]:
    """Several that were made by `running`, started together."""
    async with contextlib.AsyncExitStack() as exits:
        yield await asyncio.gather(*map(exits.enter_async_context, services))


async def failed_start(name: str, folder: Path, *flags: str, **env: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status of a service that cannot start, and all that it logged."""
    process = new_process(name, folder, *flags, **env)
    await process.start()
    try:
        status = await asyncio.wait_for(process.wait_exit(), START_S)
    finally:
        process.kill()
    return status, read_log(process.log_path)


def model_flags(checkpoint: Path, *more: str) -> tuple[str, ...]:
    """Flags of a model service."""
    return ("--model", str(checkpoint), "--threads", "1", *more)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The log's lines, each of which must be a JSON object."""
    return _entries(path.read_text())


def _entries(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    entries = [_parse(line) for line in lines]
    assert None not in entries, f"not JSON: {lines[entries.index(None)]}"
    return [entry for entry in entries if entry is not None]


def logged(path: Path, event: str, **fields: object) -> list[Mapping[str, Any]]:
    """The entries of that event that have these fields, as far as they are written: a service may be at the next."""
    wanted, text = {"event": event} | fields, path.read_text()
    return [entry for entry in _entries(text[: text.rfind("\n") + 1]) if wanted.items() <= entry.items()]


def check_logs(stack: Stack) -> None:
    """The logs of all services are JSON from end to end, and tell of no failure inside one of them."""
    for process in stack.processes.values():
        failures = [entry for entry in read_log(process.log_path) if entry["level"] in ("error", "critical")]
        assert not failures, failures[0]


def our_children() -> set[int]:
    """Ids of the processes that this one started, or had forked, and that still exist."""
    servers = fork_server_pids()
    return set().union(*map(_children, (os.getpid(), *servers))) - servers


def _children(pid: int) -> set[int]:
    """Of all threads of a process, which may end meanwhile."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, path.read_text().split()))
    return found


async def file_threads_rest() -> None:
    """Returns when no thread opens, reads or closes a file."""
    await eventually(lambda: not any(thread.name == "files" for thread in threading.enumerate()))


def is_running(pid: int) -> bool:
    """Also when it is stopped; a zombie runs no more."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Returns when the condition holds, which may have to be awaited; fails the test when it does not for long."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if await holds if isawaitable(holds) else holds:
                return
            await asyncio.sleep(0.01)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None
