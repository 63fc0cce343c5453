"""Gateways that share an archive's queue over one target, each started by a name of its own: to be killed in turn."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.archive.messages import Job, JobPart
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.connection import Connection
from slipstream.rpc.calls import open_channel
from slipstream.stack.process import ServiceProcess
from tests.support.processes import START_S, logged, new_process

LEASE_S = 2.0
END_S = 300.0


@dataclass
class ArchiveGateways:
    """What tests of jobs with parts begin with."""

    folder: Path
    redis_url: str
    target: ServiceProcess
    processes: list[ServiceProcess] = field(default_factory=list)

    async def start_gateway(self, *flags: str, **env: str) -> ServiceProcess:
        process = new_process(
            *("gateway", self.folder / f"gateway-{len(self.processes)}"),
            *("--target", self.target.address, "--redis", self.redis_url, "--video-roots", str(self.folder)),
            *("--lease-s", str(LEASE_S), *flags),
            **env,
        )
        self.processes.append(process)
        await process.start()
        await process.wait_serving(START_S)
        return process

    async def kill(self, process: ServiceProcess) -> None:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait_exit()

    @contextlib.asynccontextmanager
    async def client(self, process: ServiceProcess) -> AsyncIterator[ArchiveClient]:
        async with open_channel(process.address) as channel:
            yield ArchiveClient(Connection(channel))

    async def ended(self, process: ServiceProcess, batch_id: str) -> tuple[Job, list[JobPart]]:
        """The batch's one job when it has ended, and its parts."""
        async with self.client(process) as client:
            async with asyncio.timeout(END_S), aclosing(client.watch(batch_id)) as snapshots:
                async for _ in snapshots:
                    pass
            (job,) = [job async for job in client.jobs(batch_id)]
            return job, [part async for part in client.parts(batch_id, job)]

    def names_of(self, job_id: str) -> list[list[str]]:
        """Of every session that the target has begun for the job: what its name says behind the job's own."""
        names = [entry["request_id"] or "" for entry in logged(self.target.log_path, "session.opened")]
        return [name.split("-")[1:] for name in names if name.startswith(job_id)]
