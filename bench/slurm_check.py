"""The part `slurm` of scale-check: a Slurm of two nodes on this machine runs deploy/slurm/worker.sbatch.

Two tasks join a queue. When some jobs are done, a job of a partition of a higher tier takes the node of one of them,
which Slurm then requeues. Every job must be done once, and none may count as a failure or a crash.
"""

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from bench.common import ROOT, say
from slipstream.archive.queue import JobRecord, JobState
from slipstream.archive.redis_queue import RedisQueue
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.clips import make_colour_clip
from tests.support.processes import free_ports

NODES, CLIPS = ("n1", "n2"), 60
PATIENCE_S = 600.0
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue")
CONFIG = """\
ClusterName=check
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=2,requeue_delay=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 MaxTime=INFINITE State=UP PreemptMode=REQUEUE GraceTime=15
PartitionName=high Nodes=n1,n2 PriorityTier=10 MaxTime=INFINITE State=UP PreemptMode=OFF
"""


async def run_slurm(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `slurm`. Needs Slurm's and munge's programs, and root."""
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        return {"missing": missing}
    with tempfile.TemporaryDirectory(prefix="slipstream-slurm-") as name:
        folder, videos = Path(name), Path(name) / "videos"
        videos.mkdir()
        for number in range(CLIPS):
            (videos / f"{number}.mp4").write_bytes(make_colour_clip(number))
        (port,) = free_ports(1)
        async with EmbeddedServer(folder / "redis", port=port) as server, _slurm(folder) as env:
            queue = RedisQueue(server.url)
            try:
                return await _preempt(queue, folder, videos, env | {"SLIPSTREAM_GATEWAY_REDIS": server.url})
            finally:
                await queue.close()


async def _preempt(queue: RedisQueue, folder: Path, videos: Path, env: Mapping[str, str]) -> Mapping[str, Any]:
    settings = {"SLIPSTREAM_VIDEOS": str(videos), "SLIPSTREAM_CPU": "1", "SLIPSTREAM_SLOTS": "2"}
    small = ("--cpus-per-task=1", "--mem=0", "--gpus=0", f"--output={folder}/task-%a.log", "--array=0-1")
    await _run("sbatch", "--partition=low", *small, str(ROOT / "deploy/slurm/worker.sbatch"), env={**env, **settings})
    address = await _printed(folder / "task-0.log", r"gateway: (\S+:\d+)")
    await _printed(folder / "task-1.log", r"gateway: (\S+:\d+)")
    words = (
        str(videos),
        "--no-wait",
        "--name",
        "clips",
        "--frames",
        "8",
        "--max-new-tokens",
        "64",
        "--gateway",
        address,
    )
    await _run("slipstream", "archive", "submit", *words, env=env)
    (batch,) = await queue.list_batches()
    await _until(lambda: _num(queue, batch.batch_id, JobState.DONE), 4)
    say("two tasks work; one is preempted")
    began = time.monotonic()
    high = ("--partition=high", "--wait", "--exclusive", f"--output={folder}/high.log", "--wrap", "sleep 5")
    await _run("sbatch", *high, env=env)
    preempted_s = time.monotonic() - began
    await _until(lambda: _num(queue, batch.batch_id, JobState.DONE), CLIPS)
    restarts = await _run("squeue", "--noheader", "--format=%i", env=env)
    jobs = await _jobs(queue, batch.batch_id)
    log = "".join(_text(folder / f"task-{number}.log") for number in (0, 1))
    await _run("scancel", "--user=root", env=env)
    return _report(jobs, log, preempted_s, len(restarts.split()))


def _report(jobs: list[JobRecord], log: str, preempted_s: float, tasks_left: int) -> dict[str, Any]:
    report: dict[str, Any] = {
        "jobs": len(jobs),
        "done": sum(job.state is JobState.DONE for job in jobs),
        "counted": sum(job.attempts + job.crashes for job in jobs),
        "run_again": sum(job.epoch > 1 for job in jobs),
        "by_worker": sorted(Counter(job.worker for job in jobs).values()),
        "preempted": len(re.findall(r"DUE TO PREEMPTION", log)),
        "preempted_s": round(preempted_s, 1),
        "tasks_left": tasks_left,
    }
    was_struck = report["preempted"] > 0 and report["run_again"] > 0
    report["passed"] = (report["done"], report["counted"]) == (CLIPS, 0) and was_struck
    return report


def _write_config(folder: Path) -> tuple[Path, Path]:
    """Files of Slurm's configuration and of munge's key."""
    folder.chmod(0o700)
    ports = free_ports(3)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, host=socket.gethostname(), ports=ports))
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    return config, key


@contextlib.asynccontextmanager
async def _slurm(folder: Path) -> AsyncIterator[dict[str, str]]:
    """Two nodes on this machine; what it yields is the environment of its commands."""
    config, key = _write_config(folder)
    env = {**os.environ, "SLURM_CONF": str(config), "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    files = (f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed"))
    daemons = [("munged", "--foreground", "--force", f"--socket={folder}/munge.sock", f"--key-file={key}", *files)]
    daemons += [("slurmctld", "-D", "-f", str(config))]
    daemons += [("slurmd", "-D", "-N", node, "-f", str(config)) for node in NODES]
    running = []
    try:
        for words in daemons:
            with (folder / "daemons.log").open("ab") as log:
                running.append(await asyncio.create_subprocess_exec(*words, env=env, stdout=log, stderr=log))
            await asyncio.sleep(1)
        yield env
    finally:
        with contextlib.suppress(RuntimeError):
            await _run("scancel", "--user=root", env=env)
            await asyncio.sleep(5)
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _run(*words: str, env: Mapping[str, str]) -> str:
    """What it printed. Raises `RuntimeError` with its errors."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, env=env, stdout=pipe, stderr=pipe, cwd=ROOT)
    out, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    if process.returncode:
        raise RuntimeError(f"{words[0]} ended with {process.returncode}: {errors.decode()[-2000:]}")
    return out.decode()


async def _printed(path: Path, pattern: str) -> str:
    """The first group of the pattern, once the file has it."""
    async with asyncio.timeout(PATIENCE_S):
        while not (match := re.search(pattern, _text(path))):  # noqa: ASYNC110 (other processes write it)
            await asyncio.sleep(0.5)
    return match[1]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def _jobs(queue: RedisQueue, batch_id: str) -> list[JobRecord]:
    return (await queue.list_jobs(batch_id, limit=500))[0]


async def _num(queue: RedisQueue, batch_id: str, state: JobState) -> int:
    return (await queue.get_batch(batch_id)).counts[state]


async def _until(number: Any, least: int) -> None:
    """Returns when what `number()` answers is so large."""
    async with asyncio.timeout(PATIENCE_S):
        while await number() < least:  # noqa: ASYNC110 (other processes work)
            await asyncio.sleep(0.5)
