"""How to reach a gateway, or several that stand in for each other, and an open connection to them."""

import asyncio
import contextvars
import os
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, Self, TypeVar

import grpc

from slipstream.config import is_port, is_sendable
from slipstream.errors import InvalidConfig, InvalidRequest, ServiceUnavailable, SlipstreamError
from slipstream.rpc.calls import open_channel, token_metadata
from slipstream.rpc.tls import make_peer_security

_SCHEMES = ("unix:", "unix-abstract:", "vsock:", "dns:", "ipv4:", "ipv6:", "xds:")
"""Of addresses that gRPC takes apart itself."""
CLOSED = "the connection to the gateway was closed"
CONNECT_S = 2.0
"""How long one of several gateways has to be reached."""
AnswerT = TypeVar("AnswerT")
WorkP = ParamSpec("WorkP")
FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class GatewayAddress:
    """Where a gateway is, and how to call it."""

    address: str
    """`host:port`, or `unix:PATH`; several, separated by `,`, are gateways that stand in for each other."""
    token: str = field(default="", repr=False)
    ca: FilePath | None = None
    """PEM file of the authority of the gateway's certificate; None: plaintext."""
    cert: FilePath | None = None
    """PEM file of the certificate to show, where the gateway asks for one, and in `key` its private key."""
    key: FilePath | None = None
    option_prefix: str = ""
    """What its user writes before `ca`, `cert` and `key`, for complaints: "--" on a command line."""

    def open(self) -> "Connection":
        """The connection, which connects when it is first used. Needs a running event loop.

        Raises:
            InvalidConfig: a file that cannot be used, an address that is none, or a token that is malformed or would
                travel in plaintext.
        """
        security = None
        if self.ca or self.cert or self.key:
            own = self._named("cert", self.cert), self._named("key", self.key)
            security = make_peer_security(self._named("ca", self.ca), *own)
        if not isinstance(self.token or "", str):
            raise InvalidConfig(f"a token must be text, not {type(self.token).__name__}")
        if not isinstance(self.address, str) or not is_sendable(self.address):
            raise InvalidConfig(f"{self.address!r} is no address of a gateway; give HOST:PORT or unix:PATH")
        told = [self.address] if self.address.startswith(("ipv4:", "ipv6:")) else self.address.split(",")
        addresses = [address.strip() for address in told]
        for address in addresses:
            _check(address)
        metadata = [token_metadata(address, security, self.token) for address in addresses]
        channel, *others = [open_channel(address, security) for address in addresses]
        return Connection(channel, metadata[0], deque(others))

    def _named(self, name: str, path: FilePath | None) -> tuple[str, str]:
        return self.option_prefix + name, os.fspath(path or "")


def _check(address: str) -> None:
    if address.startswith(_SCHEMES):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not is_port(port):
        raise InvalidConfig(f"{address!r} is no address of a gateway; give HOST:PORT or unix:PATH")


def check_words(**said: object) -> None:
    """Raises `InvalidConfig` for what must be text and is none, by its name."""
    for name, word in said.items():
        if not isinstance(word, str):
            raise InvalidConfig(f"{name} must be text, not {word!r}")


_used_in: set[int] = set()
"""Processes that have called a gateway: this one, and one that it is a fork of."""


def check_process() -> None:
    """Raises `InvalidRequest` in a fork, where no call would ever end: the threads of gRPC are its parent's."""
    _used_in.add(os.getpid())
    if len(_used_in) > 1:
        raise InvalidRequest(
            "this process is a fork of one that had a captioner open, and gRPC does not outlive a fork: start it by"
            " 'spawn' (multiprocessing.get_context('spawn')), or open the first captioner behind the fork"
        )


@contextmanager
def closing_told(failure: Callable[[], SlipstreamError | None] = lambda: None) -> Iterator[None]:
    """Around a call. gRPC cancels whoever waits for one that this side has ended, as by closing its channel, and begins
    none on a channel that is closed: raises `failure()`, or `ServiceUnavailable`, where nobody has cancelled the task.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise failure() or ServiceUnavailable(CLOSED) from error
    except grpc.aio.UsageError as error:
        raise ServiceUnavailable(CLOSED) from error


@dataclass
class Connection:
    """An open channel to a gateway, and what every call on it carries. An async context manager."""

    channel: grpc.aio.Channel
    metadata: grpc.aio.Metadata = field(default_factory=grpc.aio.Metadata, repr=False)
    others: deque[grpc.aio.Channel] = field(default_factory=deque, repr=False)
    """To the gateways that stand in for this one."""
    is_closed: bool = field(default=False, init=False)
    """Here: no gateway can be waited for any more."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop, init=False, repr=False)

    def check_loop(self) -> None:
        """Raises `InvalidRequest` where it was not opened."""
        if self._loop is not asyncio.get_running_loop():
            raise InvalidRequest(
                "this captioner belongs to another event loop, or to the process that this one is a fork of: make one"
                " here"
            )

    def turn_from(self, lost: grpc.aio.Channel) -> None:
        """Calls go to the next gateway from now on, unless somebody else who lost this one has turned already."""
        if self.channel is lost:
            self.others.append(lost)
            self.channel = self.others.popleft()

    async def ask(self, call: Callable[[grpc.aio.Channel], Awaitable[AnswerT]]) -> AnswerT:
        """What the first gateway answers that is there and not about to stop. Raises what it says, and
        `ServiceUnavailable` if none is."""
        untried = len(self.others)
        while True:
            channel = self.channel
            try:
                return await call(channel)
            except ServiceUnavailable:
                self.turn_from(channel)
                if not untried:
                    raise
            untried -= 1

    async def is_ready(self, wait_s: float) -> bool:
        """Whether the gateway can be reached in that time; else calls go to the next. Raises `ServiceUnavailable` on a
        connection that is closed."""
        channel = self.channel
        try:
            async with asyncio.timeout(wait_s):
                with closing_told():
                    await channel.channel_ready()
            return True
        except TimeoutError:
            self.turn_from(channel)
            return False

    async def settle(self) -> None:
        """For calls that cannot be repeated: they go to a gateway that can be reached, where there is a choice."""
        for _ in self.others.copy():
            if await self.is_ready(CONNECT_S):
                return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs on it."""
        self.is_closed = True
        for channel in (self.channel, *self.others):
            await channel.close()


async def beside_loop(work: Callable[WorkP, AnswerT], /, *args: WorkP.args, **kwargs: WorkP.kwargs) -> AnswerT:
    """What blocking work gives, done on another thread. Once a program's main thread has ended Python gives no work to
    such threads any more, while those that the program has started itself go on: then it is done here."""
    in_context = partial(contextvars.copy_context().run, work, *args, **kwargs)
    try:
        done = asyncio.get_running_loop().run_in_executor(None, in_context)
    except RuntimeError:  # of handing it over, not of the work
        return in_context()
    return await done


def close_with(owner: object, exits: AsyncExitStack) -> None:
    """Closes what is in `exits` with the owner's last reference, unless that was done before. Needs a running event
    loop: what is left when that has ended goes with the program."""
    closing = weakref.finalize(owner, _close_in, asyncio.get_running_loop(), exits, os.getpid())
    closing.atexit = False
    exits.callback(closing.detach)


def _close_in(loop: asyncio.AbstractEventLoop, exits: AsyncExitStack, pid: int) -> None:
    """Without waiting: the garbage collector may call this in any thread, and in a fork."""
    if loop.is_running() and pid == os.getpid():
        asyncio.run_coroutine_threadsafe(exits.aclose(), loop)
