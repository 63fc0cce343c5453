"""Real processes for a fault run: a Redis-compatible server, a target, a draft and some gateways that share the queue;
each is started again when it dies, as an orchestrator would.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import psutil  # type: ignore[import-untyped]

from slipstream import AsyncCaptioner, connect_async
from slipstream.errors import SlipstreamError
from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.rpc.calls import open_channel
from slipstream.stack.process import POLL_S, RunFolder, ServiceProcess
from slipstream.stack.redis_server import EmbeddedServer

START_TIMEOUT_S = 240.0
STOP_GRACE_S = 10.0
RESTART_AFTER_S = 0.5


@dataclass(frozen=True)
class ClusterOptions:
    """What to start. Logs and sockets lie in a run folder, which is removed after a run that ended well."""

    target_model: Path
    draft_model: Path | None
    video_root: Path
    gateways: int = 2
    slots: int = 2
    """Jobs that a gateway runs at once; 0: no queue and no Redis."""
    ahead: int = 0
    """Videos that it decodes ahead. A gateway that holds few jobs loses few, and has a place for a lost one soon."""
    lease_s: float = 5.0
    redis_dir: Path | None = None
    """Where the queue's store keeps its files; None: in the run folder."""
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """More flags, by service."""

    @property
    def places(self) -> int:
        """Jobs that a gateway holds at most."""
        return self.slots + self.ahead


class RedisProcess(ServiceProcess):
    """The embedded server. It serves as soon as it is started, with all that was acknowledged before."""

    def __init__(self, folder: Path) -> None:
        self._server = EmbeddedServer(folder)
        super().__init__("redis", (), self._server.url, self._server.log_path, {})
        self._status: int | None = None

    @property
    def url(self) -> str:
        """What gateways are given."""
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def exit_status(self) -> int | None:
        return None if self._server.is_running else self._status

    @property
    def is_serving(self) -> bool:
        return self._serving_since is not None and self._server.is_running

    async def start(self) -> None:
        self._serving_since = None
        await self._server.start()
        self.starts += 1
        self._serving_since = time.monotonic()

    async def wait_serving(self, timeout_s: float) -> None:
        """It does since `start` returned."""

    async def wait_exit(self) -> int:
        self._status = await self._server.wait_exit()
        return self._status

    async def stop(self, grace_s: float) -> None:
        await self._server.stop()

    def kill(self) -> None:
        """Nothing to do: `stop` kills what does not end."""


class Cluster:
    """The processes, as an async context manager: entered when all serve, left when none is there any more."""

    def __init__(self, options: ClusterOptions, report: Callable[[str], None] = lambda line: None) -> None:
        self.options = options
        self.processes: dict[str, ServiceProcess] = {}
        self.redis_url = ""
        self._report = report
        self._held: set[str] = set()
        self._keepers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._folder = RunFolder()
        self.run_dir = self._folder.path
        self._prepare()
        try:
            await self._start_all([name for name in self.processes if name not in self.gateways])
            await self._start_all(self.gateways)
        except BaseException:
            await self._shut_down()
            raise
        self._keepers = [asyncio.create_task(self._keep(name)) for name in self.processes]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._shut_down()
        if error is None:
            self._folder.close()

    @property
    def gateways(self) -> list[str]:
        """Names of the gateways' processes."""
        return [f"gateway-{index}" for index in range(self.options.gateways)]

    def log(self, name: str) -> Path:
        """The log of all starts of a process."""
        return self.processes[name].log_path

    @contextlib.asynccontextmanager
    async def channel(self, gateway: str = "gateway-0") -> AsyncIterator[grpc.aio.Channel]:
        """A channel to one gateway."""
        async with open_channel(self.processes[gateway].address) as channel:
            yield channel

    def captioner(self, gateway: str = "gateway-0") -> AsyncCaptioner:
        """A client of one gateway, to be entered or closed."""
        return connect_async(self.processes[gateway].address)

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Within, the process is not started again."""
        self._held.add(name)
        try:
            yield
        finally:
            self._held.discard(name)

    def kill(self, name: str) -> None:
        """SIGKILL to the process alone: what it started must end by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[name].pid, signal.SIGKILL)

    def freeze(self, name: str) -> None:
        """SIGSTOP to the process and what it started."""
        self._signal_group(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self._signal_group(name, signal.SIGCONT)

    async def wait_serving(self, name: str, starts: int = 1) -> None:
        """Returns when the process serves after having been started that often."""
        process = self.processes[name]
        async with asyncio.timeout(START_TIMEOUT_S):
            while not (process.is_serving and process.starts >= starts):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(POLL_S)

    def memory_bytes(self) -> dict[str, int]:
        """Resident bytes of each process and what it started."""
        return {name: _resident_bytes(process.pid) for name, process in self.processes.items()}

    def _prepare(self) -> None:
        options, env = self.options, os.environ | {PARENT_PID_VARIABLE: str(os.getpid())}
        models = {"target": options.target_model, "draft": options.draft_model}
        addresses = {name: f"unix:{self.run_dir / name}.sock" for name in (*models, *self.gateways)}
        gateway_flags = ["--target", addresses["target"], "--video-roots", str(options.video_root)]
        if options.draft_model is not None:
            gateway_flags += ["--draft", addresses["draft"]]
        if options.slots:
            folder = options.redis_dir or self.run_dir / "redis"
            folder.mkdir(exist_ok=True)
            redis = self.processes["redis"] = RedisProcess(folder)
            self.redis_url = redis.url
            gateway_flags += ["--redis", redis.url, "--lease-s", str(options.lease_s)]
            gateway_flags += ["--archive-slots", str(options.slots), "--archive-ahead", str(options.ahead)]
        flags = {name: ["--model", str(model), "--threads", "1"] for name, model in models.items() if model}
        flags |= {name: gateway_flags for name in self.gateways}
        for name, own in flags.items():
            service = name.partition("-")[0]
            argv = [sys.executable, "-m", f"services.{service}", "--listen", addresses[name], *own]
            argv += options.flags.get(service, ())
            self.processes[name] = ServiceProcess(name, argv, addresses[name], self.run_dir / f"{name}.log", env)

    async def _start_all(self, names: Sequence[str]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for name in names:
                    group.create_task(self._start(self.processes[name]))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start(self, process: ServiceProcess) -> None:
        await process.start()
        await process.wait_serving(START_TIMEOUT_S)

    async def _keep(self, name: str) -> None:
        process = self.processes[name]
        while True:
            await process.wait_exit()
            self._report(f"{name} ended ({process.exit_status}); starting it again")
            await asyncio.sleep(RESTART_AFTER_S)
            while name in self._held:  # noqa: ASYNC110 (whoever holds it says nothing)
                await asyncio.sleep(POLL_S)
            try:
                await self._start(process)
            except (SlipstreamError, OSError) as error:
                self._report(str(error))
                process.kill()

    def _signal_group(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[name].pid, number)

    async def _shut_down(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for name, process in self.processes.items():
            if process.starts and process.exit_status is None:
                self.thaw(name)
        try:
            order = [[name for name in self.processes if (name in self.gateways) is first] for first in (True, False)]
            for names in order:
                await asyncio.gather(*(self.processes[name].stop(STOP_GRACE_S) for name in names))
        finally:
            for process in self.processes.values():
                process.kill()


def _resident_bytes(pid: int) -> int:
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in family:
        with contextlib.suppress(psutil.Error):
            total += member.memory_info().rss
    return total
