"""A Docker engine to check with: the one that runs here, or a private one, from Debian's packages if need be.

A private engine keeps all it has below the work folder. What dockerd changes in the kernel (packet filter, bridges,
forwarding) is put back when it has ended.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.compose_check.packages import install_engine
from bench.compose_check.steps import CheckFailed, Steps, run, wait_until, works

IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
INTERFACES = Path("/sys/class/net")
TABLES = ("filter", "nat")


def has_daemon() -> bool:
    """Whether a daemon and compose v2 can be used as things are."""
    return works(["docker", "info"], timeout_s=20) and works(["docker", "compose", "version"], timeout_s=20)


def has_engine() -> bool:
    """Whether the programs are installed."""
    return shutil.which("dockerd") is not None and works(["docker", "compose", "version"], timeout_s=20)


@contextmanager
def private_engine(steps: Steps, work: Path) -> Iterator[Mapping[str, str]]:
    """Runs a daemon of our own; yields the environment that leads `docker` to it. Needs to be root."""
    if os.geteuid() != 0:
        raise CheckFailed("no Docker daemon answers, and only root can start one; start Docker, or run this as root")
    if not has_engine():
        with steps.step("install the engine"):
            install_engine(work)
    kernel = KernelState()
    daemon: subprocess.Popen[bytes] | None = None
    environ = {"DOCKER_HOST": f"unix://{work / 'docker.sock'}"}
    try:
        with steps.step("start the engine") as row:
            daemon = _start_daemon(work, environ)
            row["version"] = run(
                ["docker", "version", "--format", "{{.Server.Version}}"], timeout_s=20, environ=environ
            ).strip()
            row["compose"] = run(["docker", "compose", "version", "--short"], timeout_s=20, environ=environ).strip()
        yield environ
    finally:
        with steps.step("stop the engine") as row:
            if daemon is not None:
                _stop_daemon(daemon, work)
            kernel.restore()
            row["left"] = kernel.leftovers()


def _start_daemon(work: Path, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    log = work / "dockerd.log"
    places = {"--data-root": "data", "--exec-root": "exec", "--pidfile": "dockerd.pid"}
    words = [word for flag, name in places.items() for word in (flag, str(work / name))]
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            ["dockerd", *words, "-H", environ["DOCKER_HOST"]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def answers() -> bool:
        if daemon.poll() is not None:
            raise CheckFailed(f"dockerd ended with {daemon.returncode}; look at {log}")
        return works(["docker", "info"], timeout_s=10, environ=environ)

    try:
        wait_until("dockerd answers", answers, 60, str(log))
    except BaseException:
        _stop_daemon(daemon, work)
        raise
    return daemon


def _stop_daemon(daemon: "subprocess.Popen[bytes]", work: Path) -> None:
    """By its own pid; what is left in its session (containerd) goes with it."""
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(30)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    with suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    for mount in sorted(mounts_below(work), key=len, reverse=True):
        with suppress(CheckFailed):
            run(["umount", "--lazy", mount], timeout_s=20)


def mounts_below(work: Path) -> list[str]:
    """Mount points in the folder."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(work)]


class KernelState:
    """What dockerd changes for the whole machine, as it was before."""

    def __init__(self) -> None:
        self._forwards = IP_FORWARD.read_text()
        self._interfaces = _interfaces()
        self._forward_policy = "ACCEPT"
        if shutil.which("iptables") and "-P FORWARD DROP" in _rules("iptables", "filter"):
            self._forward_policy = "DROP"

    def restore(self) -> None:
        """Takes out Docker's bridges, rules and chains, and nobody else's."""
        for name in sorted(_interfaces() - self._interfaces):
            if name == "docker0" or name.startswith("br-"):
                with suppress(CheckFailed):
                    run(["ip", "link", "delete", name], timeout_s=20)
        for program in ("iptables", "ip6tables"):
            if shutil.which(program):
                for table in TABLES:
                    _remove_rules(program, table)
                with suppress(CheckFailed):
                    run([program, "-P", "FORWARD", self._forward_policy], timeout_s=20)
        IP_FORWARD.write_text(self._forwards)

    def leftovers(self) -> list[str]:
        """What of Docker's is still there."""
        left = [name for name in _interfaces() - self._interfaces if name == "docker0" or name.startswith("br-")]
        for table in TABLES:
            left += [rule for rule in _rules("iptables", table) if _is_dockers(rule)]
        return left if IP_FORWARD.read_text() == self._forwards else [*left, "ip_forward"]


def _remove_rules(program: str, table: str) -> None:
    rules = [rule for rule in _rules(program, table) if _is_dockers(rule)]
    for rule in rules:
        if rule.startswith("-A "):
            with suppress(CheckFailed):
                run([program, "-t", table, "-D", *rule.split()[1:]], timeout_s=20)
    for rule in rules:
        if rule.startswith("-N "):
            with suppress(CheckFailed):
                run([program, "-t", table, "-X", rule.split()[1]], timeout_s=20)


def _is_dockers(rule: str) -> bool:
    words = rule.split()
    return any(word.startswith(("DOCKER", "docker0", "br-")) for word in words) or "172.17.0.0/16" in words


def _rules(program: str, table: str) -> list[str]:
    try:
        return run([program, "-t", table, "-S"], timeout_s=20).splitlines()
    except (CheckFailed, OSError):
        return []


def _interfaces() -> set[str]:
    return {path.name for path in INTERFACES.iterdir()}
