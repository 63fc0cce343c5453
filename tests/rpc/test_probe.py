"""The health probe against a real server, in plaintext and over TLS."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.probe import main, probe
from slipstream.rpc.tls import make_peer_security

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def servicer() -> health.aio.HealthServicer:
    servicer = health.aio.HealthServicer()
    await servicer.set("", SERVING)
    return servicer


@pytest.fixture
async def server(servicer: health.aio.HealthServicer) -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    yield server
    await server.stop(0)


async def test_says_what_the_service_says(server: grpc.aio.Server, servicer: health.aio.HealthServicer) -> None:
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    assert await probe(address) == "SERVING"
    assert await probe(address, "slipstream.rpc.v1.Nothing") == "NOT_FOUND"
    await servicer.set("", NOT_SERVING)
    assert await probe(address) == "NOT_SERVING"


async def test_over_tls(server: grpc.aio.Server, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert("localhost")
    credentials = grpc.ssl_server_credentials(
        [(certificate.private_key_pem.bytes(), certificate.cert_chain_pems[0].bytes())]
    )
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    await server.start()
    security = make_peer_security(("--ca", str(tmp_path / "ca.pem")), ("--cert", ""), ("--key", ""), "localhost")
    assert await probe(address, security=security) == "SERVING"
    assert await probe(address, timeout_s=60) == "UNAVAILABLE"


async def test_exit_status(server: grpc.aio.Server, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    with pytest.raises(SystemExit) as up:
        await asyncio.to_thread(main, [address])
    assert up.value.code == 0 and capsys.readouterr().out == "SERVING\n"
    await server.stop(0)
    with pytest.raises(SystemExit) as down:
        await asyncio.to_thread(main, [address, "--timeout-s", "0.5"])
    assert down.value.code == 1


def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["127.0.0.1:1", "--cert", "mine.pem"])
    assert ended.value.code == 2
    assert "--cert needs --ca" in capsys.readouterr().err
