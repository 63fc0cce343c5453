"""How an archive begins and ends within a gateway, and what health says of what it cannot do without."""

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry

from slipstream.archive import worker as worker_module
from slipstream.archive.queue import BatchSpec, DamagedRecord, JobSpec, JobState, Lease, QueueUnavailable
from slipstream.archive.service import HEALTH_NAME, ArchiveService, make_queue
from slipstream.archive.worker import Worker
from slipstream.captioning.captioner import GatewayCaptioner
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.document_captioner import DocumentCaptioner
from slipstream.errors import InvalidConfig, ServiceUnavailable
from slipstream.metrics import GatewayMetrics
from slipstream.rpc import server as server_module
from slipstream.rpc.callers import Places
from slipstream.rpc.server import Health, HealthWatch, Lifecycle
from slipstream.service_info import ArchiveInfo
from tests.archive.worlds import until
from tests.services.test_archive_runner import FakeCaptioner, lease_of
from tests.support.memory_queue import MemoryQueue
from tests.support.processes import eventually

CONFIG = GatewayConfig(listen="", target="t:1", archive_drain_s=0.1)


class Gateway:
    """An archive on a queue in memory, with made-up models."""

    def __init__(self, config: GatewayConfig = CONFIG) -> None:
        self.health = Health(Places("watchers", 1), 1.0)
        self.lifecycle = Lifecycle(self.health)
        self.queue, self.models = MemoryQueue(), FakeCaptioner()
        self.target = HealthWatch("target", "", self.models.target.ask, self.lifecycle)
        captioner = cast(GatewayCaptioner, self.models)
        documents = DocumentCaptioner(config, captioner, None)
        self.archive = ArchiveService(config, captioner, documents, self.target, self.lifecycle, self.queue)

    async def submit(self, number: int) -> None:
        lease = lease_of()
        await self.queue.open_batch(BatchSpec("b", options=lease.options))
        await self.queue.submit("b", [JobSpec(str(index), lease_of(f"/{index}").payload) for index in range(number)])

    async def count(self, state: JobState) -> int:
        return (await self.queue.get_batch("b")).counts[state]

    async def status(self, name: str) -> int | None:
        found = await self.health.Check(health_pb2.HealthCheckRequest(service=name), cast(Any, _NoContext()))
        return found.status if found else None


class _NoContext:
    async def abort(self, *args: Any) -> None:
        raise LookupError

    def set_code(self, code: grpc.StatusCode) -> None:
        pass


async def test_jobs_run_until_the_process_ends_and_the_rest_goes_back() -> None:
    gateway = Gateway()
    gateway.models.meanwhile = lambda plan: asyncio.sleep(0 if gateway.models.num_captions < 3 else 60)
    await gateway.submit(6)
    gateway.archive.start()
    await eventually(lambda: gateway.models.num_captions == 4)
    gateway.lifecycle.stopping.set()
    await gateway.archive.close()
    assert await gateway.count(JobState.DONE) == 2 and await gateway.count(JobState.RUNNING) == 0
    records, _ = await gateway.queue.list_jobs("b")
    assert not any(record.attempts or record.crashes for record in records)


async def test_what_runs_goes_back_at_once_when_somebody_is_impatient() -> None:
    gateway = Gateway(replace(CONFIG, archive_drain_s=3600.0))
    gateway.models.meanwhile = lambda plan: asyncio.sleep(3600)
    await gateway.submit(2)
    gateway.archive.start()
    await eventually(lambda: gateway.models.num_captions == 2)
    gateway.lifecycle.stopping.set()
    closing = asyncio.create_task(gateway.archive.close())
    gateway.lifecycle.hurried.set()
    await asyncio.wait_for(closing, 60)
    assert await gateway.count(JobState.QUEUED) == 2
    records, _ = await gateway.queue.list_jobs("b")
    assert not any(record.attempts or record.crashes for record in records)


async def test_without_slots_batches_are_only_taken_in() -> None:
    gateway = Gateway(GatewayConfig(listen="", target="t:1", archive_slots=0))
    await gateway.submit(1)
    gateway.archive.start()
    await eventually(lambda: told_of(gateway).takes_writes)
    assert not told_of(gateway).worker and await gateway.count(JobState.QUEUED) == 1
    await gateway.archive.close()


def told_of(gateway: Gateway) -> ArchiveInfo:
    info = gateway.archive.info()
    assert info is not None
    return info


async def test_a_worker_at_rest_is_told_and_one_at_work_and_a_store_that_takes_no_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    gateway, hold = Gateway(), asyncio.Event()
    gateway.models.meanwhile = lambda plan: hold.wait()
    info = partial(told_of, gateway)
    assert info() == ArchiveInfo()
    gateway.archive.start()
    await eventually(lambda: info().takes_writes)
    assert info().worker and (info().jobs, info().max_jobs) == (0, CONFIG.archive_slots + CONFIG.archive_ahead)
    assert 0 <= info().lease_age_s < info().lease_s == gateway.queue.policy.lease_s
    await gateway.submit(1)
    await eventually(lambda: info().jobs == 1)

    async def full() -> None:
        raise QueueUnavailable("the disk is full")

    monkeypatch.setattr(gateway.queue, "ping", full)
    await eventually(lambda: not info().takes_writes)
    hold.set()
    await eventually(lambda: info().jobs == 0)
    await gateway.archive.close()


async def test_nothing_is_taken_while_the_target_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ready, num_questions = ArchiveService._is_ready, 0

    async def counted(archive: ArchiveService) -> bool:
        nonlocal num_questions
        num_questions += 1
        return await is_ready(archive)

    monkeypatch.setattr(ArchiveService, "_is_ready", counted)
    gateway = Gateway()
    await gateway.submit(1)
    gateway.models.target.is_up = False
    await gateway.target.look()
    gateway.archive.start()
    await eventually(lambda: num_questions > 2)
    assert await gateway.count(JobState.QUEUED) == 1 and not gateway.models.num_sampled
    since_s = gateway.target.since_s
    await gateway.target.look()
    assert gateway.target.reason and gateway.target.since_s == since_s > 0, "it is away since the look that missed it"
    gateway.models.target.is_up = True
    await gateway.target.look()
    assert not gateway.target.reason
    await eventually(lambda: gateway.models.num_captions)
    await gateway.archive.close()


async def test_a_worker_that_fails_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(worker: Worker) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Worker, "run", fail)
    gateway = Gateway()
    gateway.archive.start()
    await asyncio.wait_for(gateway.lifecycle.failed.wait(), 60)
    assert "RuntimeError" in str(gateway.lifecycle.failure)
    await gateway.archive.close()


async def test_health_follows_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()

    async def away() -> None:
        raise QueueUnavailable("gone")

    watch = HealthWatch("redis", HEALTH_NAME, lambda: gateway.queue.ping(), gateway.lifecycle)
    await watch.look()
    assert await gateway.status(HEALTH_NAME) == health_pb2.HealthCheckResponse.SERVING
    monkeypatch.setattr(gateway.queue, "ping", away)
    await watch.look()
    assert not watch.is_up and await gateway.status(HEALTH_NAME) == health_pb2.HealthCheckResponse.SERVING
    await watch.look()
    assert await gateway.status(HEALTH_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    monkeypatch.undo()
    await watch.look()
    assert watch.is_up and await gateway.status(HEALTH_NAME) == health_pb2.HealthCheckResponse.SERVING


async def test_health_follows_the_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes writes but gives out no jobs is no archive."""
    monkeypatch.setattr(worker_module, "AWAY_S", (0.005, 0.01))
    monkeypatch.setattr(server_module, "POLL_S", 0.02)
    gateway, registry = Gateway(), CollectorRegistry()
    gateway.models.metrics = GatewayMetrics(registry)
    take, is_broken = gateway.queue.take, True

    async def fail(worker: str, limit: int, *, suspects: bool = True) -> list[Lease]:
        if is_broken and limit:
            raise DamagedRecord("the queue's Redis cannot carry out take: WRONGTYPE")
        return await take(worker, limit, suspects=suspects)

    def age() -> float:
        return cast(float, registry.get_sample_value("slipstream_queue_last_take_age_seconds"))

    monkeypatch.setattr(gateway.queue, "take", fail)
    await gateway.submit(1)
    gateway.archive.start()

    async def is_said(status: int) -> bool:
        with contextlib.suppress(LookupError):  # before anything was said
            return await gateway.status(HEALTH_NAME) == status
        return False

    await until(lambda: is_said(health_pb2.HealthCheckResponse.NOT_SERVING))
    before = age()
    assert "takes in a row failed; the log says why" in gateway.archive.watch.reason
    await asyncio.sleep(0.05)
    assert age() > before, "it grows while nothing can be taken"
    is_broken = False
    await until(lambda: is_said(health_pb2.HealthCheckResponse.SERVING))
    await eventually(lambda: gateway.models.num_captions)
    assert not gateway.archive.watch.reason
    await gateway.archive.close()


async def test_a_damaged_queue_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def damaged(*args: Any) -> Any:
        raise DamagedRecord("WRONGTYPE")

    monkeypatch.setattr(server_module, "POLL_S", 0.01)
    gateway = Gateway(GatewayConfig(listen="", target="t:1", archive_slots=0, metrics="1"))
    for name in ("sweep", "depth", "ping"):
        monkeypatch.setattr(gateway.queue, name, damaged)
    gateway.archive.start()
    await asyncio.sleep(0.1)
    assert not gateway.lifecycle.failed.is_set()
    assert await gateway.status(HEALTH_NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    await gateway.archive.close()


async def test_health_of_the_whole_follows_the_target() -> None:
    gateway = Gateway()
    gateway.models.target.is_up = False
    for expected in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING):
        await gateway.target.look()
        assert await gateway.status("") == expected
    with pytest.raises(ServiceUnavailable):
        await gateway.models.target.ask()


def test_a_queue_is_made_of_the_options_or_not_at_all() -> None:
    metrics = GatewayMetrics()
    assert make_queue(CONFIG, metrics) is None
    config = GatewayConfig(listen="", target="t", redis="redis://localhost:1", lease_s=7.0, max_crashes=5)
    queue = make_queue(config, metrics)
    assert queue is not None and (queue.policy.lease_s, queue.policy.max_crashes) == (7.0, 5)
    with pytest.raises(InvalidConfig, match="URL"):
        make_queue(GatewayConfig(listen="", target="t", redis="localhost"), metrics)
