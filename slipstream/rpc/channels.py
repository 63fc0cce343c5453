"""The calling side of a connection: channels with our options, and gRPC failures as our errors."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    ServiceUnavailable,
    ServiceUnreachable,
    SlipstreamError,
    Unauthenticated,
    VideoNotFound,
)
from slipstream.rpc.grpc_options import ANSWERED_KEY, CHANNEL_OPTIONS, REQUEST_ID_KEY, RETRY_AFTER_KEY
from slipstream.rpc.security import PeerSecurity, is_local
from slipstream.rpc.tokens import AUTHORIZATION_KEY, MAX_TOKEN_CHARS, SCHEME

# -- client -----------------------------------------------------------------------------------------------------------

WRITE_FAILED = "Internal error from Core"
"""What grpc.aio says when a message could not be sent because the peer is gone: https://github.com/grpc/grpc/issues/36066."""
_ERRORS: dict[grpc.StatusCode, type[SlipstreamError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: LimitExceeded,
    grpc.StatusCode.NOT_FOUND: VideoNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidConfig,
    grpc.StatusCode.UNAVAILABLE: ServiceUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: ServiceUnavailable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
}


def open_channel(
    address: str,
    security: PeerSecurity | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`. Connects when first used and reconnects by itself.

    With `security` it is TLS, except over a unix socket, which is always plaintext.
    """
    if security is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS, interceptors=interceptors)
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    return grpc.aio.secure_channel(address, security.credentials, options=options, interceptors=interceptors)


def request_metadata(request_id: str) -> grpc.aio.Metadata:
    """Metadata that names the request at the called service."""
    return grpc.aio.Metadata((REQUEST_ID_KEY, request_id))


def as_slipstream_error(error: grpc.aio.AioRpcError, peer: str) -> SlipstreamError:
    """What a failed call means for a request: the peer's own complaint, or that the peer is not to be had."""
    code = error.code()
    is_gone = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) and not _is_answer(error)
    if is_gone or error.details() == WRITE_FAILED:
        return ServiceUnreachable(f"the {peer} is not reachable ({code.name.lower()}); try again when it is up")
    details = error.details() or f"the {peer} failed with {code.name}"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details, retry_after_s=_retry_after_s(error))
    return _ERRORS.get(code, SlipstreamError)(details)


def _is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Whether the peer said so itself: one that is up may be without its own store, or stopping."""
    return any(key == ANSWERED_KEY for key, _ in error.trailing_metadata() or ())


def _retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """The peer's hint, if it gave one that makes sense."""
    hints = [str(value) for key, value in error.trailing_metadata() or () if key == RETRY_AFTER_KEY]
    return int(hints[0]) / 1000 if hints and hints[0].isdecimal() else None


# -- authorized -------------------------------------------------------------------------------------------------------

# The calling side of bearer tokens: a channel whose every call carries one.
#
# Plain metadata rather than gRPC's call credentials, which exist on TLS only: a gateway on loopback or a unix socket
# may ask for tokens too.


def open_authorized_channel(address: str, security: PeerSecurity | None, token: str) -> grpc.aio.Channel:
    """A channel whose calls carry the token; without a token, a plain one.

    Raises `InvalidConfig` for a token that is malformed, or would travel in plaintext.
    """
    if not token:
        return open_channel(address, security)
    if len(token) > MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfig(f"a token has at most {MAX_TOKEN_CHARS} printable characters and no space")
    if security is None and not is_local(address):
        raise InvalidConfig(f"no token is sent to {address} in plaintext, where others could read it: use TLS (--ca)")
    # gRPC takes an interceptor for one kind of call only, the first that it is an instance of.
    kinds = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)
    return open_channel(address, security, [kind(SCHEME + token) for kind in kinds])


class _Authorizing:
    """Adds the authorization to what a call sends along."""

    def __init__(self, authorization: str) -> None:
        self._authorization = authorization

    def _authorized(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), (AUTHORIZATION_KEY, self._authorization))
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _UnaryUnary(_Authorizing, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._authorized(client_call_details), request)


class _UnaryStream(_Authorizing, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await continuation(self._authorized(client_call_details), request)


class _StreamUnary(_Authorizing, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await continuation(self._authorized(client_call_details), request_iterator)


class _StreamStream(_Authorizing, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Callable[..., Any], client_call_details: grpc.aio.ClientCallDetails, request_iterator: Any
    ) -> Any:
        return await continuation(self._authorized(client_call_details), request_iterator)
