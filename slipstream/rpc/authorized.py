"""The calling side of bearer tokens: a channel whose every call carries one.

Plain metadata rather than gRPC's call credentials, which exist on TLS only: a gateway on loopback or a unix socket
may ask for tokens too.
"""

from typing import Any, Self, cast

import grpc

from slipstream.errors import InvalidConfig
from slipstream.rpc.client import open_channel
from slipstream.rpc.security import PeerSecurity, is_local
from slipstream.rpc.tokens import AUTHORIZATION_KEY, MAX_TOKEN_CHARS, SCHEME


def open_authorized_channel(address: str, security: PeerSecurity | None, token: str) -> grpc.aio.Channel:
    """A channel whose calls carry the token; without a token, a plain one.

    Raises `InvalidConfig` for a token that is none, or that others on the way could read.
    """
    if not token:
        return open_channel(address, security)
    if len(token) > MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidConfig(f"a token has at most {MAX_TOKEN_CHARS} printable characters and no space")
    if security is None and not is_local(address):
        raise InvalidConfig(f"no token is sent to {address} in plaintext, where others could read it: use TLS (--ca)")
    return cast(grpc.aio.Channel, _Authorized(open_channel(address, security), SCHEME + token))


class _Authorized:
    """Stands in for a channel, whatever is asked of it."""

    def __init__(self, channel: grpc.aio.Channel, authorization: str) -> None:
        self._channel = channel
        self._pair = (AUTHORIZATION_KEY, authorization)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._channel, name)
        return self._stamped(attribute) if name in _CALL_KINDS else attribute

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def _stamped(self, make_callable: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            call = make_callable(*args, **kwargs)

            def stamped(*call_args: Any, metadata: Any = (), **call_kwargs: Any) -> Any:
                return call(*call_args, metadata=grpc.aio.Metadata(*(metadata or ()), self._pair), **call_kwargs)

            return stamped

        return make


_CALL_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
