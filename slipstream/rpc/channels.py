"""The calling side of a connection: channels with our options, and gRPC failures as our errors."""

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


def open_channel(address: str, security: PeerSecurity | None = None) -> grpc.aio.Channel:
    """A channel to `host:port` or `unix:/path`. Connects when first used and reconnects by itself.

    With `security` it is TLS, except over a unix socket, which is always plaintext.
    """
    if security is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    return grpc.aio.secure_channel(address, security.credentials, options=options)


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
