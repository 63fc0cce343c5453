"""The three services as child processes of this one: started together, restarted when they die, never left behind."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import NoReturn, Self

from slipstream.cli.launch import StackOptions, check_options, gateway_address, make_run_dir, service_argv
from slipstream.cli.process import ServiceProcess
from slipstream.cli.queue_server import QueueServer
from slipstream.errors import ServiceUnavailable, SlipstreamError
from slipstream.rpc.server import PARENT_PID_VARIABLE

STABLE_S = 1.0
"""A service that dies sooner after it was ready counts as one that never started."""
MAX_FAILED_STARTS = 3
FIRST_BACK_OFF_S = 0.25
REDIS_VARIABLE = "SLIPSTREAM_GATEWAY_REDIS"
"""Not a flag: a URL may hold a password, and command lines are public."""

__all__ = ["Stack", "StackOptions"]


class Stack:
    """A running local stack, as an async context manager: entered when all services are ready, left when all ended.

    With the archive there is also the server of its queue, unless one is given. `run_dir` is private and holds the
    sockets of the models and `<service>.log`, JSON lines. It is removed at the end, unless the stack failed.
    """

    def __init__(self, options: StackOptions | None = None, report: Callable[[str], None] = lambda line: None) -> None:
        self.options = options or StackOptions()
        self.processes: dict[str, ServiceProcess] = {}
        self.queue: QueueServer | None = None
        self.failure: SlipstreamError | None = None
        self._report = report
        self._failed = asyncio.Event()
        self._started = asyncio.Condition()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def gateway_address(self) -> str:
        """Where clients find the gateway."""
        return self.processes["gateway"].address

    async def __aenter__(self) -> Self:
        check_options(self.options)
        address = gateway_address(self.options.listen)
        self.run_dir = make_run_dir()
        try:
            await self._start_queue()
            self._prepare(address)
            await self._start_together(process for name, process in self.processes.items() if name != "gateway")
            await self._start_together([self.processes["gateway"]])
        except BaseException as error:
            await self._shut_down(keep_logs=isinstance(error, SlipstreamError))
            raise
        if self.options.restart:
            self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._shut_down(keep_logs=self.failure is not None)

    async def wait_failed(self) -> NoReturn:
        """Sleeps until a service cannot be kept running, then raises why."""
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    async def wait_started(self, name: str, starts: int) -> None:
        """Returns when the service is ready after having been started that often: 2 after its first death."""
        process = next(child for child in self._children if child.name == name)
        async with self._started:
            await self._started.wait_for(lambda: process.starts >= starts and process.is_serving)

    @property
    def _children(self) -> list[ServiceProcess | QueueServer]:
        return [*self.processes.values(), *([] if self.queue is None else [self.queue])]

    def _prepare(self, address: str) -> None:
        names = ["target", "gateway"] if self.options.draft_model is None else ["target", "draft", "gateway"]
        addresses = {name: f"unix:{self.run_dir / name}.sock" for name in names} | {"gateway": address}
        env = os.environ | self.options.env | {PARENT_PID_VARIABLE: str(os.getpid())}
        if self.options.archive:
            env |= {REDIS_VARIABLE: self.options.redis if self.queue is None else self.queue.server.url}
        for name in names:
            argv = service_argv(self.options, name, addresses)
            self.processes[name] = ServiceProcess(name, argv, addresses[name], self.run_dir / f"{name}.log", env)

    async def _start_queue(self) -> None:
        """Runs a server for the archive's queue, where one is wanted and none is given."""
        if self.options.archive and not self.options.redis:
            self.queue = QueueServer((self.options.data or self.run_dir) / "redis")
            await self._start(self.queue)

    async def _start_together(self, children: Iterable[ServiceProcess | QueueServer]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(self._start(child))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start(self, process: ServiceProcess | QueueServer) -> None:
        await process.start()
        await process.wait_serving(self.options.start_timeout_s)
        async with self._started:
            self._started.notify_all()

    async def _keep(self, process: ServiceProcess | QueueServer) -> None:
        failed_starts = 0
        while True:
            await process.wait_exit()
            failed_starts = 0 if process.served_s >= STABLE_S else failed_starts + 1
            error = process.exit_error()
            if failed_starts >= MAX_FAILED_STARTS:
                self.failure = ServiceUnavailable(f"{error}; it died {failed_starts} times in a row")
                self._failed.set()
                return
            self._report(f"{error}; starting it again")
            await asyncio.sleep(FIRST_BACK_OFF_S * 2**failed_starts)
            try:
                await self._start(process)
            except (SlipstreamError, OSError):
                process.kill()

    async def _shut_down(self, keep_logs: bool) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        try:
            await asyncio.gather(*(process.stop(self.options.stop_grace_s) for process in self.processes.values()))
            if self.queue is not None:  # after the gateway, which hands its jobs back
                await self.queue.stop(self.options.stop_grace_s)
        finally:
            for child in self._children:
                child.kill()
            if not keep_logs:
                shutil.rmtree(self.run_dir, ignore_errors=True)
