"""Programs at a gateway that asks for TLS, a certificate and a token."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

import slipstream
from slipstream.errors import ServiceUnavailable, Unauthenticated
from slipstream.rpc.security import new_token
from slipstream.rpc.server import bound, make_server
from tests.cli.fake_gateway import TEXT, FakeGateway
from tests.rpc.secured import Certificates, WiredConfig, make_certificates


@contextlib.asynccontextmanager
async def served(config: WiredConfig) -> AsyncIterator[str]:
    """The address of a fake gateway with these options."""
    structlog.reset_defaults()  # a test before may have left its own stream, which is closed now
    server, credentials = make_server(config, ["slipstream.rpc.v1.Gateway"])[:2]
    FakeGateway().register(server)
    with bound(server, config.listen, credentials) as address:
        await server.start()
        try:
            yield f"localhost:{address.rpartition(':')[2]}"
        finally:
            await server.stop(0)


def caption(address: str, token: str, **files: str) -> str:
    """The text that the synchronous twin gets."""
    with slipstream.connect(address, token=token, **files) as captioner:
        return captioner.caption(b"good").text


async def test_who_shows_certificate_and_token_is_served(tmp_path: Path) -> None:
    certificates: Certificates = make_certificates(tmp_path / "ca")
    server_cert, server_key = certificates.issue("server")
    cert, key = certificates.issue("client", "alice")
    token, line = new_token("alice")
    (tmp_path / "tokens").write_text(line)
    config = WiredConfig(
        tokens=str(tmp_path / "tokens"), tls_cert=server_cert, tls_key=server_key, tls_client_ca=certificates.ca
    )
    async with served(config) as address:
        async with slipstream.connect_async(address, token=token, ca=certificates.ca, cert=cert, key=key) as captioner:
            assert (await captioner.caption(b"good")).text == TEXT
            assert (await captioner.info()).version == "9.9.9"
        files = {"ca": certificates.ca, "cert": cert, "key": key}
        assert await asyncio.to_thread(caption, address, token, **files) == TEXT
        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(caption, address, "wrong", **files)
        with pytest.raises(ServiceUnavailable):
            await asyncio.to_thread(caption, address, token, ca=certificates.ca)


def test_a_token_is_not_shown() -> None:
    captioner = slipstream.connect("localhost:1", token="hush")
    assert "hush" not in repr(vars(captioner)) + repr(vars(vars(captioner)["_async"]))
    captioner.close()
