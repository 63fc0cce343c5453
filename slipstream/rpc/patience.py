"""Messages of a stream whose sender may pause, but not for ever. Knows no service."""

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from slipstream.errors import SessionIdle

T = TypeVar("T")


class Patient(AsyncIterator[T], Generic[T]):
    """The same messages. Time counts only while somebody waits for the next.

    Args:
        idle_timeout_s: longest pause; after it `anext` raises `SessionIdle`.
    """

    def __init__(self, messages: AsyncIterator[T], idle_timeout_s: float) -> None:
        self._messages = aiter(messages)
        self._idle_timeout_s = idle_timeout_s

    async def __anext__(self) -> T:
        limit = asyncio.timeout(self._idle_timeout_s)
        try:
            async with limit:
                return await anext(self._messages)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SessionIdle(
                f"nothing was said for {self._idle_timeout_s:g} s, so the session gave up its place; open it again, or"
                " raise --idle-timeout-s"
            ) from None
