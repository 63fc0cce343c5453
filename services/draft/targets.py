"""The targets that this draft pulls guidance from: which are allowed, and their channels. Knows no session."""

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from slipstream.errors import InvalidRequest, ServiceUnavailable
from slipstream.pruning import Guidance, Score
from slipstream.rpc import codec
from slipstream.rpc.client import open_channel, request_metadata
from slipstream.rpc.guidance import read_guidance
from slipstream.rpc.security import PeerSecurity
from slipstream.rpc.v1 import target_pb2, target_pb2_grpc

GUIDANCE_TIMEOUT_S = 600.0
MAX_IDLE_CHANNELS = 16
"""A caller names the address, so there may be any number of them over time."""
MAX_ADDRESS_CHARS = 512


@dataclass(eq=False)
class _Connection:
    channel: grpc.aio.Channel
    num_users: int = 0


class Targets:
    """Pulls guidance. `allowed`: the only addresses that are called; empty: any that a caller names."""

    def __init__(self, allowed: frozenset[str] = frozenset(), security: PeerSecurity | None = None) -> None:
        self._allowed = allowed
        self._security = security
        self._connections: OrderedDict[str, _Connection] = OrderedDict()

    async def pull(
        self, address: str, session_id: str, kind: str, score: Score = Score.SIMILARITY_VARIATION
    ) -> tuple[Guidance, int]:
        """The guidance of a session, and the bytes of its payload.

        Raises:
            InvalidRequest: this draft does not call that address.
            ServiceUnavailable: no target answers there, or it has no such session.
        """
        if (self._allowed and address not in self._allowed) or not 0 < len(address) <= MAX_ADDRESS_CHARS:
            raise InvalidRequest("this draft pulls no guidance from that address; see its --guidance-targets")
        request = target_pb2.PullGuidanceRequest(session_id=session_id, kind=codec.GUIDANCE_KINDS[kind], score=score)
        await self._make_room()
        with self._using(address) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            call: AsyncIterator[target_pb2.GuidanceChunk] = aiter(
                stub.PullGuidance(request, timeout=GUIDANCE_TIMEOUT_S, metadata=request_metadata(session_id))
            )
            try:
                return await read_guidance(call)
            except grpc.aio.AioRpcError as error:
                raise ServiceUnavailable(f"no guidance from the target: {error.details()}") from None

    async def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections.values():
            await connection.channel.close()

    @contextmanager
    def _using(self, address: str) -> Iterator[grpc.aio.Channel]:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(open_channel(address, self._security))
        self._connections.move_to_end(address)
        connection.num_users += 1
        try:
            yield connection.channel
        finally:
            connection.num_users -= 1

    async def _make_room(self) -> None:
        """Closes those that were not used for longest, where there are too many."""
        idle = [address for address, connection in self._connections.items() if not connection.num_users]
        closing = [self._connections.pop(address) for address in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]]
        for connection in closing:
            await connection.channel.close()
