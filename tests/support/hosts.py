"""An archive over the hosts of `tests.support.network`, each with a server of the queue's Redis, a sentinel, a target,
a draft and a gateway, which talk over TCP alone."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.stack.process import PROBE_TIMEOUT_S, ServiceProcess
from slipstream.stack.redis_server import find_server
from tests.support.cluster import Cluster
from tests.support.network import HOSTS, address, entering, plug_in, pull_out
from tests.support.redis_group import DOWN_AFTER_MS, GROUP, Place, Sentinels

TARGET_PORT, DRAFT_PORT, GATEWAY_PORT, REDIS_PORT, SENTINEL_PORT = 50051, 50052, 50053, 6379, 26379

REPLICA_GONE_S = 10
"""Until the leader drops a replica that has fallen silent; nothing is promised meanwhile."""


class PingedProcess(ServiceProcess):
    """A Redis server or a sentinel: it serves once it answers a PING."""

    async def _wait_healthy(self) -> None:
        await self._poll(self._answers)

    async def _answers(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False


class HostCluster(Cluster):
    """A cluster over all hosts. Each gateway has the target of its host and the draft of the next one, and all share
    the queue of one Redis group. Enter it within `inside`, after `make_network`."""

    @property
    def sentinels(self) -> Sentinels:
        """Those of the queue's Redis."""
        return Sentinels([Place(address(host), SENTINEL_PORT) for host in range(HOSTS)], HOSTS - 1)

    async def leading(self) -> int:
        """The host whose Redis leads, once all is well."""
        leader = await self.sentinels.settled()
        return next(host for host in range(HOSTS) if address(host) == leader.host)

    def on(self, host: int) -> list[str]:
        """Names of the processes of one host."""
        return [name for name in self.processes if name.endswith(f"-{host}")]

    @contextlib.contextmanager
    def held_host(self, host: int) -> Iterator[None]:
        """Within, none of its processes is started again."""
        with contextlib.ExitStack() as held:
            for name in self.on(host):
                held.enter_context(self.held(name))
            yield

    def switch_off(self, host: int) -> None:
        """The host and all of its processes at one moment."""
        pull_out(host)
        for name in self.on(host):
            self.thaw(name)
            self.kill(name)

    async def wait_whole(self) -> None:
        """Returns when every process serves and every server follows one leader."""
        for name in self.processes:
            await self.wait_serving(name)
        await self.sentinels.settled()

    async def __aenter__(self) -> Self:
        for host in range(HOSTS):
            plug_in(host)
        await super().__aenter__()
        await self.sentinels.settled()
        return self

    def _prepare(self) -> None:
        self.redis_url = f"sentinel://{','.join(map(str, self.sentinels.places))}/{GROUP}"
        for host in range(HOSTS):
            self._add_store(host)
            self._add_models(host)
        for host in range(HOSTS):
            self._add_gateway(host)

    def _add_store(self, host: int) -> None:
        leader = f"{address(0)} {REDIS_PORT}"
        role = "" if host == 0 else f"replicaof {leader}\n"
        kept = "appendonly yes\nappendfsync always\nsave ''\nmaxmemory-policy noeviction\n"
        kept += f"repl-timeout {REPLICA_GONE_S}\nrepl-ping-replica-period 2\n"
        watch = f"sentinel monitor {GROUP} {leader} 2\nsentinel down-after-milliseconds {GROUP} {DOWN_AFTER_MS}\n"
        watch += f"sentinel failover-timeout {GROUP} 5000\n"
        self._add_server(f"redis-{host}", host, REDIS_PORT, kept + role)
        self._add_server(f"sentinel-{host}", host, SENTINEL_PORT, watch, "--sentinel")

    def _add_server(self, name: str, host: int, port: int, lines: str, *flags: str) -> None:
        """Its configuration is a file, in which sentinels keep what they decided."""
        folder = self.run_dir / name
        folder.mkdir()
        config = folder / "server.conf"
        own = f"port {port}\nbind {address(host)}\nprotected-mode no\ndir {folder}\n"
        config.write_text(own + lines)
        self._add(PingedProcess, name, host, port, [find_server(), str(config), *flags])

    def _add_models(self, host: int) -> None:
        models = {"target": self.options.target_model, "draft": self.options.draft_model}
        for name, port in (("target", TARGET_PORT), ("draft", DRAFT_PORT)):
            self._add_service(name, host, port, ["--model", str(models[name]), "--threads", "1"])

    def _add_gateway(self, host: int) -> None:
        options = self.options
        flags = ["--target", f"{address(host)}:{TARGET_PORT}", "--draft", f"{address((host + 1) % HOSTS)}:{DRAFT_PORT}"]
        flags += ["--video-roots", str(options.video_root), "--redis", self.redis_url, "--redis-wait", "1"]
        flags += ["--lease-s", str(options.lease_s), "--archive-slots", str(options.slots)]
        self._add_service("gateway", host, GATEWAY_PORT, [*flags, "--archive-ahead", str(options.ahead)])

    def _add_service(self, service: str, host: int, port: int, flags: Sequence[str]) -> None:
        argv = [sys.executable, "-m", f"services.{service}", "--listen", f"{address(host)}:{port}", *flags]
        self._add(ServiceProcess, f"{service}-{host}", host, port, [*argv, *self.options.flags.get(service, ())])

    def _add(self, kind: type[ServiceProcess], name: str, host: int, port: int, argv: Sequence[str]) -> None:
        log: Path = self.run_dir / f"{name}.log"
        env = os.environ | {PARENT_PID_VARIABLE: str(os.getpid())}
        self.processes[name] = kind(name, [*entering(host), *argv], f"{address(host)}:{port}", log, env)
