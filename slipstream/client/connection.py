"""The connection to a gateway: its address, what proves who calls, an open channel, and why a call failed."""

import asyncio
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from slipstream.rpc.channels import WRITE_FAILED, as_slipstream_error, open_channel, token_metadata
from slipstream.rpc.security import make_peer_security

# -- connection -------------------------------------------------------------------------------------------------------

FilePath = str | os.PathLike[str]


@dataclass(frozen=True)
class GatewayAddress:
    """Where a gateway is, and how to call it."""

    address: str
    """`host:port`, or `unix:PATH`."""
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
            InvalidConfig: a file that cannot be used, or a token that is malformed or would travel in plaintext.
        """
        security = make_peer_security(
            self._named("ca", self.ca), self._named("cert", self.cert), self._named("key", self.key)
        )
        metadata = token_metadata(self.address, security, self.token)
        return Connection(open_channel(self.address, security), metadata)

    def _named(self, name: str, path: FilePath | None) -> tuple[str, str]:
        return self.option_prefix + name, os.fspath(path or "")


@dataclass(frozen=True)
class Connection:
    """An open channel to a gateway, and what every call on it carries. An async context manager."""

    channel: grpc.aio.Channel
    metadata: grpc.aio.Metadata = field(default_factory=grpc.aio.Metadata, repr=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs on it."""
        await self.channel.close()


@contextmanager
def our_errors() -> Iterator[None]:
    """What the gateway says to a call in this block, as one of our errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise as_slipstream_error(error, "gateway") from error


# -- first status -----------------------------------------------------------------------------------------------------

STATUS_GRACE_S = 0.2


class FirstStatus:
    """Keeps what the gateway said when it refuses a video in the middle of its upload.

    grpc.aio (https://github.com/grpc/grpc/issues/36066) lets the write that then fails replace the status by
    "Internal error from Core", or precede it.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._status: tuple[grpc.StatusCode, str | None, grpc.aio.Metadata] | None = None
        call.add_done_callback(self._keep)

    async def correct(self, error: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
        """The error with the gateway's own status, where it had one."""
        if error.details() != WRITE_FAILED:
            return error
        if self._status is None or self._status[1] == WRITE_FAILED:
            await asyncio.sleep(STATUS_GRACE_S)
            self._status = (
                await self._call.code(),
                await self._call.details(),
                await self._call.trailing_metadata(),
            )
        code, details, trailing_metadata = self._status
        return grpc.aio.AioRpcError(code, error.initial_metadata(), trailing_metadata, details)

    def _keep(self, call: Any) -> None:
        asked = call.code(), call.details(), call.trailing_metadata()
        code, details, trailing_metadata = map(_result_of, asked)
        self._status = code, details, trailing_metadata


def _result_of(ready: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that has nothing to wait for."""
    try:
        ready.send(None)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("the call has no status yet")
