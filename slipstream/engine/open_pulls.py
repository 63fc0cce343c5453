"""The pulls of one session's guidance that are open: few at once, and none outlives the session. Knows no wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.errors import Overloaded, SessionGone

MAX_OPEN_PULLS = 4
"""A draft pulls once. One that is lost may not have been missed yet when the next begins."""


class OpenPulls:
    """Of one session. Each may hold a copy of its guidance, hundreds of MB."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._ends: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Surrounds a pull. Raises `Overloaded` where too many are open, and `SessionGone` when the session ends."""
        if len(self._ends) >= MAX_OPEN_PULLS:
            raise Overloaded(
                f"the guidance of this session is being pulled {MAX_OPEN_PULLS} times; try again when one has ended"
            )
        end = asyncio.timeout(None)
        try:
            async with end:
                self._ends.add(end)
                yield
        except TimeoutError:
            if not end.expired():
                raise
            raise SessionGone(f"session {self._session_id!r} has ended") from None
        finally:
            self._ends.discard(end)

    def end(self) -> None:
        """The session has ended, and with it each of them."""
        for end in self._ends:
            if not end.expired():
                end.reschedule(0)
