"""Bodies of requests: read with patience and no more, capped, and what is large goes to disk off the event loop."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.types import Message, Receive, Scope

from slipstream.rpc.callers import Places
from slipstream.services.front.api_errors import ApiError, too_large
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.json_body import JsonBody
from slipstream.time_limits import within

BLOCK_BYTES = 256 * 1024
SMALL_BYTES = 16 * 1024
JSON_ENCODING = "utf-8-sig"
"""Some editors and shells write UTF-8's mark at the beginning of a file that is then sent."""
LINGER_S, LINGER_BYTES = 1.0, 16 * 1024**2
"""What is still read of a body that was refused, so that its sender reads why."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def body_chunks(scope: Scope, receive: Receive, config: FrontConfig, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises `ApiError` for one that is too large, told or not, too slow or compressed;
    `ClientGone`."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            "the body is compressed; send it as it is, without content-encoding", status=415, code="wrong_type"
        )
    num_bytes = headers.get(b"content-length", b"0")
    if int(num_bytes) > max_bytes:
        raise too_large(f"the body has {int(num_bytes)} bytes; at most {max_bytes} are taken")
    clock = asyncio.get_running_loop().time
    waited_s, num_bytes, is_more = 0.0, 0, True
    while is_more:
        since = clock()
        message = await _next(receive, config.upload_idle_s)
        waited_s += clock() - since
        chunk, is_more = message.get("body", b""), message.get("more_body", False)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large(f"the body has more than {max_bytes} bytes")
        if num_bytes < config.min_upload_rate * (waited_s - config.upload_idle_s):
            raise _too_slow(f"the body came with less than {config.min_upload_rate} bytes a second")
        if chunk:
            yield chunk


async def _next(receive: Receive, idle_s: float) -> Message:
    async with within(idle_s, lambda: _too_slow(f"nothing of the body came for {idle_s:g} s")):
        message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def _too_slow(why: str) -> ApiError:
    return ApiError(f"{why}; send it anew", status=408, code="too_slow")


async def linger(receive: Receive) -> None:
    """Reads on for a while and forgets it: a connection that is closed with unread bytes loses the answer too."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_bytes < LINGER_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


@contextlib.contextmanager
def json_body(config: FrontConfig, bare: re.Pattern[bytes] | None = None) -> Iterator[JsonBody]:
    """A body to read into; its files are closed at the end. `bare`: before media without a head, see `JsonBody`."""
    with JsonBody(config.max_json_bytes, config.max_body_bytes, bare) as body:
        yield body


async def read_json(
    scope: Scope, receive: Receive, config: FrontConfig, body: JsonBody, take: Callable[[int], None]
) -> Any:
    """The value of a JSON body, whose media are in `body` then. `take` counts their bytes and raises where there are
    too many in all. Raises `ApiError`."""
    held, block = 0, bytearray()
    async for chunk in body_chunks(scope, receive, config, config.max_body_bytes):
        block += chunk
        if len(block) >= BLOCK_BYTES:
            await asyncio.to_thread(body.feed, bytes(block))
            block.clear()
            take(body.media_bytes - held)
            held = body.media_bytes
    if len(block) > SMALL_BYTES:
        await asyncio.to_thread(body.feed, bytes(block))
    else:
        body.feed(bytes(block))
    take(body.media_bytes - held)
    if len(block) > SMALL_BYTES:
        return await asyncio.to_thread(body.value, JSON_ENCODING)
    return body.value(JSON_ENCODING)


def spool_places(config: FrontConfig) -> Places:
    """Room for media on disk."""
    return Places("spooled_bytes", config.max_spool_bytes, config.owner_share, are="wait to be sent on")


def request_places(config: FrontConfig) -> Places:
    """Room for requests."""
    return Places("requests", config.max_requests, config.owner_share)
