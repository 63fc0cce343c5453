"""A queue on several Redis servers of which one leads: the leader by Sentinel, and writes that replicas have too.

`sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT/NAME[/DB]` names sentinels and the group that they watch. The user is
that of the servers; sentinels are asked without one.
"""

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError

from slipstream.archive.queue import QueueUnavailable

SCHEME = "sentinel://"
SENTINEL_PORT = 26379
SENTINEL_S = 0.5
"""For a sentinel to answer: another one is asked then, and a call of the queue has some seconds for all of it."""
WAIT_S = 1.5
"""For replicas to say that they have a write."""
PROMISES = frozenset({"open", "submit", "seal", "finish", "put_part", "cancel", "retry_dead", "ping"})
"""Scripts whose answer somebody relies on; health is one. A lease that is lost with its server is taken once more, and
fenced."""

_URL = re.compile(r"sentinel://(?:(?P<user>[^@/]*)@)?(?P<hosts>[^@/]+)/(?P<name>[\w.-]+)(?:/(?P<db>\d+))?")


class SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to whoever leads now; callers wait where all are in use."""

    async def aclose(self) -> None:
        """Also those to the sentinels."""
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def connect_by_sentinel(url: str, **options: Any) -> ConnectionPool:
    """`options`: as of a `BlockingConnectionPool`. Raises `ValueError` for what is no such URL."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"sentinels are named as {SCHEME}HOST:PORT,HOST:PORT/NAME")
    user, mark, password = (match["user"] or "").partition(":")
    if mark:
        options |= {"username": unquote(user) or None, "password": unquote(password)}
    places = [_place(each) for each in match["hosts"].split(",")]
    limits = {"socket_timeout": SENTINEL_S, "socket_connect_timeout": SENTINEL_S}
    return SentinelPool(match["name"], Sentinel(places, sentinel_kwargs=limits), db=int(match["db"] or 0), **options)


def _place(text: str) -> tuple[str, int]:
    host, mark, port = text.rpartition(":")
    host, port = (host, port) if mark else (text, str(SENTINEL_PORT))
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


async def run_replicated(
    client: Redis, script: AsyncScript, prefix: str, args: Sequence[str | int | float | bytes], replicas: int
) -> Any:
    """The script's answer, once so many replicas have all that it says. Raises `QueueUnavailable` where too few do.

    WAIT speaks of the writes of its own connection, so it goes with the script. A script that only finds what was
    written before writes nothing, and WAIT would then speak of something older: hence one more write, behind which
    replicas have everything that the script has seen."""
    for is_known in (True, False):
        if not is_known:
            await client.script_load(script.script)
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("EVALSHA", script.sha, 1, prefix, *args)
        pipeline.execute_command("SET", f"{prefix}replicated", 1)
        pipeline.execute_command("WAIT", replicas, round(WAIT_S * 1000))
        answer, mark, reached = await pipeline.execute(raise_on_error=False)
        if not (is_known and isinstance(answer, NoScriptError)):
            break
    for each in (answer, mark, reached):
        if isinstance(each, Exception):
            raise each
    if reached < replicas:
        raise QueueUnavailable(
            f"{reached} replicas of the queue's Redis have this write, and --redis-wait asks for {replicas}; nothing is"
            " promised, ask again"
        )
    return answer
