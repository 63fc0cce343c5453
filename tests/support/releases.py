"""A cluster of two releases of Slipstream on one queue: each process runs from one of two checkouts, and moves to the
other one while the rest goes on. Nothing of the older checkout is imported here."""

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from slipstream.process_life import PARENT_PID_VARIABLE
from slipstream.stack.process import ServiceProcess
from tests.support.cluster import Cluster, ClusterOptions, RedisProcess

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 2
"""Gateways, targets and drafts."""


def checkout(name: str, folder: Path) -> Path:
    """A checkout by its folder, or the tree of one of this checkout's commits, written into `folder`. Raises `OSError`
    where there is neither."""
    if Path(name).is_dir():
        tree = Path(name).resolve()
    else:
        archive = subprocess.run(["git", "archive", name], cwd=ROOT, capture_output=True)
        if archive.returncode:
            said = archive.stderr.decode(errors="replace").strip()
            raise OSError(f"{name!r} is no folder, and no commit that this checkout has: {said}")
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="tar")
        tree = folder
    if not (tree / "services" / "gateway").is_dir():
        raise OSError(f"{tree} is no checkout of Slipstream")
    return tree


class ReleaseCluster(Cluster):
    """Gateways of one queue, each with a target and a draft, which all begin as the older release. A gateway of this
    release has all targets and drafts, one of the older release only its own pair."""

    def __init__(self, options: ClusterOptions, older: Path, report: Callable[[str], None] = lambda line: None) -> None:
        super().__init__(options, report)
        self.older, self.newer = older, ROOT
        self.release_of: dict[str, Path] = {}
        """The checkout of each service's latest start."""

    async def move(self, name: str, release: Path) -> None:
        """SIGTERM to the service, and the other release in its place; returns when that serves."""
        process = self.processes[name]
        starts = process.starts
        self._run_from(name, release)
        os.kill(process.pid, signal.SIGTERM)
        await self.wait_serving(name, starts + 1)

    def _prepare(self) -> None:
        folder = self.run_dir / "redis"
        folder.mkdir()
        redis = self.processes["redis"] = RedisProcess(folder)
        self.redis_url = redis.url
        env = os.environ | {PARENT_PID_VARIABLE: str(os.getpid())}
        for service in ("target", "draft", "gateway"):
            for number in range(PAIRS):
                name = f"{service}-{number}"
                log = self.run_dir / f"{name}.log"
                self.processes[name] = ServiceProcess(name, (), self._address(name), log, env)
                self._run_from(name, self.older)

    def _run_from(self, name: str, release: Path) -> None:
        """From its next start on."""
        service, _, number = name.partition("-")
        words = ["env", f"--chdir={release}", f"PYTHONPATH={release}", sys.executable, "-m", f"services.{service}"]
        words += ["--listen", self._address(name), *self._flags(service, int(number), release)]
        self.processes[name].argv = (*words, *self.options.flags.get(service, ()))
        self.release_of[name] = release

    def _flags(self, service: str, number: int, release: Path) -> list[str]:
        options = self.options
        if service != "gateway":
            model = options.target_model if service == "target" else options.draft_model
            return ["--model", str(model), "--threads", "1"]
        pairs = [number] if release == self.older else range(PAIRS)
        models = {kind: ",".join(self._address(f"{kind}-{pair}") for pair in pairs) for kind in ("target", "draft")}
        flags = ["--target", models["target"], "--draft", models["draft"], "--video-roots", str(options.video_root)]
        flags += ["--redis", self.redis_url, "--lease-s", str(options.lease_s)]
        return [*flags, "--archive-slots", str(options.slots), "--archive-ahead", str(options.ahead)]

    def _address(self, name: str) -> str:
        return f"unix:{self.run_dir / name}.sock"
