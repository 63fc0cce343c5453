"""A queue whose server is replaced by Sentinel: found again, and with `--redis-wait` nothing acknowledged is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import ConnectionError as RedisConnectionError

from slipstream.archive import redis_failover
from slipstream.archive.queue import BatchSpec, BeatAnswer, JobState, Lease, QueueUnavailable, SubmitOutcome
from slipstream.archive.redis_failover import (
    Followers,
    LeaderView,
    LeadsNoMore,
    SentinelPool,
    Sentinels,
    connect,
    connect_by_sentinel,
)
from slipstream.archive.redis_queue import RedisQueue
from slipstream.errors import InvalidConfig
from slipstream.stack.redis_server import EmbeddedServer
from tests.archive.worlds import DONE, specs, until
from tests.support.processes import free_ports
from tests.support.redis_group import HOST, RedisGroup

in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisGroup]:
    async with RedisGroup(tmp_path_factory.mktemp("group"), hasty=True) as running:
        yield running


async def kept_names(queue: RedisQueue) -> set[str]:
    names, position = set[str](), 0
    while True:
        jobs, position = await queue.list_jobs("batch", after=position, limit=500)
        names |= {job.custom_id for job in jobs}
        if not position:
            return names


async def patiently(call: Any) -> Any:
    """The call's answer, made again until the queue takes it."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(QueueUnavailable):
                return await call()
            await asyncio.sleep(0.05)


async def accepted_during(queue: RedisQueue, harm: Coroutine[Any, Any, None]) -> set[str]:
    """Names of jobs that were acknowledged while this happened, one after the other."""
    await patiently(lambda: queue.open_batch(BatchSpec("batch")))
    accepted, harming = set[str](), asyncio.create_task(harm)
    while not harming.done() or len(accepted) < 50:
        name = str(len(accepted))
        await patiently(lambda: queue.submit("batch", specs(name)))  # noqa: B023 (it is awaited at once)
        accepted.add(name)
        await asyncio.sleep(0.005)
    await harming
    return accepted


@in_one_loop
async def test_without_enough_replicas_nothing_is_promised_also_not_the_second_time(
    group: RedisGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = (RedisQueue(group.url, "cut off", replicas=1) for _ in range(2))
    await patiently(lambda: queue.open_batch(BatchSpec("batch")))
    await queue.submit("batch", specs("running"))
    (lease,) = await queue.take("worker", 1)
    async with group.no_replicas():
        monkeypatch.setattr(redis_failover, "WAIT_S", 0.2)
        # From the second time on the leader knows the job, and writes nothing for it. Another gateway asks then, on a
        # connection that has never written anything.
        for asked in (queue, queue, other):
            with pytest.raises(QueueUnavailable, match="0 replicas of the queue's Redis have this write"):
                await asked.submit("batch", specs("a"))
            with pytest.raises(QueueUnavailable, match="nothing is promised"):
                await asked.finish(lease, DONE)
        with pytest.raises(QueueUnavailable):
            await queue.ping()
    assert await patiently(lambda: queue.submit("batch", specs("a"))) == [SubmitOutcome.KNOWN]
    assert await patiently(lambda: queue.finish(lease, DONE))
    await patiently(queue.ping)
    await queue.close()
    await other.close()


@in_one_loop
async def test_any_replica_that_follows_may_lead_next_so_all_are_waited_for(
    group: RedisGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = RedisQueue(group.url, "one is slow", replicas=1)
    await patiently(lambda: queue.open_batch(BatchSpec("batch")))
    async with group.no_replicas(1):
        monkeypatch.setattr(redis_failover, "WAIT_S", 0.2)

        async def one_has_it() -> bool:
            """On a busy machine it may take more than one wait."""
            with pytest.raises(QueueUnavailable, match="and 2 are to have it") as refused:
                await queue.submit("batch", specs("a"))
            return str(refused.value).startswith("1 replicas ")

        await until(one_has_it)
    assert await patiently(lambda: queue.submit("batch", specs("a"))) == [SubmitOutcome.KNOWN]
    await queue.close()


@in_one_loop
async def test_a_user_that_may_not_ask_who_follows_is_promised_the_least(group: RedisGroup) -> None:
    async with Redis(port=await group.settled()) as admin:
        await admin.execute_command("ACL", "SETUSER", "default", "-info")
        queue = RedisQueue(group.url, "no role", replicas=1)
        await queue.open_batch(BatchSpec("batch"))
        assert await queue.submit("batch", specs("a")) == [SubmitOutcome.ADDED]
        await admin.execute_command("ACL", "SETUSER", "default", "+info")
    await queue.close()


@in_one_loop
async def test_a_server_that_was_emptied_of_scripts_is_told_them_again(group: RedisGroup) -> None:
    queue = RedisQueue(group.url, "emptied", replicas=2)
    await queue.open_batch(BatchSpec("batch"))
    async with Redis(port=await group.settled()) as client:
        await client.script_flush()
    assert await queue.submit("batch", specs("a")) == [SubmitOutcome.ADDED]
    await queue.close()


@in_one_loop
async def test_a_new_leader_is_found_and_has_all_that_was_promised(group: RedisGroup) -> None:
    queue = RedisQueue(group.url, "failing", replicas=1)
    accepted = await accepted_during(queue, group.fail_over(0.5))
    assert await kept_names(queue) == accepted
    (lease,) = await patiently(lambda: queue.take("worker", 1))
    assert await patiently(lambda: queue.finish(lease, DONE))
    assert (await queue.get_batch("batch")).counts[JobState.DONE] == 1
    await queue.close()


@in_one_loop
@pytest.mark.long
async def test_a_leader_that_is_deposed_and_lives_promises_nothing(group: RedisGroup) -> None:
    """It hears of it seconds later, and until then has whoever still follows it."""
    queue, old = RedisQueue(group.url, "deposed", replicas=1), await group.settled()
    accepted = await accepted_during(queue, group.depose())
    assert await group.settled() != old and await kept_names(queue) == accepted
    await queue.close()


REPLACING = "s_down,o_down,master,failover_in_progress"


class Sentinel:
    """Says which server leads, if anything."""

    def __init__(self, run_id: str | None, *, flags: str = "master") -> None:
        self.run_id = run_id
        self.asked = 0
        self.flags = flags

    async def sentinel_masters(self) -> dict[str, dict[str, str]]:
        self.asked += 1
        if self.run_id is None:
            raise RedisConnectionError("away")
        return {"queue": {"runid": self.run_id, "flags": self.flags}}


def confirming(*run_ids: str | None) -> tuple[Followers, SentinelPool, list[Sentinel]]:
    pool = connect_by_sentinel("sentinel://one,two,three/queue", max_connections=1)
    assert isinstance(pool, SentinelPool)
    sentinels = [Sentinel(run_id) for run_id in run_ids]
    pool.sentinel_manager.sentinels = sentinels
    return Followers(1), pool, sentinels


ONE, TWO = ("10.0.0.1", "6379"), ("10.0.0.2", "6379")


class Knowing:
    """A sentinel that says where the leader is, of which failover it has heard last, and whether it sees the leader."""

    def __init__(
        self,
        port: int,
        epoch: int,
        *,
        is_down: bool = False,
        host: str = "10.0.0.1",
        run_id: str = "",
        flags: str = "master",
    ) -> None:
        state = {"is_master": True, "is_sdown": is_down, "is_odown": False, "num-other-sentinels": 2, "flags": flags}
        self._told = {"queue": state | {"ip": host, "port": port, "config-epoch": epoch, "runid": run_id}}

    async def sentinel_masters(self) -> dict[str, dict[str, Any]]:
        return self._told


@pytest.mark.parametrize(
    ("told", "port"),
    [
        ((Knowing(1, 4), Knowing(2, 5), Sentinel(None)), 2),
        ((Knowing(2, 5), Knowing(1, 4), Knowing(1, 4)), 2),
        ((Knowing(1, 4), Knowing(2, 5, is_down=True), Knowing(2, 5)), 2),
        ((Sentinel(None), Sentinel(None), Knowing(2, 5)), 2),
        ((Knowing(1, 4), Knowing(2, 5, is_down=True), Sentinel(None)), None),
        ((Sentinel(None), Sentinel(None), Sentinel(None)), None),
        ((Knowing(1, 5, flags=REPLACING), Knowing(1, 4), Knowing(2, 5)), 2),
        ((Knowing(1, 5, flags=REPLACING), Sentinel(None), Sentinel(None)), None),
    ],
)
async def test_who_has_heard_of_the_latest_failover_is_believed(told: Sequence[Any], port: int | None) -> None:
    """One that was away knows who led before: that server, back too, gave out what others had been given."""
    _, pool, _ = confirming()
    pool.sentinel_manager.sentinels = told
    if port is None:
        with pytest.raises(MasterNotFoundError, match="sentinels answer, and none that is up to date"):
            await pool.get_master_address()
    else:
        assert await pool.get_master_address() == ("10.0.0.1", port)


class TwoServers:
    """Neither follows the other, and sentinels say of one that it leads."""

    def __init__(self, ports: Sequence[int], run_ids: Sequence[str]) -> None:
        self.ports = ports
        self._run_ids = run_ids
        self.leads = 0

    async def views(self, sentinels: Sentinels, name: str) -> Sequence[Mapping[str, Any]]:
        told = Knowing(self.ports[self.leads], 1, host=HOST, run_id=self._run_ids[self.leads])
        return [(await told.sentinel_masters())[name]]


@pytest_asyncio.fixture
async def two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoServers]:
    ports, run_ids = free_ports(2), []
    async with contextlib.AsyncExitStack() as stack:
        for port in ports:
            await stack.enter_async_context(EmbeddedServer(tmp_path / str(port), port=port))
            client = await stack.enter_async_context(Redis(port=port))
            run_ids.append((await client.info("server"))["run_id"])
        servers = TwoServers(ports, run_ids)
        monkeypatch.setattr(Sentinels, "views", lambda sentinels, name: servers.views(sentinels, name))
        yield servers


async def running(queue: RedisQueue) -> Lease:
    """A job whose lease was renewed, at the first server."""
    await queue.open_batch(BatchSpec("batch"))
    await queue.submit("batch", specs("a"))
    (lease,) = await queue.take("worker", 1)
    assert await queue.beat([lease], {}) == [BeatAnswer.KEEP]
    return lease


async def test_a_connection_to_a_server_that_follows_now_is_made_anew(two_servers: TwoServers) -> None:
    """Also one that its client made again to where it had been, as after a cut: it asks nobody then who leads."""
    queue = RedisQueue("sentinel://one/queue", "followed")
    lease = await running(queue)
    old, new = two_servers.ports
    async with Redis(port=old) as client:
        await client.replicaof(HOST, new)
    two_servers.leads = 1
    with pytest.raises(QueueUnavailable, match="READONLY"):
        await queue.beat([lease], {})
    assert await queue.beat([lease], {}) == [BeatAnswer.LOST]
    await queue.close()


@pytest.mark.parametrize(
    ("is_connected", "told"),
    [(True, "0 of 1 sentinels say that this server leads"), (False, "0 replicas of the queue's")],
)
async def test_a_server_that_is_deposed_and_does_not_know_is_left_by_all(
    two_servers: TwoServers, monkeypatch: pytest.MonkeyPatch, is_connected: bool, told: str
) -> None:
    """It may take half a minute until it is told. Its followers are gone, so who asks it for a promise finds out; so
    does who makes a new connection, which leads to the other one. All others are made anew then."""
    monkeypatch.setattr(redis_failover, "WAIT_S", 0.05)
    alone, queue = (
        RedisQueue("sentinel://one/queue", "deposed"),
        RedisQueue("sentinel://one/queue", "deposed", replicas=1),
    )
    lease = await running(alone)
    assert await queue.beat([lease], {}) == [BeatAnswer.KEEP]
    with pytest.raises(QueueUnavailable, match="0 replicas of the queue's Redis have this write"):
        await queue.submit("batch", specs("b"))
    assert await queue.beat([lease], {}) == [BeatAnswer.KEEP], "as long as it leads it is stayed with"
    if is_connected:
        await queue.take("worker", 0)
    two_servers.leads = 1
    with pytest.raises(QueueUnavailable, match=told):
        await queue.finish(lease, DONE)
    assert await queue.beat([lease], {}) == [BeatAnswer.LOST], "by the one that leads, which has never heard of it"
    await queue.close()
    await alone.close()


async def test_a_sentinel_that_hangs_up_is_asked_once() -> None:
    """By its client's own custom four times, some seconds apart, in which every call of the queue would wait."""
    asked: list[object] = []

    def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer)
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = connect_by_sentinel(f"sentinel://127.0.0.1:{port}/queue", max_connections=1)
        with pytest.raises(MasterNotFoundError, match="0 of 1 sentinels answer"):
            await pool.get_master_address()
        await pool.aclose()
    assert len(asked) == 1


async def test_who_leads_is_asked_when_a_replica_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    followers, pool, sentinels = confirming("x", "x", None)
    both = LeaderView("x", frozenset((ONE, TWO)))
    for _ in range(3):
        await followers.confirm(both, pool)
    assert [each.asked for each in sentinels] == [1, 1, 1], "as long as all follow nobody is asked again"
    left = LeaderView("x", frozenset((ONE,)))
    for _ in range(2):
        with pytest.raises(QueueUnavailable, match="a replica has left"):
            await followers.confirm(left, pool)
    monkeypatch.setattr(redis_failover, "SETTLE_S", 0.0)
    sentinels[0].run_id = "y"
    with pytest.raises(QueueUnavailable, match="1 of 3 sentinels say that this server leads"):
        await followers.confirm(left, pool)
    sentinels[0].run_id = "x"
    for _ in range(3):
        await followers.confirm(left, pool)
    assert sentinels[0].asked == 3
    await followers.confirm(both, pool)
    assert sentinels[0].asked == 3, "one that came makes no difference"


async def test_a_server_that_a_sentinel_replaces_promises_nothing_though_the_others_have_not_heard() -> None:
    """It made another one the leader a second ago, and tells the others within two; what the old one takes until its
    followers leave it is lost."""
    followers, pool, (_, _, replacing) = confirming("run", "run", "run")
    standing = LeaderView("run", frozenset({ONE}))
    replacing.flags = REPLACING
    with pytest.raises(LeadsNoMore, match="a sentinel replaces the server"):
        await followers.confirm(standing, pool)
    replacing.run_id = "before"  # it has not done with all replicas of the old one: the new one's promises hold
    await followers.confirm(standing, pool)


async def test_where_nobody_can_be_asked_a_replica_that_left_stops_nothing() -> None:
    plain = connect("redis://one/0", 1, 1.0).connection_pool
    followers, by_sentinel, sentinels = confirming("x", "x", "x")
    for pool, run_id in ((plain, "x"), (by_sentinel, "")):
        for replicas in ((ONE, TWO), (ONE,)):
            await followers.confirm(LeaderView(run_id, frozenset(replicas)), pool)
    assert not any(each.asked for each in sentinels)


async def test_a_server_that_led_before_is_not_confirmed_by_what_was_said_of_another() -> None:
    """A connection may be left to it, and those that follow it may be those that followed the other."""
    followers, pool, sentinels = confirming("y", "y", "y")
    await followers.confirm(LeaderView("y", frozenset((TWO,))), pool)
    with pytest.raises(QueueUnavailable, match="0 of 3 sentinels"):
        await followers.confirm(LeaderView("x", frozenset((TWO,))), pool)
    await followers.confirm(LeaderView("y", frozenset((TWO,))), pool)
    assert sentinels[0].asked == 2


@pytest.mark.parametrize(
    "url",
    ["sentinel://", "sentinel://host", "sentinel://host:x/name", "sentinel://host:99999/name", "sentinel://:1/name"],
)
def test_what_names_no_sentinels(url: str) -> None:
    with pytest.raises(InvalidConfig, match="--redis: no URL"):
        RedisQueue(url)


def test_what_names_some() -> None:
    pool = connect_by_sentinel("sentinel://me:a%2Fb@one:1,two,[::1]:3/queue/2", max_connections=1)
    assert isinstance(pool, SentinelPool) and pool.service_name == "queue"
    places = [
        (each.connection_pool.connection_kwargs["host"], each.connection_pool.connection_kwargs["port"])
        for each in pool.sentinel_manager.sentinels
    ]
    assert places == [("one", 1), ("two", 26379), ("::1", 3)]
    kwargs = pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("me", "a/b", 2)
