"""A time limit that says what was not done in time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from slipstream.errors import DeadlineExceeded, SlipstreamError


@asynccontextmanager
async def within(seconds: float, late: Callable[[], Exception]) -> AsyncIterator[asyncio.Timeout]:
    """Around what may take so many seconds: beyond them it is cancelled, and `late()` is raised. A `TimeoutError` that
    comes from inside, as of a network, stays what it is. The limit may be moved."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except TimeoutError:
        if not limit.expired():
            raise
        raise late() from None


def within_limit(
    limit_s: float, undone: str, kind: type[SlipstreamError] = DeadlineExceeded
) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """The same for a server's own limit, of which the error says what is `undone`: "the caption was not done"."""
    return within(limit_s, lambda: kind(f"{undone} within this server's limit of {limit_s:g} s"))
