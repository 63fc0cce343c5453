"""The target's death under an archive's captions, and the gateway's own end: no job is lost, and health tells."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.cli.stack import Stack
from slipstream.jobs.embedded import EmbeddedServer
from slipstream.rpc.client import open_channel
from slipstream.rpc.v1 import archive_pb2
from tests.support.archive_client import ArchiveClient
from tests.support.processes import logged
from tests.support.world import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_VIDEOS = 8
DONE = archive_pb2.JOB_STATE_DONE
ARCHIVE = "slipstream.rpc.v1.Archive"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_deaths_around_an_archive(world: World, tmp_path: Path) -> None:
    video = world.folder / "archive.mp4"
    video.write_bytes(world.clips[0])
    async with EmbeddedServer(tmp_path / "redis") as redis:
        options = world.stack_options("--redis", redis.url, "--archive-ahead", "0", "--lease-s", "3", restart=True)
        plain = replace(options, draft_model=None)
        async with Stack(plain) as stack, open_channel(stack.gateway_address) as channel:
            archive, health = ArchiveClient(channel), health_pb2_grpc.HealthStub(channel)
            await _wait_health(health, ARCHIVE, SERVING)
            items = [
                archive_pb2.BatchItem(custom_id=str(seed), source=str(video), caption={"prompt": f"What is {seed}?"})
                for seed in range(NUM_VIDEOS)
            ]
            batch = (await archive.submit(items, key="k", num_frames=6, max_new_tokens=300)).batch_id

            await _wait(archive, batch, lambda jobs: any(job.progress.startswith("generate") for job in jobs))
            os.kill(stack.processes["target"].pid, signal.SIGKILL)
            await _wait_health(health, "", NOT_SERVING)
            await _wait_health(health, "", SERVING)

            await _wait(archive, batch, lambda jobs: any(job.state == DONE for job in jobs))
            gateway = stack.processes["gateway"]
            os.kill(gateway.pid, signal.SIGTERM)
            await stack.wait_started("gateway", 2)

            await redis.kill()
            await _wait_health(health, ARCHIVE, NOT_SERVING)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await archive.get(batch)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            await redis.start()
            await _wait_health(health, ARCHIVE, SERVING)

            *_, ended = await archive.watch(batch)
            assert ended.counts.done == NUM_VIDEOS
            jobs = (await archive.jobs(batch)).values()
            assert 1 <= sum(job.crashes for job in jobs) <= 2 and not any(job.attempts for job in jobs)
            assert any(job.receipt.runs > 1 for job in jobs)
            log = gateway.log_path
            assert logged(log, "job.crashed") and len(logged(log, "archive.started")) == 2
            assert len(logged(log, "job.committed", state="done")) == NUM_VIDEOS


async def _wait(archive: ArchiveClient, batch: str, is_reached: Callable[[list[archive_pb2.Job]], bool]) -> None:
    jobs: list[archive_pb2.Job] = []
    async with asyncio.timeout(60):
        while not is_reached(jobs):
            await asyncio.sleep(0.1)
            jobs = list((await archive.jobs(batch)).values())


async def _wait_health(health: health_pb2_grpc.HealthStub, service: str, wanted: int) -> None:
    async for answer in health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60, wait_for_ready=True):
        if answer.status == wanted:
            return
    raise AssertionError("the watch ended")
