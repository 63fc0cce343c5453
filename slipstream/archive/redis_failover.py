"""Connections to the queue's Redis: one server, or several of which one leads: by Sentinel, and with writes that
replicas have too.

`sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/NAME[/DB]` names sentinels and the group that they watch. The user is
that of the servers; sentinels are asked without one.
"""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from slipstream.archive.queue import QueueUnavailable
from slipstream.errors import InvalidConfig

CONNECT_S, SOCKET_S = 2.0, 2.5
SCHEME = "sentinel://"
SENTINEL_PORT = 26379
SENTINEL_S = 0.5
"""For a sentinel to answer, once: a call of the queue has some seconds for all of it, and is made again."""
WAIT_S = 1.5
"""For replicas to say that they have a write."""
SETTLE_S = 1.0
"""Behind the end of a replica, until sentinels have told each other what they did."""
INFO = "INFO"
"""What `Keeping.unasked` names where a user may ask the server nothing of itself, nor of who follows it."""
PROMISES = frozenset(
    {"open", "submit", "seal", "finish", "open_parts", "put_part", "put_note", "add_chunk", "cancel", "retry_dead"}
    | {"plan_file", "ping"}
)
"""Scripts whose answer somebody relies on; health is one, and so is what a result file is to hold, as it is written
then. A lease that is lost with its server is taken once more, and fenced."""

_URL = re.compile(r"sentinel://(?:(?P<user>[^@/]*)@)?(?P<hosts>[^@/]+)/(?P<name>[\w.-]+)(?:/(?P<db>\d+))?")


class Sentinels(Sentinel):
    """Asks all sentinels at once, and believes who has heard of the latest failover: one that was away says for some
    seconds who led before, and that server, back too, would hand out what the others have given to somebody else."""

    pools: Sequence["SentinelPool"] = ()
    """That go to another server together: what one was told by the new leader the old one knows nothing of."""
    _leader: tuple[str, int] | None = None
    _failures: Sequence[BaseException] = ()
    """Of those that were asked last."""

    async def views(self, name: str) -> list[Mapping[str, Any]]:
        """What each one says of the group that answers and knows it."""
        asked = await asyncio.gather(*(each.sentinel_masters() for each in self.sentinels), return_exceptions=True)
        self._failures = [found for found in asked if isinstance(found, BaseException)]
        return [found[name] for found in asked if isinstance(found, dict) and name in found]

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port. Raises `MasterNotFoundError`."""
        views = await self.views(service_name)
        known = [view for view in views if not _is_replacing(view)]
        latest = max((view["config-epoch"] for view in known), default=0)
        for view in known:
            if view["config-epoch"] == latest and self.check_master_state(dict(view), service_name):
                return await self._go_to((view["ip"], view["port"]))
        answered, why = len(self.sentinels) - len(self._failures), self._failures[:1]
        raise MasterNotFoundError(
            f"{answered} of {len(self.sentinels)} sentinels answer, and none that is up to date sees a server that"
            f" leads {service_name}{f'; asking one failed: {why[0]}' if why else ''}"
        )

    async def _go_to(self, leader: tuple[str, int]) -> tuple[str, int]:
        if leader != self._leader:
            self._leader = leader
            for pool in self.pools:
                await pool.disconnect(inuse_connections=False)
        return leader


def _is_replacing(view: Mapping[str, Any]) -> bool:
    """Whether this sentinel makes another one the leader now. Until it has done with all replicas, some minutes at
    most, it calls the old one the leader, and knows best that it is not."""
    return "failover_in_progress" in view.get("flags", "")


class SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to whoever leads now; callers wait where all are in use."""

    async def aclose(self) -> None:
        """Also those to the sentinels."""
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def connect(url: str, size: int, call_s: float) -> Redis:
    """At most `size` connections, made when first used; a caller waits for one for `call_s`. Raises `InvalidConfig`."""
    return connect_each(url, {"": size}, call_s)[""]


def connect_each(url: str, sizes: Mapping[str, int], call_s: float) -> dict[str, Redis]:
    """Several, as of `connect`, by name. All go to the same server. Raises `InvalidConfig`."""
    pools = {name: _pool(url, size, call_s) for name, size in sizes.items()}
    together = [pool for pool in pools.values() if isinstance(pool, SentinelPool)]
    for pool in together:
        pool.sentinel_manager = together[0].sentinel_manager
        pool.sentinel_manager.pools = together
    return {name: Redis.from_pool(pool) for name, pool in pools.items()}


def _pool(url: str, size: int, call_s: float) -> ConnectionPool:
    try:
        limits = {"timeout": call_s, "socket_timeout": SOCKET_S, "socket_connect_timeout": CONNECT_S}
        retry = Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,))
        options = {"max_connections": size, "protocol": 2, "retry": retry, **limits}
        if url.startswith(SCHEME):
            return connect_by_sentinel(url, **options)
        pool = BlockingConnectionPool.from_url(url, **options)
        pool.connection_class(**pool.connection_kwargs)  # which knows what else a URL may name
        return pool
    except (ValueError, TypeError, RedisError) as error:
        known = "redis://, rediss://, unix:// or sentinel://"
        raise InvalidConfig(f"--redis: no URL of a Redis server: {error}; use {known}") from None


def connect_by_sentinel(url: str, **options: Any) -> ConnectionPool:
    """`options`: as of a `BlockingConnectionPool`. Raises `ValueError` for what is no such URL."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"sentinels are named as {SCHEME}HOST:PORT,HOST:PORT/NAME")
    user, mark, password = (match["user"] or "").partition(":")
    if mark:
        options |= {"username": unquote(user) or None, "password": unquote(password)}
    places = [_place(each) for each in match["hosts"].split(",")]
    once = {"retry": Retry(NoBackoff(), 0), "socket_timeout": SENTINEL_S, "socket_connect_timeout": SENTINEL_S}
    return SentinelPool(match["name"], Sentinels(places, sentinel_kwargs=once), db=int(match["db"] or 0), **options)


@dataclass(frozen=True)
class Keeping:
    """How the server that leads keeps what it has accepted, as far as it may be asked."""

    run_id: str = ""
    """Another one at every start of every server."""
    forgets: str = ""
    """By what it loses accepted jobs, also where replicas have them."""
    flushes: str = "always"
    """When its log reaches the disk; "" where it may not be asked."""
    unasked: str = ""
    """What this user may not ask."""

    def fault(self, replicas: int) -> str:
        """By what it may lose jobs that so many replicas have, too; "" if by nothing."""
        if self.forgets or replicas or self.flushes in ("", "always"):
            return self.forgets
        return (
            f"its log reaches the disk late (appendfsync {self.flushes}); start it with --appendfsync always, or have"
            " replicas and --redis-wait"
        )


async def ask_keeping(url: str) -> Keeping:
    """How the server keeps jobs that leads now. Raises `QueueUnavailable` where none answers, or it does not lead, or
    still loads: its log is off until it has read it."""
    try:
        client = connect(url, 1, CONNECT_S)  # for which redis-py reads a file
    except OSError as error:
        raise QueueUnavailable(f"the queue's Redis is not reachable: {error.strerror}") from None
    try:
        facts = await client.info()
        if facts.get("role") != "master":
            raise QueueUnavailable("the queue's Redis does not lead its group now")
        if facts.get("loading"):
            raise QueueUnavailable("the queue's Redis loads its data, and does not say before how it keeps jobs")
        flushes = await _flushes(client)
    except NoPermissionError:
        return Keeping(unasked=INFO)
    except (RedisError, OSError, TimeoutError) as error:
        raise QueueUnavailable(f"the queue's Redis is not reachable: {error}") from None
    finally:
        await client.aclose()
    return Keeping(str(facts.get("run_id")), _forgets(facts), flushes, "" if flushes else "CONFIG GET appendfsync")


async def _flushes(client: Redis) -> str:
    try:
        return str((await client.config_get("appendfsync")).get("appendfsync", ""))
    except ResponseError:  # hosted servers forbid it, or do not know it
        return ""


def _forgets(facts: Mapping[str, Any]) -> str:
    policy = str(facts.get("maxmemory_policy"))
    if not facts.get("aof_enabled"):
        return "it keeps no log of them; start it with --appendonly yes --appendfsync always"
    if facts.get("maxmemory") and policy.startswith("allkeys"):
        return f"{policy} evicts them when memory is full; give it --maxmemory-policy noeviction"
    return ""


def _place(text: str) -> tuple[str, int]:
    host, mark, port = text.rpartition(":")
    host, port = (host, port) if mark else (text, str(SENTINEL_PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


class LeadsNoMore(QueueUnavailable):
    """Most sentinels do not say that the server leads which was asked: connections to it are of no use."""


@dataclass(frozen=True)
class LeaderView:
    """What a server says of itself with a write."""

    run_id: str = ""
    """Another one at every start of every server; "" where it may not be asked."""
    replicas: frozenset[tuple[str, str]] = frozenset()
    """Places of those that follow it."""


class Followers:
    """How many replicas are to have what is promised: so many, and all that follow the leader. Sentinels choose the
    next one by what replicas told of themselves up to ten seconds before, so it may be any of them. The one that they
    choose follows no more, and the old leader hears of its end late: who is left to follow would make promises for it.
    So when there is one follower less, sentinels are asked who leads."""

    def __init__(self, least: int) -> None:
        self.least = least
        self._seen = 0
        self._confirmed: LeaderView | None = None
        self._fewer: LeaderView | None = None
        self._fewer_since = 0.0

    @property
    def needed(self) -> int:
        """Replicas."""
        return max(self.least, self._seen)

    def see(self, view: LeaderView | None) -> None:
        """What the leader says of itself. Where it may not be asked, nobody knows of more replicas than the least."""
        if view is not None:
            self._seen = len(view.replicas)

    async def confirm(self, view: LeaderView, pool: ConnectionPool) -> None:
        """That the server still leads which the replicas have followed in this. Raises `QueueUnavailable`."""
        if not isinstance(pool, SentinelPool) or not view.run_id:
            return  # nobody can be asked, or not by name
        if not self._is_confirmed(view):
            await check_leads(view, pool)
        self._confirmed = view

    def _is_confirmed(self, view: LeaderView) -> bool:
        """Whether nobody need be asked: the server that led, and none of its replicas has left. Raises
        `QueueUnavailable` where one just has."""
        known = self._confirmed
        if known is None or known.run_id != view.run_id:
            return False
        if known.replicas <= view.replicas:
            return True
        if self._fewer != view:
            self._fewer, self._fewer_since = view, time.monotonic()
        if time.monotonic() - self._fewer_since < SETTLE_S:
            raise QueueUnavailable(
                "a replica has left the queue's Redis; until it is known who leads nothing is promised, ask again"
            )
        return False


async def check_leads(view: LeaderView, pool: ConnectionPool) -> None:
    """Raises `LeadsNoMore` where not most sentinels say so of the server that says this of itself, or one is about to
    replace it, of which the others hear seconds later."""
    if not isinstance(pool, SentinelPool) or not view.run_id:
        return
    asked = pool.sentinel_manager
    views = [said for said in await asked.views(pool.service_name) if said.get("runid") == view.run_id]
    if any(map(_is_replacing, views)):
        raise LeadsNoMore("a sentinel replaces the server that leads the queue's Redis; nothing is promised, ask again")
    if 2 * len(views) <= len(asked.sentinels):
        raise LeadsNoMore(
            f"{len(views)} of {len(asked.sentinels)} sentinels say that this server leads the queue's Redis; nothing is"
            " promised, ask again"
        )


async def run_replicated(
    client: Redis, script: AsyncScript, prefix: str, args: Sequence[str | int | float | bytes], followers: Followers
) -> Any:
    """The script's answer, once replicas have all that it says. Raises `QueueUnavailable` where too few do, or another
    server may lead since."""
    command, asked = ("EVALSHA", script.sha, 1, prefix, *args), followers.needed
    try:
        answer, reached, view = await _followed(client, prefix, followers, command)
    except NoScriptError:
        await client.script_load(script.script)
        answer, reached, view = await _followed(client, prefix, followers, command)
    if asked <= reached < followers.needed:  # more follow than was known: nobody waited for them
        _, reached, again = await _followed(client, prefix, followers)
        if again.run_id != view.run_id:
            raise QueueUnavailable("the queue's Redis has another leader since; nothing is promised, ask again")
        view = again
    if reached < followers.needed:
        await check_leads(view, client.connection_pool)  # one that was deposed may hear of it half a minute late
        raise QueueUnavailable(
            f"{reached} replicas of the queue's Redis have this write, and {followers.needed} are to have it: all that"
            f" follow, and as many as --redis-wait says ({followers.least}); nothing is promised, ask again"
        )
    await followers.confirm(view, client.connection_pool)
    return answer


async def _followed(
    client: Redis, prefix: str, followers: Followers, *scripts: Sequence[str | int | float | bytes]
) -> tuple[Any, int, LeaderView]:
    """What the script answers, if there is one, how many replicas have what it has seen, and of which server.

    WAIT speaks of the writes of its own connection, so it goes with the script. A script that only finds what was
    written before writes nothing, and WAIT would then speak of something older: hence one more write, behind which
    replicas have everything that the script has seen."""
    pipeline = client.pipeline(transaction=False)
    for words in scripts:
        pipeline.execute_command(*words)
    pipeline.execute_command("SET", f"{prefix}replicated", 1)
    pipeline.execute_command("INFO", "server")
    pipeline.execute_command("INFO", "replication")
    pipeline.execute_command("WAIT", followers.needed, round(WAIT_S * 1000))
    *answers, mark, server, replication, reached = await pipeline.execute(raise_on_error=False)
    view = _view(server, replication)
    followers.see(view)
    for each in (*answers, mark, reached):
        if isinstance(each, Exception):
            raise each
    return (answers[0] if answers else None), reached, view or LeaderView()


def _view(server: Any, replication: Any) -> LeaderView | None:
    """None where the server may not be asked, or does not lead."""
    if not isinstance(server, dict) or not isinstance(replication, dict) or replication.get("role") != "master":
        return None
    followers = (each for name, each in replication.items() if re.fullmatch(r"slave\d+", name))
    online = (each for each in followers if isinstance(each, dict) and each.get("state") == "online")
    replicas = frozenset((str(each["ip"]), str(each["port"])) for each in online)
    return LeaderView(str(server.get("run_id", "")), replicas)
