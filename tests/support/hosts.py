"""Three hosts on this machine, to be switched off and cut off: network namespaces on one bridge, each with a server of
the queue's Redis, a sentinel, a target, a draft and a gateway, which talk over TCP alone.

They are made in a network, a mount and a process namespace of their own (`inside`), so that nothing of them is left
when whoever made them ends, and none of them reaches anything else.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from slipstream.errors import InvalidConfig
from slipstream.rpc.server import PARENT_PID_VARIABLE
from slipstream.stack.process import PROBE_TIMEOUT_S, ServiceProcess
from slipstream.stack.redis_server import find_server
from tests.support.cluster import Cluster
from tests.support.redis_group import DOWN_AFTER_MS, GROUP, Place, Sentinels

HOSTS = 3
BRIDGE = "hosts"
TARGET_PORT, DRAFT_PORT, GATEWAY_PORT, REDIS_PORT, SENTINEL_PORT = 50051, 50052, 50053, 6379, 26379
_TOOLS = ("unshare", "nsenter", "ip", "mount", "sh")
_OWN = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def inside(command: Sequence[str]) -> list[str]:
    """The command, to run where hosts can be made, which end with it. Raises `InvalidConfig` where they cannot."""
    if missing := [name for name in _TOOLS if shutil.which(name) is None]:
        raise InvalidConfig(f"hosts need these programs (Debian: util-linux, iproute2): {', '.join(missing)}")
    for rights in ((), ("--user", "--map-root-user")):
        namespaces = ["unshare", *rights, *_OWN]
        if subprocess.run([*namespaces, "true"], capture_output=True).returncode == 0:
            # A shell as the first process of its namespace buries those whose parents were killed.
            return [*namespaces, "sh", "-c", '"$@"; exit $?', "sh", *command]
    raise InvalidConfig("hosts are network namespaces: run it as root, or where users may have namespaces of their own")


# -- network ----------------------------------------------------------------------------------------------------------


def address(host: int) -> str:
    """Of a host by its number; that of this process is the one beyond the last."""
    return f"10.77.0.{host + 1}"


def make_network() -> None:
    """The bridge, with this process on it, and no host yet."""
    _sh(f"mount -t tmpfs tmpfs /run && ip link set lo up && ip link add {BRIDGE} address {_mac(HOSTS)} type bridge")
    _sh(f"ip addr add {address(HOSTS)}/24 dev {BRIDGE} && ip link set {BRIDGE} up")


def plug_in(host: int) -> None:
    """A new host, on the bridge. All know each other's hardware addresses for good: with one that is asked for, whoever
    is cut off would be told so after a while, and a network that drops packets tells nobody."""
    name, port = _name(host), _port(host)
    _sh(f"ip netns add {name} && ip link add {port} type veth peer name eth0 address {_mac(host)} netns {name}")
    inner = f"ip -n {name}"
    _sh(f"{inner} link set lo up && {inner} addr add {address(host)}/24 dev eth0 && {inner} link set eth0 up")
    for other in set(range(HOSTS + 1)) - {host}:
        _sh(f"{inner} neigh replace {address(other)} lladdr {_mac(other)} dev eth0 nud permanent")
    _sh(f"ip neigh replace {address(host)} lladdr {_mac(host)} dev {BRIDGE} nud permanent")
    _sh(f"ip link set {port} up")
    mend(host)


def cut(host: int) -> None:
    """From now on all that it sends, and all that is sent to it, is lost without a word."""
    _sh(f"ip link set {_port(host)} nomaster")


def mend(host: int) -> None:
    """Ends a `cut`."""
    _sh(f"ip link set {_port(host)} master {BRIDGE}")


def pull_out(host: int) -> None:
    """Removes it, as when it is switched off: what its processes might still say reaches nobody."""
    _sh(f"ip link del {_port(host)} && ip netns del {_name(host)}")


def _name(host: int) -> str:
    return f"host-{host}"


def _port(host: int) -> str:
    return f"port-{host}"


def _mac(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"


def _sh(line: str) -> None:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{line}: {done.stderr.strip()}")


# -- processes --------------------------------------------------------------------------------------------------------


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
        words = ["nsenter", f"--net=/run/netns/{_name(host)}", *argv]
        self.processes[name] = kind(name, words, f"{address(host)}:{port}", log, env)
