"""One request while it is served: who makes it, how it is answered, and that its work ends when its client goes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send

from slipstream.services.front.bodies import ClientGone
from slipstream.time_limits import within

if TYPE_CHECKING:
    from slipstream.services.front.front import Front

JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"
PATIENCE_S = 5.0
"""How long a stream keeps its status open: what fails within this time is a status and not an event."""
PING = b": ping\n\n"


@dataclass
class Call:
    """Handed to an endpoint."""

    front: "Front"
    scope: Scope
    raw_receive: Receive
    raw_send: Send
    request_id: str
    owner: str = ""
    """'' without tokens."""
    token: str = field(default="", repr=False)
    params: Mapping[str, str] = field(default_factory=dict)
    """Parts of the path."""
    query: Mapping[str, str] = field(default_factory=dict)
    status: int = 0
    """Of the answer; 0: it has not begun."""
    is_read: bool = False
    """The body has come to its end."""
    is_answered: bool = False
    """So has the answer: that nobody waits any longer is then no news."""
    kind: str = ""
    """Of the answer's content."""
    tell_failure: Callable[[Mapping[str, Any]], bytes] = field(default=lambda error: b"")
    """How a stream says, once its status was sent, that it fails, and with what error."""
    tell_error: Callable[[Mapping[str, Any]], Mapping[str, Any]] = field(default=lambda error: {"error": error})
    """The body of an answer that is an error."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Of the caption, for its trace."""

    def __post_init__(self) -> None:
        self.is_read = self.header("content-length") in ("", "0") and not self.header("transfer-encoding")

    def header(self, name: str) -> str:
        """The request's; '' without one."""
        found = (value for key, value in self.scope["headers"] if key == name.encode())
        return next(found, b"").decode("latin-1")

    async def receive(self) -> Message:
        """The next piece of the body, or that the client has gone."""
        message = await self.raw_receive()
        self.is_read = self.is_read or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Raises `ClientGone` for a client that does not read."""
        async with within(self.front.config.write_s, ClientGone):
            await self.raw_send(message)

    async def begin(self, status: int, kind: str, headers: Mapping[str, str] | None = None) -> None:
        """Status and headers."""
        self.status, self.kind = status, kind
        sent = {"content-type": kind, "x-request-id": self.request_id} | dict(headers or {})
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})

    async def body(self, data: bytes, *, is_last: bool = False) -> None:
        """A piece of the answer."""
        await self.send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self.is_answered = is_last

    async def answer(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer, as JSON."""
        data = json.dumps(value).encode()
        await self.begin(status, JSON_TYPE, {"content-length": str(len(data))} | dict(headers or {}))
        await self.body(data, is_last=True)

    @contextlib.asynccontextmanager
    async def while_there(self) -> AsyncIterator[None]:
        """Surrounds work for a client, once the body has been read: cancelled when the client goes, which raises
        `ClientGone`."""
        working, is_gone = asyncio.current_task(), False
        assert working is not None

        async def watch() -> None:
            nonlocal is_gone
            while (await self.receive())["type"] != "http.disconnect":
                pass
            if not self.is_answered:
                is_gone = True
                working.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if is_gone and working.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def stream(self, events: AsyncGenerator[bytes, None]) -> None:
        """Sends events as they come, with pings in between. Raises what they raise, before the status is sent or
        after; closes them."""
        ping_s = self.front.config.ping_s
        upcoming = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait({upcoming}, timeout=PATIENCE_S)
            if not upcoming.done() or upcoming.exception() is None:
                await self.begin(200, EVENTS_TYPE, {"cache-control": "no-store", "x-accel-buffering": "no"})
            while True:
                done, _ = await asyncio.wait({upcoming}, timeout=ping_s)
                if not done:
                    await self.body(PING)
                    continue
                data = await upcoming
                if data is None:
                    await self.body(b"", is_last=True)
                    return
                upcoming = asyncio.ensure_future(anext(events, None))
                await self.body(data)
        finally:
            upcoming.cancel()
            await asyncio.gather(upcoming, return_exceptions=True)
            await events.aclose()
