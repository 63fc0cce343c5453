"""A leader, two replicas and three sentinels on this machine, to be cut off and killed."""

import asyncio
import contextlib
import os
import random
import signal
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from slipstream.stack.redis_server import EmbeddedServer, find_server

GROUP = "queue"
SENTINELS, REPLICAS = 3, 2
DOWN_AFTER_MS = 1000
SETTLE_S = 120.0


def free_ports(number: int) -> list[int]:
    """Distinct ports that nobody has now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class RedisGroup:
    """As an async context manager: entered when all replicas follow the leader and all sentinels know them."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(1 + REPLICAS + SENTINELS)
        self._folder = folder
        self.servers = {port: EmbeddedServer(folder / str(port), port=port) for port in ports[: 1 + REPLICAS]}
        self._sentinel_ports = ports[1 + REPLICAS :]
        self._sentinels: list[asyncio.subprocess.Process] = []

    @property
    def url(self) -> str:
        """What a `RedisQueue` is given."""
        return "sentinel://" + ",".join(f"127.0.0.1:{port}" for port in self._sentinel_ports) + f"/{GROUP}"

    async def __aenter__(self) -> Self:
        try:
            leader, *replicas = self.servers
            for server in self.servers.values():
                await server.start()
            for port in replicas:
                await self._tell(port, "REPLICAOF", "127.0.0.1", leader)
            for port in self._sentinel_ports:
                await self._start_sentinel(port, leader)
            await self.settled()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    async def leader(self) -> int:
        """The port of the server that the sentinels agree on; 0 while they do not."""
        told = {await self._ask(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", GROUP) for port in self._sentinel_ports}
        return int(next(iter(told))[1]) if len(told) == 1 and None not in told else 0

    async def settled(self) -> int:
        """The leader, once all others follow it and the sentinels know of all."""
        async with asyncio.timeout(SETTLE_S):
            while not (port := await self.leader()) or not await self._is_whole(port):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return port

    async def fail_over(self, cut_s: float) -> None:
        """Cuts the replicas off from the leader, which goes on alone for so long and is then lost. Returns when another
        one leads and the old one follows it."""
        port = await self.settled()
        others = [server for each, server in self.servers.items() if each != port]
        for server in others:
            os.kill(server.pid, signal.SIGSTOP)
        await self._tell(port, "CLIENT", "KILL", "TYPE", "REPLICA")
        await asyncio.sleep(cut_s)
        await self.servers[port].kill()
        for server in others:
            os.kill(server.pid, signal.SIGCONT)
        async with asyncio.timeout(SETTLE_S):
            while await self.leader() in (0, port):  # noqa: ASYNC110 (the sentinels decide)
                await asyncio.sleep(0.05)
        await self.servers[port].start()
        await self.settled()

    @contextlib.asynccontextmanager
    async def no_replicas(self) -> Any:
        """Within, no replica answers."""
        port = await self.settled()
        others = [server for each, server in self.servers.items() if each != port]
        for server in others:
            os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for server in others:
                os.kill(server.pid, signal.SIGCONT)

    async def _is_whole(self, port: int) -> bool:
        facts = await self._ask(port, "INFO", "replication") or {}
        online = [each for name, each in facts.items() if name.startswith("slave") and isinstance(each, dict)]
        known = [await self._ask(each, "SENTINEL", "CKQUORUM", GROUP) for each in self._sentinel_ports]
        return sum(each.get("state") == "online" for each in online) == REPLICAS and all(known)

    async def _ask(self, port: int, *words: object) -> Any:
        """None: it does not answer, or answers with an error."""
        try:
            return await self._tell(port, *words)
        except (RedisError, OSError):
            return None

    async def _tell(self, port: int, *words: object) -> Any:
        async with Redis(port=port, socket_timeout=2, socket_connect_timeout=2, decode_responses=True) as client:
            answer = await client.execute_command(*words)
            return tuple(answer) if isinstance(answer, list) else answer

    async def _start_sentinel(self, port: int, leader: int) -> None:
        folder = self._folder / f"sentinel-{port}"
        folder.mkdir(parents=True)
        lines = [f"port {port}", f"dir {folder}", "bind 127.0.0.1", f"sentinel monitor {GROUP} 127.0.0.1 {leader} 2"]
        lines += [
            f"sentinel down-after-milliseconds {GROUP} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {GROUP} 5000",
        ]
        config = folder / "sentinel.conf"
        config.write_text("\n".join(lines) + "\n")
        with (folder / "log").open("wb") as log:
            words = (find_server(), str(config), "--sentinel")
            self._sentinels.append(await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log))

    async def _stop(self) -> None:
        for sentinel in self._sentinels:
            with contextlib.suppress(ProcessLookupError):
                sentinel.kill()
            await sentinel.wait()
        for server in self.servers.values():
            if server.is_running:
                os.kill(server.pid, signal.SIGCONT)
                await server.kill()
            await server.close()


def cut_seconds(chance: random.Random) -> float:
    """How long a leader goes on alone before it is lost."""
    return chance.uniform(0.3, 1.5)
