"""A connection to a Redis-compatible server that runs our scripts. Knows no jobs, only which errors mean "not now".

Every call ends within `CALL_S`, whatever the server does; all scripts may be repeated, so one that met a connection
from before a restart is sent again at once.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, NoScriptError, RedisError, ResponseError

from slipstream.errors import InvalidConfig
from slipstream.jobs.base import QueueUnavailable

CONNECT_S, SOCKET_S, CALL_S = 2.0, 2.5, 3.0

NOT_NOW = re.compile(
    r"\b(MISCONF|OOM|READONLY|LOADING|BUSY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|UNKILLABLE|NOPERM|NOAUTH|"
    r"WRONGPASS)\b|out of memory|command not allowed when used memory|read only replica|loading the dataset",
    re.IGNORECASE,
)
"""In an error answer: the server is there but would not do it now, or not for this user."""


def load_scripts() -> dict[str, str]:
    """The Lua scripts by name, each with the prelude ahead of it."""
    texts = {path.name.removesuffix(".lua"): path.read_text() for path in files(__package__).joinpath("lua").iterdir()}
    prelude = texts.pop("prelude")
    return {name: prelude + text for name, text in texts.items()}


class ScriptStore:
    """Scripts over the keys of one name. Every failure of the server or the way to it is `QueueUnavailable`."""

    def __init__(self, url: str, name: str, scripts: Mapping[str, str]) -> None:
        self.prefix = f"{{{name}}}:"
        try:
            self._redis: Redis = Redis.from_url(
                url,
                protocol=2,
                socket_timeout=SOCKET_S,
                socket_connect_timeout=CONNECT_S,
                retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            )
        except (ValueError, TypeError) as error:
            raise InvalidConfig(f"no URL of a Redis server: {error}; use redis://, rediss:// or unix://") from None
        self._scripts = {name: self._redis.register_script(text) for name, text in scripts.items()}

    async def run(self, script: str, *args: str | int | float | bytes) -> Any:
        """The script's answer: bytes, integers and lists of them. Raises `QueueUnavailable`."""
        try:
            async with asyncio.timeout(CALL_S):
                return await self._scripts[script](keys=[self.prefix], args=args)
        except ResponseError as error:
            if not isinstance(error, NoScriptError) and not NOT_NOW.search(str(error)):
                raise
            raise QueueUnavailable(f"the queue's Redis refuses: {_first_sentence(error)}") from None
        except DataError:
            raise
        except (RedisError, OSError, TimeoutError) as error:
            raise QueueUnavailable(f"the queue's Redis is not reachable: {_first_sentence(error)}") from None

    async def close(self) -> None:
        await self._redis.aclose()


def _first_sentence(error: Exception) -> str:
    return (str(error) or type(error).__name__).split(". ")[0][:200]


def texts(values: Sequence[bytes | int]) -> list[str]:
    """Decodes an answer; damaged bytes become replacement characters."""
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]
