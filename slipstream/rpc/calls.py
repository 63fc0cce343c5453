"""The calling side: channels, gRPC failures as our errors, the status that comes first, tokens as metadata."""

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from urllib.parse import quote

import grpc

from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    PermissionDenied,
    ServiceUnavailable,
    ServiceUnreachable,
    SessionExists,
    SlipstreamError,
    Unauthenticated,
    UnreadableMedia,
    VideoNotFound,
)
from slipstream.rpc.callers import is_local
from slipstream.rpc.grpc_options import (
    ANSWERED_KEY,
    CHANNEL_OPTIONS,
    MAX_RECEIVE_OPTION,
    NO_PROXY,
    REQUEST_ID_KEY,
    RETRY_AFTER_KEY,
    UNREADABLE_KEY,
)
from slipstream.rpc.security import AUTHORIZATION_KEY, MAX_TOKEN_CHARS, SCHEME
from slipstream.rpc.tls import PeerSecurity

WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says when a message could not be sent because the peer is gone: https://github.com/grpc/grpc/issues/36066."""
_HINT = re.compile("[0-9]{1,9}", re.ASCII)
"""Of milliseconds; a peer may write anything."""
_ATTEMPT = re.compile("(?:last error: [A-Z_]+: |^errors resolving )(.+)")
"""To connect, as gRPC tells of it: the address, and how it failed."""
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Codes of no answer. CANCELLED is what a call gets that meets a server just as it closes; of calls that this side has
cancelled nobody hears as failed."""
_ERRORS: dict[grpc.StatusCode, type[SlipstreamError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: LimitExceeded,
    grpc.StatusCode.NOT_FOUND: VideoNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidConfig,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServiceUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.ALREADY_EXISTS: SessionExists,
}


def uri_of(address: str) -> str:
    """What gRPC is told of host:port or unix:PATH. It takes a path for that of a URI, in which `%41` is a letter, and
    which `#` and `?` end."""
    path = address.removeprefix("unix:")
    return address if path == address else f"unix:{quote(os.fsencode(path))}"


def open_channel(
    address: str, security: PeerSecurity | None = None, *, max_receive_bytes: int | None = None
) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`. Connects when first used and reconnects by itself.

    With `security` it is TLS, except over a unix socket, which is always plaintext. `max_receive_bytes`: the largest
    message taken from there, where that is less than usual.
    """
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if max_receive_bytes is not None:
        options = [(name, value) for name, value in options if name != MAX_RECEIVE_OPTION]
        options.append((MAX_RECEIVE_OPTION, max_receive_bytes))
    if is_local(address) or _is_own(address):
        options.append(NO_PROXY)
    if security is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(uri_of(address), options=options)
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    return grpc.aio.secure_channel(address, security.credentials, options=options)


def _is_own(address: str) -> bool:
    """Whether it is this machine's, on whichever of its networks: what is sent there is then sent from there, too.
    Names are not looked up."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        there = ipaddress.ip_address(host)
        with socket.socket(socket.AF_INET6 if there.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # finds the way, and sends nothing
            here = ipaddress.ip_address(probe.getsockname()[0])
    except (ValueError, OSError):
        return False
    return here == there or here.is_loopback


Pairs = Callable[[], Iterable[tuple[str, str]]]
_ALONG: list[Pairs] = []
"""What else calls carry; nothing but in a process that traces them."""


def send_along(pairs: Pairs) -> None:
    """Every call that is made on a request's behalf carries these from now on."""
    _ALONG.append(pairs)


def sent_along() -> list[tuple[str, str]]:
    """What a call carries beside what is its own."""
    return [pair for pairs in _ALONG for pair in pairs()]


def request_metadata(request_id: str) -> grpc.aio.Metadata:
    """Metadata that names the request at the called service."""
    return grpc.aio.Metadata((REQUEST_ID_KEY, request_id), *sent_along())


def as_slipstream_error(error: grpc.aio.AioRpcError, peer: str) -> SlipstreamError:
    """What a failed call means for a request: the peer's own complaint, or that the peer is not to be had. Then a
    note says where it was looked for, and what was found there, which a server tells no caller."""
    code = error.code()
    is_gone = code in _GONE and not is_answer(error)
    if is_gone or error.details() == WRITE_FAILED:
        gone = ServiceUnreachable(f"the {peer} is not reachable ({code.name.lower()}); try again when it is up")
        if attempt := _ATTEMPT.search(error.details() or ""):
            gone.add_note(attempt[1])
        return gone
    details = error.details() or f"the {peer} failed with {code.name}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details, retry_after_s=_retry_after_s(error))
    if code is grpc.StatusCode.INVALID_ARGUMENT and _tells(error, UNREADABLE_KEY):
        return UnreadableMedia(details)
    return _ERRORS.get(code, SlipstreamError)(details)


def is_too_large(error: grpc.aio.AioRpcError) -> bool:
    """This side's gRPC refused a message for its size."""
    return error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or "")


def is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer said so itself: one that is up may be without its own store, or stopping."""
    return _tells(error, ANSWERED_KEY)


def _tells(error: grpc.aio.AioRpcError, name: str) -> bool:
    """Whether there is such trailing metadata."""
    return any(key == name for key, _ in error.trailing_metadata() or ())


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """The peer's hint, if it gave one that makes sense."""
    hints = [str(value) for key, value in error.trailing_metadata() or () if key == RETRY_AFTER_KEY]
    return int(hints[0]) / 1000 if hints and _HINT.fullmatch(hints[0]) else None


# -- first status -----------------------------------------------------------------------------------------------------

STATUS_GRACE_S, STATUS_POLL_S = 1.0, 0.01
"""How long a gateway's own status may come behind the failure of a write, and how often it is looked for."""


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
        deadline = asyncio.get_running_loop().time() + STATUS_GRACE_S
        while self._status is None or self._status[1] == WRITE_FAILED:
            self._status = (
                await self._call.code(),
                await self._call.details(),
                await self._call.trailing_metadata(),
            )
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(STATUS_POLL_S)
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


# -- tokens -----------------------------------------------------------------------------------------------------------

# Plain metadata rather than gRPC's call credentials, which exist on TLS only: a gateway on loopback or a unix socket
# may ask for tokens too.


def token_metadata(address: str, security: PeerSecurity | None, token: str) -> grpc.aio.Metadata:
    """Metadata that says who calls; empty without a token.

    Raises:
        InvalidConfig: a token that is malformed, or that others on the way to `address` could read.
    """
    if not token:
        return grpc.aio.Metadata()
    if len(token) > MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfig(f"a token has at most {MAX_TOKEN_CHARS} printable characters and no space")
    if security is None and not is_local(address):
        raise InvalidConfig(
            f"no token is sent to {address} in plaintext, where others could read it: use TLS, with `ca`"
        )
    return grpc.aio.Metadata((AUTHORIZATION_KEY, SCHEME + token))
