"""What KEDA is told of the archive's work, by a real Redis, over a day of it; and who may ask."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.archive.queue import BatchSpec, JobSpec, JobState, Lease, Outcome, QueuePolicy
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.worker import Worker
from slipstream.captioning.config import GatewayConfig
from slipstream.errors import InvalidConfig
from slipstream.rpc.calls import open_channel
from slipstream.rpc.probe import probe
from slipstream.rpc.security import new_token
from slipstream.rpc.v1 import externalscaler_pb2 as messages
from slipstream.rpc.v1 import externalscaler_pb2_grpc
from slipstream.services.gateway import scaler as scaler_module
from slipstream.services.gateway.scaler import open_scaler
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import until
from tests.rpc.secured import Certificates, make_certificates
from tests.support.keda import KedaClient
from tests.support.processes import free_ports, logged, new_process

SLOTS, MOST = 4, 6
GRACE_S = 3600.0
"""As long as the longest job, and more."""
DAY = (0, 0, 0, 2, 0, 0, 5, 18, 30, 24, 12, 9, 40, 22, 16, 10, 7, 25, 14, 6, 3, 0, 0, 0)
"""Jobs handed in, hour by hour."""
DAYS = 5
HOURS_OF_A_LONG_JOB, EVERY_SO_OFTEN = 3, 5
"""Every fifth job takes three hours, the others one."""


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tmp_path / "redis") as running:
        yield running


@contextlib.asynccontextmanager
async def scaler(queue: Any, listen: str, **options: Any) -> AsyncIterator[asyncio.Event]:
    """Served in this process; what it yields tells it that the process is about to end."""
    stopping = asyncio.Event()
    config = GatewayConfig(listen="", target="t:1", redis="redis://r", scaler_listen=listen, **options)
    close = await open_scaler(config, queue, stopping)
    try:
        yield stopping
    finally:
        await close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler_module, "LOOK_S", 0.01)


@dataclass
class Replicas:
    """Workers that come and go as they are told to. Their jobs take hours, which pass when `pass_hour` says so."""

    queue: RedisQueue
    running: list[tuple[Worker, asyncio.Task[None]]] = field(default_factory=list)
    leaving: list[tuple[Worker, asyncio.Task[None]]] = field(default_factory=list)
    """Those that were told to end and finish what they have."""
    hours: int = 0
    met: int = 0
    """Jobs that ran where a worker was told to end."""
    most: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    """How runs ended."""
    ended: int = 0
    """Jobs that ran to their end."""
    _ends: dict[str, int] = field(default_factory=dict)
    """In which hour what runs ends."""
    _passed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def scale(self, number: int) -> None:
        while len(self.running) > number:  # the newest go first, whatever they have; SIGTERM is `stop`
            worker, task = self.running.pop()
            self.met += len(worker.live)
            worker.stop()
            self.leaving.append((worker, task))
        while len(self.running) < number:
            worker = Worker(self.queue, self._run, slots=SLOTS, grace_s=GRACE_S, on_end=self._count)
            self.running.append((worker, asyncio.create_task(worker.run())))
        self.most = max(self.most, number)

    def num_busy(self) -> int:
        """Those that have jobs, also where they are to end."""
        return sum(bool(worker.live) for worker, _ in (*self.running, *self.leaving))

    async def are_taken(self) -> bool:
        """Whether as many jobs run as there are places for."""
        depth = await self.queue.depth()
        elsewhere = sum(len(worker.live) for worker, _ in self.leaving)
        return depth.running == elsewhere + min(SLOTS * len(self.running), depth.queued + depth.running - elsewhere)

    async def ended_well(self) -> None:
        """Returns when all that were told to end have ended."""
        await asyncio.gather(*(task for _, task in self.leaving))

    def _count(self, outcome: str, was_held: bool) -> None:
        assert was_held
        self.endings[outcome] += 1

    async def pass_hour(self) -> None:
        """Returns when all that ended in it is committed."""
        self.ended += sum(end == self.hours + 1 for end in self._ends.values())
        async with self._passed:
            self.hours += 1
            self._passed.notify_all()

        async def are_committed() -> bool:
            return await num_done(self.queue) == self.ended

        await until(are_committed)

    async def _run(self, lease: Lease, progress: Callable[[str], None]) -> Outcome:
        end = self.hours + (HOURS_OF_A_LONG_JOB if int(lease.custom_id) % EVERY_SO_OFTEN == 0 else 1)
        self._ends[lease.custom_id] = end
        try:
            async with self._passed:
                await self._passed.wait_for(lambda: self.hours >= end)
        finally:
            del self._ends[lease.custom_id]
        return Outcome(JobState.DONE, result="{}")


async def num_done(queue: RedisQueue) -> int:
    return (await queue.get_batch("batch")).counts[JobState.DONE]


@pytest.mark.usefixtures("quick")
async def test_a_day_of_work_scales_from_nothing_and_back_and_no_job_is_given_back(tmp_path: Path) -> None:
    """Who takes which job is a race, so on some days nobody who is told to end has one."""
    for number in range(DAYS):
        async with EmbeddedServer(tmp_path / f"redis-{number}") as server:
            queue = RedisQueue(server.url, policy=QueuePolicy(lease_s=60))
            try:
                replicas = await a_day_of_work(queue, f"unix:{tmp_path}/scaler-{number}.sock")
            finally:
                await queue.close()
        if replicas.met:
            return
    raise AssertionError(f"scaling in met no job that ran on {DAYS} days")


async def a_day_of_work(queue: RedisQueue, address: str) -> Replicas:
    replicas, handed_in, polls = Replicas(queue), 0, []
    await queue.open_batch(BatchSpec("batch"))
    async with scaler(queue, address), open_channel(address) as channel:
        keda = KedaClient(channel, {"jobsPerReplica": str(SLOTS), "scalerAddress": "gateway:50054"}, max_replicas=MOST)
        watching = asyncio.create_task(keda.watch())
        for number in [*DAY, *[0] * 24]:
            specs = [JobSpec(str(handed_in + index), "{}") for index in range(number)]
            await queue.submit("batch", specs)
            handed_in += number
            poll = await keda.poll()
            polls.append(poll)
            num_busy = replicas.num_busy()
            assert poll.work == max(handed_in - replicas.ended, SLOTS * num_busy)
            assert poll.replicas >= min(MOST, num_busy)
            await keda.heard(poll.is_active)
            await replicas.scale(poll.replicas)
            await until(replicas.are_taken)
            await replicas.pass_hour()
            if not poll.is_active and handed_in == sum(DAY):
                break
        await replicas.scale(0)
        await asyncio.wait_for(replicas.ended_well(), 60)
        watching.cancel()
    jobs, _ = await queue.list_jobs("batch", limit=1000)
    assert len(jobs) == handed_in == sum(DAY)
    assert {(job.state, job.attempts, job.crashes) for job in jobs} == {(JobState.DONE, 0, 0)}
    assert [poll.replicas for poll in polls[:3]] == [0, 0, 0] and polls[-1].replicas == 0
    assert replicas.most == MOST and replicas.endings == {"done": handed_in}, "and none was given back"
    assert keda.pushed[0] is keda.pushed[-1] is False and True in keda.pushed
    assert all(now != before for before, now in pairwise(keda.pushed)), "a push tells of a change"
    return replicas


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("jobs_of_workers", "waiting", "replicas"),
    [([1] * 8, 0, 8), ([1] * 8, 3, 8), ([1] * 8, 40, 12), ([4, 4, 1, 1], 0, 4), ([3], 0, 1), ([], 5, 2), ([], 0, 0)],
)
async def test_there_are_never_fewer_replicas_than_workers_that_have_jobs(
    jobs_of_workers: list[int], waiting: int, replicas: int, server: EmbeddedServer, tmp_path: Path
) -> None:
    queue, address = RedisQueue(server.url), f"unix:{tmp_path}/scaler.sock"
    await queue.open_batch(BatchSpec("batch"))
    total = sum(jobs_of_workers) + waiting
    await queue.submit("batch", [JobSpec(str(number), "{}") for number in range(total)])
    for number, num_jobs in enumerate(jobs_of_workers):
        assert len(await queue.take(f"worker-{number}", num_jobs)) == num_jobs
    async with scaler(queue, address), open_channel(address) as channel:
        poll = await KedaClient(channel, {"jobsPerReplica": str(SLOTS)}).poll()
    assert poll.work == max(total, SLOTS * len(jobs_of_workers)) and poll.replicas == replicas
    await queue.close()


@pytest.mark.usefixtures("quick")
async def test_the_share_of_a_replica_is_the_triggers_or_the_gateways_slots(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    queue, address = RedisQueue(server.url), f"unix:{tmp_path}/scaler.sock"
    async with scaler(queue, address, archive_slots=3), open_channel(address) as channel:
        assert await KedaClient(channel, {}).spec() == ("slipstream_jobs", 3)
        assert await KedaClient(channel, {"jobsPerReplica": "2.5"}).spec() == ("slipstream_jobs", 2.5)
        for wrong in ("0", "-1", "many", "nan", "inf", "1e30"):
            with pytest.raises(grpc.aio.AioRpcError, match="must be a number above 0") as refusal:
                await KedaClient(channel, {"jobsPerReplica": wrong}).spec()
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="no metric 'other'"):
            await stub.GetMetrics(messages.GetMetricsRequest(metricName="other"))
    await queue.close()


@pytest.mark.usefixtures("quick")
async def test_without_the_store_polls_fail_and_streams_wait_and_both_go_on(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    queue, address = RedisQueue(server.url), f"unix:{tmp_path}/scaler.sock"
    await queue.open_batch(BatchSpec("batch"))
    async with scaler(queue, address) as stopping, open_channel(address) as channel:
        keda = KedaClient(channel, {})
        watching = asyncio.create_task(keda.watch())
        await keda.heard(False)
        await server.kill()
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await keda.poll()
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        await server.start()
        await queue.submit("batch", [JobSpec("a", "{}")])
        await keda.heard(True)
        assert (await keda.poll()).work == 1
        assert keda.pushed == [False, True] and not watching.done()
        stopping.set()
        await asyncio.wait_for(watching, 60)  # ends well, as an error would have KEDA wait longer and longer
    await queue.close()


async def refused(address: str, security: Any = None, **metadata: str) -> grpc.StatusCode | None:
    async with open_channel(address, security) as channel:
        stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(channel)
        try:
            await stub.IsActive(messages.ScaledObjectRef(), metadata=tuple(metadata.items()), timeout=30)
        except grpc.aio.AioRpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None


async def test_who_may_ask(server: EmbeddedServer, tmp_path: Path) -> None:
    queue = RedisQueue(server.url)
    ours, kedas = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "kedas")
    certificate, key = ours.issue("gateway")
    token, line = new_token("keda")
    (tmp_path / "tokens").write_text(line)
    wire = {"tls_cert": certificate, "tls_key": key, "tokens": str(tmp_path / "tokens")}
    nobody = ours.peer(with_certificate=False)
    address, guarded = (f"localhost:{port}" for port in free_ports(2))
    async with scaler(queue, address, **wire):
        assert await refused(address, nobody) is grpc.StatusCode.UNAUTHENTICATED
        assert await refused(address, nobody, authorization=f"Bearer {token}") is None
        assert await probe(address, "", nobody) == "SERVING"
    async with scaler(queue, guarded, **wire, scaler_client_ca=kedas.ca):
        assert await refused(guarded, nobody, authorization=f"Bearer {token}") is grpc.StatusCode.UNAVAILABLE
        assert await refused(guarded, ours.peer("gateway")) is grpc.StatusCode.UNAVAILABLE
        assert await refused(guarded, shown_by(kedas, to=ours)) is None
    await queue.close()


def shown_by(authority: Certificates, *, to: Certificates) -> Any:
    """Credentials with a certificate of one authority, for a server of the other."""
    chain, key = authority.issue("client", "keda")
    content = [Path(path).read_bytes() for path in (to.ca, key, chain)]
    return replace_credentials(to.peer(with_certificate=False), grpc.ssl_channel_credentials(*content))


def replace_credentials(security: Any, credentials: grpc.ChannelCredentials) -> Any:
    return security._replace(credentials=credentials)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"scaler_client_ca": "/ca.pem"}, "--scaler-client-ca needs --tls-cert"),
        ({"tokens": "/tokens"}, "--tokens on 0.0.0.0:0 needs --tls-cert"),
    ],
)
async def test_what_cannot_be_served(options: Any, complaint: str) -> None:
    config = GatewayConfig(listen="", target="t:1", scaler_listen="0.0.0.0:0", **options)
    with pytest.raises(InvalidConfig, match=complaint):
        await open_scaler(config, RedisQueue("redis://localhost"), asyncio.Event())
    with pytest.raises(InvalidConfig, match="--scaler-listen needs --redis"):
        await open_scaler(replace(config, **{name: "" for name in options}), None, asyncio.Event())


async def test_a_gateway_that_waits_for_its_target_tells_keda_what_there_is_to_do(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """Else nothing would ever start the target again."""
    queue, address = RedisQueue(server.url), f"unix:{tmp_path}/scaler.sock"
    await queue.open_batch(BatchSpec("batch"))
    await queue.submit("batch", [JobSpec("a", "{}")])
    flags = ("--target", f"unix:{tmp_path}/nowhere.sock", "--redis", server.url, "--scaler-listen", address)
    process = new_process("gateway", tmp_path / "gateway", *flags)
    await process.start()
    try:
        async with open_channel(address) as channel, asyncio.timeout(120):
            await channel.channel_ready()
            assert (await KedaClient(channel, {"jobsPerReplica": "4"}).poll()).replicas == 1
        assert logged(process.log_path, "scaler.listens") and not logged(process.log_path, "service.ready")
    finally:
        await process.stop(30)
    await queue.close()
