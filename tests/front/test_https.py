"""The front by TLS: certificates that are replaced while it runs or cannot be used, and how long they hold."""

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest

from slipstream.errors import InvalidConfig
from tests.cli.fake_gateway import FakeGateway
from tests.rpc.secured import Certificates, make_certificates
from tests.support.front import front_at, front_process
from tests.support.processes import eventually

GET = "GET /{} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "pki")


def trusting(certificates: Certificates) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certificates.ca)


async def got(address: str, trust: ssl.SSLContext, path: str, name: str | None = "localhost") -> str:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trust, server_hostname=name)
        writer.write(GET.format(path).encode())
        answer = await reader.read()
        writer.close()
    return answer.decode()


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])  # addresses are asked for without a name
async def test_certificates_are_rotated_while_serving(
    certificates: Certificates, gateway: FakeGateway, tmp_path: Path, name: str
) -> None:
    chain, key = certificates.issue("front")
    replacement = make_certificates(tmp_path / "new")
    new_chain, new_key = replacement.issue("front")
    old, new = trusting(certificates), trusting(replacement)
    async with front_at(gateway.address, tls_cert=chain, tls_key=key) as address:
        assert "200 OK" in await got(address, old, "health", name)
        shutil.copy(new_chain, chain)
        assert "200 OK" in await got(address, old, "health", name), "half of a rotation must not count"
        shutil.copy(new_key, key)
        assert "200 OK" in await got(address, new, "health", name)
        with pytest.raises(ssl.SSLCertVerificationError):
            await got(address, old, "health", name)


@pytest.mark.parametrize(("damaged", "named"), [("front.pem", "--tls-cert"), ("front.key", "--tls-key")])
async def test_files_that_cannot_be_used_end_the_start(
    certificates: Certificates, gateway: FakeGateway, damaged: str, named: str
) -> None:
    chain, key = certificates.issue("front")
    (certificates.folder / damaged).write_text("none")
    with pytest.raises(InvalidConfig, match=f"{named}: .* is damaged"):
        async with front_at(gateway.address, tls_cert=chain, tls_key=key):
            pass


async def test_metrics_say_how_long_they_hold(certificates: Certificates, gateway: FakeGateway, tmp_path: Path) -> None:
    chain, key = certificates.issue("front")
    front = front_process(gateway.address, tmp_path, "--tls-cert", chain, "--tls-key", key)
    await front.start()
    try:
        await eventually(lambda: "service.ready" in (tmp_path / "front.log").read_text(), 240)
        metrics = await got(front.address, trusting(certificates), "metrics")
        assert 'slipstream_certificate_expiry_seconds{use="server"}' in metrics
        assert 'slipstream_build_info{service="front"' in metrics
    finally:
        await front.stop(30)
