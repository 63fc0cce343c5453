"""Scripts in Redis over the keys of one queue: every failure of the server or the way to it is one of two errors."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from redis.exceptions import (
    ClusterDownError,
    DataError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from slipstream.archive.queue import DamagedRecord, QueueUnavailable
from slipstream.archive.redis_failover import PROMISES, Followers, LeadsNoMore, connect_each, run_replicated

# All scripts may be repeated, so one that met a connection from before a restart is sent again at once.

CALL_S = 3.0
MAX_WORDS_CHARS = 300
"""Of what a failure says of itself."""

NOT_NOW = re.compile(
    r"\b(MISCONF|OOM|READONLY|LOADING|BUSY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|UNKILLABLE|NOPERM|NOAUTH|"
    r"WRONGPASS)\b|out of memory|command not allowed when used memory|read only replica|loading the dataset|"
    r"ACL failure in script|user executing the script can't",
    re.IGNORECASE,
)
"""In an error answer: the server is there but would not do it now, or not for this user. What a user may not is said in
a script by other words than outside, and without a code."""
NOT_NOW_ERRORS = (NoPermissionError, ReadOnlyError, OutOfMemoryError, MasterDownError, ClusterDownError, TryAgainError)
"""The same of answers whose code the client takes off their words."""


def load_scripts() -> dict[str, str]:
    """The Lua scripts by name, each between the prelude and the epilogue."""
    texts = {path.name.removesuffix(".lua"): path.read_text() for path in files(__package__).joinpath("lua").iterdir()}
    prelude, epilogue = texts.pop("prelude"), texts.pop("epilogue")
    return {name: f"{prelude}\nlocal function script()\n{text}\nend\n\n{epilogue}" for name, text in texts.items()}


CONNECTIONS = 32
WORKER_CONNECTIONS = {"beat": 1, "take": 4}
"""Beats have a connection of their own, so that nothing that callers ask for can make a lease expire."""
WORKER_SCRIPTS = {
    "beat": "beat",
    **dict.fromkeys(("take", "finish", "retry", "crash", "find", "ping", "open_parts", "put_part"), "take"),
    **dict.fromkeys(("put_note", "find_note", "add_known", "list_known"), "take"),
}
"""Which connections a script uses; the others share those of the callers."""
OnCall = Callable[[str, float], None]
"""Hears of a call of the store: the script, and how many seconds it took."""


class ScriptStore:
    """Scripts over the keys of one name. Every failure of the server or the way to it is `QueueUnavailable`, within
    `CALL_S`. At most `connections` calls for callers are under way; more wait."""

    def __init__(
        self,
        url: str,
        name: str,
        scripts: Mapping[str, str],
        connections: int,
        on_call: OnCall | None = None,
        replicas: int = 0,
    ) -> None:
        self._followers = Followers(replicas)
        self.prefix = f"{{{name}}}:"
        sizes = {**WORKER_CONNECTIONS, "": connections}
        self._clients = connect_each(url, sizes, CALL_S)
        self._scripts = {name: self._clients[""].register_script(text) for name, text in scripts.items()}
        self._on_call = on_call or (lambda script, seconds: None)

    async def run(self, script: str, *args: str | int | float | bytes) -> Any:
        """The script's answer: bytes, integers and lists of them. Raises `QueueUnavailable`, or `DamagedRecord` where
        the script cannot read what it meets."""
        task, began = asyncio.current_task(), time.monotonic()
        asked = task.cancelling() if task else 0
        try:
            answer = await self._answer(script, args)
        finally:
            self._on_call(script, time.monotonic() - began)
        if task and task.cancelling() > asked:  # `wait_for` of Python 3.11, used by redis-py, may swallow it
            raise asyncio.CancelledError
        return answer

    async def _answer(self, script: str, args: Sequence[str | int | float | bytes]) -> Any:
        client = self._clients[WORKER_SCRIPTS.get(script, "")]
        try:
            async with asyncio.timeout(CALL_S):
                if self._followers.least and script in PROMISES:
                    return await run_replicated(client, self._scripts[script], self.prefix, args, self._followers)
                return await self._scripts[script](keys=[self.prefix], args=args, client=client)
        except ResponseError as error:
            if not isinstance(error, (NoScriptError, *NOT_NOW_ERRORS)) and not NOT_NOW.search(str(error)):
                raise DamagedRecord(f"the queue's Redis cannot carry out {script}: {_first_sentence(error)}") from error
            if isinstance(error, ReadOnlyError | MasterDownError) or "READONLY" in str(error):
                # a server that led before; redis-py makes a broken connection to it again
                await self._ask_who_leads()
            raise QueueUnavailable(f"the queue's Redis refuses: {_first_sentence(error)}") from None
        except LeadsNoMore:
            await self._ask_who_leads()
            raise
        except DataError:
            raise
        except (RedisError, OSError, TimeoutError) as error:
            raise QueueUnavailable(f"the queue's Redis is not reachable: {_words(error)}") from None

    async def _ask_who_leads(self) -> None:
        """Idle connections end, and those that take their place ask sentinels."""
        for client in self._clients.values():
            await client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()


def _words(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_WORDS_CHARS]


def _first_sentence(error: Exception) -> str:
    """Of an answer, behind which the server quotes the script."""
    return _words(error).split(". ")[0]
