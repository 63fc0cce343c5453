"""The target's death under an archive's captions, and the gateway's own end: no job is lost, and health tells."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.archive.messages import BatchItem, Job
from slipstream.archive.queue import JobState
from slipstream.client.batch_handles import AsyncBatchHandle
from slipstream.errors import ServiceUnavailable
from slipstream.rpc.calls import open_channel
from slipstream.stack.addresses import gateway_address
from slipstream.stack.redis_server import EmbeddedServer
from tests.faults.conftest import FragileStack
from tests.support.archive_client import archive_at, jobs_of
from tests.support.processes import START_S, eventually, logged, running

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_VIDEOS, NUM_TOKENS = 6, 200
ARCHIVE = "slipstream.rpc.v1.Archive"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.long
async def test_deaths_around_an_archive(fragile: FragileStack, tmp_path: Path) -> None:
    world, target = fragile.world, fragile.process("target")
    video = world.folder / "archive.mp4"
    video.write_bytes(world.clips[0])
    async with EmbeddedServer(tmp_path / "redis") as redis:
        flags = ("--target", target.address, "--video-roots", str(world.folder), "--redis", redis.url)
        paced = ("--archive-ahead", "0", "--lease-s", "3", "--max-new-tokens", str(NUM_TOKENS))
        async with (
            running("gateway", tmp_path, *flags, *paced, listen=gateway_address(None)) as gateway,
            open_channel(gateway.address) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            await _wait_health(health, ARCHIVE, SERVING)
            items = [BatchItem(str(seed), str(video), {"prompt": f"What is {seed}?"}) for seed in range(NUM_VIDEOS)]
            batch = await archive_at(channel).submit(items, key="k", num_frames=6, max_new_tokens=NUM_TOKENS)

            await _wait(batch, lambda jobs: any(job.progress.startswith("generate") for job in jobs))
            killed = target.pid
            os.kill(killed, signal.SIGKILL)
            await eventually(lambda: target.pid != killed)
            os.kill(target.pid, signal.SIGSTOP)  # it is not back before it was missed
            await _wait_health(health, "", NOT_SERVING)
            os.kill(target.pid, signal.SIGCONT)
            await _wait_health(health, "", SERVING)

            await _wait(batch, lambda jobs: any(job.state is JobState.DONE for job in jobs))
            os.kill(gateway.pid, signal.SIGTERM)
            assert await asyncio.wait_for(gateway.wait_exit(), START_S) == 0
            await gateway.start()
            await gateway.wait_serving(START_S)

            await redis.kill()
            await _wait_health(health, ARCHIVE, NOT_SERVING)
            with pytest.raises(ServiceUnavailable):
                await batch.status()
            await redis.start()
            await _wait_health(health, ARCHIVE, SERVING)

            ended = await batch.wait()
            assert ended.counts.done == NUM_VIDEOS
            jobs = (await jobs_of(batch)).values()
            assert 1 <= sum(job.crashes for job in jobs) <= 2 and not any(job.attempts for job in jobs)
            assert any(job.receipt and job.receipt.runs > 1 for job in jobs)
            log = gateway.log_path
            assert logged(log, "job.crashed") and len(logged(log, "archive.started")) == 2
            assert len(logged(log, "job.committed", state="done")) == NUM_VIDEOS


async def _wait(batch: AsyncBatchHandle, is_reached: Callable[[list[Job]], bool]) -> None:
    jobs: list[Job] = []
    async with asyncio.timeout(START_S):
        while not is_reached(jobs):
            await asyncio.sleep(0.1)
            jobs = list((await jobs_of(batch)).values())


async def _wait_health(health: health_pb2_grpc.HealthStub, service: str, wanted: int) -> None:
    async for answer in health.Watch(
        health_pb2.HealthCheckRequest(service=service), timeout=START_S, wait_for_ready=True
    ):
        if answer.status == wanted:
            return
    raise AssertionError("the watch ended")
