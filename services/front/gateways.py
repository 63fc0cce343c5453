"""The gateways behind the front: channels to all of them, and for each request a connection in its owner's name."""

import asyncio
import time
from collections import deque
from pathlib import PurePath

import grpc

from slipstream.client.archive_client import ArchiveClient
from slipstream.client.caption_client import gateway_info
from slipstream.client.connection import Connection, GatewayAddress
from slipstream.errors import ServiceUnavailable, SlipstreamError, Unauthenticated
from slipstream.rpc.calls import sent_along, token_metadata
from slipstream.rpc.probe import probe
from slipstream.rpc.tls import make_peer_security
from slipstream.service_info import GatewayInfo
from slipstream.services.front.config import FrontConfig

INFO_S = 2.0
"""How long what a gateway says of itself is believed."""
PROBE_S = 2.0
ARCHIVE = "slipstream.rpc.v1.Archive"
NO_TOKENS = "the gateway asks for tokens, and this server hands none on: it must be started with the gateway's --tokens"


def short_name(model: str) -> str:
    """A hub id, or the last two parts of a folder's path: where it stands is nobody's business."""
    return "/".join(PurePath(model).parts[-2:]).strip("/")


class Gateways:
    """Gateways that stand in for each other. Requests begin at one after the other."""

    def __init__(self, config: FrontConfig) -> None:
        """Needs a running event loop. Raises `InvalidConfig` for TLS files that cannot be used, and for tokens that
        would travel in plaintext."""
        self._addresses = [address.strip() for address in config.gateway.split(",")]
        self._security = make_peer_security(
            ("--gateway-ca", config.gateway_ca),
            ("--gateway-cert", config.gateway_cert),
            ("--gateway-key", config.gateway_key),
        )
        if config.tokens:
            for address in self._addresses:
                token_metadata(address, self._security, "x")
        self._has_tokens = bool(config.tokens)
        self._base = GatewayAddress(
            config.gateway, "", config.gateway_ca or None, config.gateway_cert or None, config.gateway_key or None
        ).open()
        self._channels = [self._base.channel, *self._base.others]
        self._away: set[grpc.aio.Channel] = set()
        """To gateways that did not answer lately."""
        self._looks = set[asyncio.Task[GatewayInfo | SlipstreamError]]()
        """At what one gateway says; one may go on when another's answer has been taken."""
        self._next = 0
        self._model_name = config.model_name
        self._info: GatewayInfo | None = None
        self._info_at = self._failed_at = 0.0
        self._failure = ""
        """Why no gateway answered at that time."""
        self._asking = asyncio.Lock()

    def connection(self, token: str) -> Connection:
        """For one request of who has this token; '' for nobody. It begins at a gateway that answered lately, where one
        did."""
        self._next = (self._next + 1) % len(self._channels)
        turned = [*self._channels[self._next :], *self._channels[: self._next]]
        first, *others = sorted(turned, key=lambda channel: channel in self._away)
        metadata = token_metadata(self._addresses[0], self._security, token)
        for pair in sent_along():
            metadata.add(*pair)
        return Connection(first, metadata, deque(others))

    def archive(self, token: str) -> ArchiveClient:
        """The archive, for one request of who has this token."""
        return ArchiveClient(self.connection(token))

    async def info(self, token: str) -> GatewayInfo:
        """What is served. Raises `ServiceUnavailable` where no gateway answers, also to those who waited for that
        meanwhile, or what the gateway says."""
        came_at = time.monotonic()
        async with self._asking:
            if self._info is None or time.monotonic() - self._info_at > INFO_S:
                if self._failure and self._failed_at >= came_at:
                    raise ServiceUnavailable(self._failure)
                try:
                    self._info = await self._ask_all(token)
                except ServiceUnavailable as error:
                    self._failure, self._failed_at = str(error), time.monotonic()
                    raise
                self._info_at = time.monotonic()
            return self._info

    async def all_info(self, token: str) -> list[GatewayInfo | None]:
        """What each of them says of itself; None for one that does not answer."""
        answers = list((await self._answers(token)).values())
        for said in answers:
            if isinstance(said, SlipstreamError) and not isinstance(said, ServiceUnavailable):
                raise self._blamed(said)
        return [None if isinstance(said, SlipstreamError) else said for said in answers]

    def served_name(self, info: GatewayInfo) -> str:
        """What clients call the model."""
        return self._model_name or short_name(info.target_model)

    async def health(self) -> dict[str, dict[str, str]]:
        """What each gateway says of itself and of its archive, by address."""
        answers = await asyncio.gather(*(self._probe(address) for address in self._addresses))
        return dict(zip(self._addresses, answers, strict=True))

    async def close(self) -> None:
        """Ends what runs."""
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        await self._base.close()

    async def _ask_all(self, token: str) -> GatewayInfo:
        """What one of them says. Those that did not answer lately are waited for where no other one answers."""
        metadata = token_metadata(self._addresses[0], self._security, token)
        looks = {channel: self._look(Connection(channel, metadata)) for channel in self._channels}
        there = [look for channel, look in looks.items() if channel not in self._away]
        for some in (there, list(looks.values())):
            for said in await asyncio.gather(*some):
                if not isinstance(said, SlipstreamError):
                    return said
        raise self._blamed(next(said for look in looks.values() if isinstance(said := look.result(), SlipstreamError)))

    def _blamed(self, said: SlipstreamError) -> SlipstreamError:
        """What a caller is told of what a gateway said: whatever token they sent, it is not theirs that the gateway
        knows none of a front without any."""
        is_ours = isinstance(said, Unauthenticated) and not self._has_tokens
        return ServiceUnavailable(NO_TOKENS) if is_ours else said

    def _look(self, connection: Connection) -> "asyncio.Task[GatewayInfo | SlipstreamError]":
        """Remembers whether the gateway answers."""

        async def look() -> GatewayInfo | SlipstreamError:
            said = await _info_or_error(connection)
            note = self._away.add if isinstance(said, ServiceUnavailable) else self._away.discard
            note(connection.channel)
            return said

        task = asyncio.create_task(look())
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)
        return task

    async def _answers(self, token: str) -> dict[grpc.aio.Channel, GatewayInfo | SlipstreamError]:
        metadata = token_metadata(self._addresses[0], self._security, token)
        asked = (_info_or_error(Connection(channel, metadata)) for channel in self._channels)
        return dict(zip(self._channels, await asyncio.gather(*asked), strict=True))

    async def _probe(self, address: str) -> dict[str, str]:
        names = {"gateway": "", "archive": ARCHIVE}
        asked = (probe(address, service, self._security, PROBE_S) for service in names.values())
        return dict(zip(names, await asyncio.gather(*asked), strict=True))


async def _info_or_error(connection: Connection) -> GatewayInfo | SlipstreamError:
    try:
        async with asyncio.timeout(PROBE_S):
            return await gateway_info(connection)
    except SlipstreamError as error:
        return error
    except TimeoutError:
        return ServiceUnavailable("the gateway does not answer; try again later")
