"""Servers in this process as `run_service` makes them, with TLS, tokens, reflection; certificates for both sides."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog
import trustme

from slipstream.config import option
from slipstream.rpc.security import TokenOptions, current_owner
from slipstream.rpc.server import add_health, bound, make_server
from slipstream.rpc.service_options import Callers, ServiceOptions
from slipstream.rpc.tls import PeerSecurity, make_peer_security
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc


@dataclass(frozen=True, kw_only=True)
class WiredConfig(ServiceOptions, TokenOptions):
    listen: str = option("address", default="127.0.0.1:0")
    owner_share: float = option("share of one caller", default=0.25)

    @property
    def callers(self) -> Callers:
        return Callers(self.tokens, self.owner_share)


class WhoAmI(target_pb2_grpc.TargetServicer):
    """Answers with the caller's owner. `seconds`: how long a stream is silent."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        return common_pb2.ModelInfo(model_id=f"owner={current_owner()}")

    async def PullGuidance(
        self, request: target_pb2.PullGuidanceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[target_pb2.GuidanceChunk]:
        yield target_pb2.GuidanceChunk(data=current_owner().encode())
        await asyncio.sleep(self._seconds)


@contextlib.asynccontextmanager
async def served(servicer: target_pb2_grpc.TargetServicer | None = None, **options: Any) -> AsyncIterator[str]:
    """The address of a server with these options."""
    structlog.reset_defaults()  # a test before may have left its own stream, which is closed now
    config = WiredConfig(**options)
    server, credentials, _ = make_server(config, ["slipstream.rpc.v1.Target"])
    target_pb2_grpc.add_TargetServicer_to_server(servicer or WhoAmI(), server)
    add_health(server, config.owner_share)
    with bound(server, config.listen, credentials) as address:
        await server.start()
        try:
            yield address
        finally:
            await server.stop(0)


@dataclass(frozen=True)
class Certificates:
    """Files of an authority and of certificates that it gave out."""

    folder: Path
    authority: trustme.CA

    @property
    def ca(self) -> str:
        path = self.folder / "ca.pem"
        self.authority.cert_pem.write_to_path(path)
        return str(path)

    def issue(self, name: str, common_name: str | None = None) -> tuple[str, str]:
        """Certificate and key for this machine, as files."""
        issued = self.authority.issue_cert("localhost", "127.0.0.1", common_name=common_name)
        chain, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(chain)
        issued.private_key_pem.write_to_path(key)
        return str(chain), str(key)

    def peer(self, common_name: str | None = None, *, with_certificate: bool = True) -> PeerSecurity:
        """How a client of this authority calls."""
        pair = self.issue("client", common_name) if with_certificate else ("", "")
        security = make_peer_security(("--ca", self.ca), ("--cert", pair[0]), ("--key", pair[1]))
        assert security is not None
        return security


def make_certificates(folder: Path) -> Certificates:
    """A new authority."""
    folder.mkdir()
    return Certificates(folder, trustme.CA())
