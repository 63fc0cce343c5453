"""A leader, two replicas and three sentinels on this machine, to be cut off and killed."""

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from slipstream.stack.redis_server import EmbeddedServer, find_server
from tests.support.processes import free_ports

GROUP = "queue"
SENTINELS, REPLICAS = 3, 2
DOWN_AFTER_MS = 1000
SETTLE_S = 120.0
HASTE = {"info-period": 300, "ask-period": 300, "publish-period": 300, "ping-period": 200, "slave-reconf-timeout": 1000}
"""What sentinels else do every 1 to 10 s, in milliseconds."""
HEARD_S = 12.0
"""Until a leader that was deposed has heard of it, as a rule; who uses it is to find out before."""
HOST = "127.0.0.1"


class Place(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Sentinels:
    """Those of a group, as anybody may ask them about it."""

    places: Sequence[Place]
    replicas: int
    """That follow the leader when all are well."""

    async def leader(self) -> Place | None:
        """The server that the sentinels agree on; None while they do not."""
        told = {await _ask(place, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", GROUP) for place in self.places}
        if len(told) != 1 or None in told:
            return None
        ((host, port),) = told
        return Place(host, int(port))

    async def settled(self) -> Place:
        """The leader, once all others follow it, with all that it had when they were seen to, and the sentinels know of
        all. Who has just been sent the data is called a follower long before it has loaded them."""
        written: dict[Place, int] = {}
        async with asyncio.timeout(SETTLE_S):
            while True:
                if (place := await self.leader()) is not None and await self._is_whole(place):
                    leads, *follow = await self._offsets(place)
                    if min(follow, default=0) >= written.setdefault(place, leads):
                        return place
                await asyncio.sleep(0.05)

    async def _offsets(self, leader: Place) -> list[int]:
        """How much the leader has written, and how much of it each server has that follows."""
        facts = await _ask(leader, "INFO", "replication") or {}
        follow = [each["offset"] for name, each in facts.items() if name.startswith("slave") and isinstance(each, dict)]
        return [int(facts.get("master_repl_offset", 0)), *map(int, follow)]

    async def _is_whole(self, leader: Place) -> bool:
        facts = await _ask(leader, "INFO", "replication") or {}
        online = [each for name, each in facts.items() if name.startswith("slave") and isinstance(each, dict)]
        known = [await _ask(each, "SENTINEL", "CKQUORUM", GROUP) for each in self.places]
        return sum(each.get("state") == "online" for each in online) == self.replicas and all(known)


async def _ask(place: Place, *words: object) -> Any:
    """None: it does not answer, or answers with an error."""
    try:
        return await _tell(place, *words)
    except (RedisError, OSError):
        return None


async def _tell(place: Place, *words: object) -> Any:
    client = Redis(host=place.host, port=place.port, socket_timeout=2, socket_connect_timeout=2, decode_responses=True)
    async with client:
        answer = await client.execute_command(*words)
        return tuple(answer) if isinstance(answer, list) else answer


_SWITCHED = re.compile(r"^\d+:X (\d+ \w+ \d+ [\d:.]+) # \+switch-master ", re.MULTILINE)


def failovers(logs: Iterable[str]) -> list[tuple[float, float]]:
    """When the group of these sentinels, which have logged so, had no one leader: from when the old one seemed gone
    until it had surely heard that another one leads. Unix time."""
    told = (datetime.strptime(moment, "%d %b %Y %H:%M:%S.%f") for log in logs for moment in _SWITCHED.findall(log))
    found: list[tuple[float, float]] = []
    for at in sorted(moment.timestamp() for moment in told):
        began, ended = at - DOWN_AFTER_MS / 1000, at + HEARD_S
        if found and began <= found[-1][1]:
            began, _ = found.pop()
        found.append((began, ended))
    return found


class RedisGroup:
    """As an async context manager: entered when all replicas follow the leader and all sentinels know them. With
    `hasty` sentinels a failover takes half its time; they know better what each replica has."""

    def __init__(self, folder: Path, *, hasty: bool = False) -> None:
        self._is_hasty = hasty
        ports = free_ports(1 + REPLICAS + SENTINELS)
        self._folder = folder
        self.servers = {port: EmbeddedServer(folder / str(port), port=port) for port in ports[: 1 + REPLICAS]}
        self._sentinel_ports = ports[1 + REPLICAS :]
        self._watching = Sentinels([Place(HOST, port) for port in self._sentinel_ports], REPLICAS)
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
                await _tell(Place(HOST, port), "REPLICAOF", HOST, leader)
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
        place = await self._watching.leader()
        return place.port if place else 0

    async def settled(self) -> int:
        """The leader, once all others follow it and the sentinels know of all."""
        return (await self._watching.settled()).port

    async def fail_over(self, cut_s: float) -> None:
        """Cuts the replicas off from the leader, which goes on alone for so long and is then lost; 0: they follow it to
        its end. Returns when another one leads and the old one follows it."""
        port = await self.settled()
        others = [server for each, server in self.servers.items() if each != port and cut_s]
        for server in others:
            os.kill(server.pid, signal.SIGSTOP)
        if cut_s:
            await _tell(Place(HOST, port), "CLIENT", "KILL", "TYPE", "REPLICA")
            await asyncio.sleep(cut_s)
        await self.servers[port].kill()
        for server in others:
            os.kill(server.pid, signal.SIGCONT)
        async with asyncio.timeout(SETTLE_S):
            while await self.leader() in (0, port):  # noqa: ASYNC110 (the sentinels decide)
                await asyncio.sleep(0.05)
        await self.servers[port].start()
        await self.settled()

    async def depose(self) -> None:
        """Sentinels make another one the leader; the old one lives on, and hears of it late. Returns when all follow
        the new one."""
        old = await self.settled()
        await _tell(Place(HOST, self._sentinel_ports[0]), "SENTINEL", "FAILOVER", GROUP)
        while await self.leader() in (0, old):  # noqa: ASYNC110 (the sentinels decide)
            await asyncio.sleep(0.05)
        await self.settled()

    @contextlib.asynccontextmanager
    async def no_replicas(self, number: int = REPLICAS) -> Any:
        """Within, none answers, or so many do not."""
        port = await self.settled()
        others = [server for each, server in self.servers.items() if each != port][:number]
        for server in others:
            os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for server in others:
                os.kill(server.pid, signal.SIGCONT)

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
        if self._is_hasty:
            await self._hasten(Place(HOST, port))

    @staticmethod
    async def _hasten(sentinel: Place) -> None:
        words = [word for setting in HASTE.items() for word in setting]
        async with asyncio.timeout(SETTLE_S):
            while True:
                try:
                    await _tell(sentinel, "SENTINEL", "DEBUG", *words)
                    return
                except RedisError:  # it does not listen yet
                    await asyncio.sleep(0.02)

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
