"""TLS against real sockets: who is let in, who is not, what is said of wrong files, and rotation."""

import math
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest

from slipstream.config import parse_config
from slipstream.errors import InvalidConfig, PermissionDenied, ServiceUnavailable
from slipstream.rpc.callers import is_local
from slipstream.rpc.calls import as_slipstream_error, open_channel
from slipstream.rpc.server import make_server
from slipstream.rpc.tls import PeerSecurity, WireOptions, make_peer_security, seconds_left
from slipstream.rpc.v1 import common_pb2, target_pb2_grpc
from tests.rpc.secured import Certificates, WiredConfig, make_certificates, served


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "ca")


async def asked(address: str, security: PeerSecurity | None) -> str:
    async with open_channel(address, security) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        return str((await stub.GetModel(common_pb2.GetModelRequest(), timeout=60)).model_id)


async def is_refused(address: str, security: PeerSecurity | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await asked(address, security)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(as_slipstream_error(refusal.value, "target"), ServiceUnavailable)


async def test_tls_lets_in_who_knows_the_authority(certificates: Certificates, tmp_path: Path) -> None:
    chain, key = certificates.issue("server")
    async with served(tls_cert=chain, tls_key=key) as address:
        assert await asked(address, certificates.peer(with_certificate=False)) == "owner="
        await is_refused(address, None)
        await is_refused(address, make_certificates(tmp_path / "other").peer())


async def test_mtls_lets_in_who_has_a_certificate(certificates: Certificates, tmp_path: Path) -> None:
    chain, key = certificates.issue("server")
    stranger = make_certificates(tmp_path / "other")
    forged = make_peer_security(("", certificates.ca), *(("", path) for path in stranger.issue("client", "archivist")))
    async with served(tls_cert=chain, tls_key=key, tls_client_ca=certificates.ca) as address:
        assert await asked(address, certificates.peer("archivist")) == "owner=archivist"
        nameless = await asked(address, certificates.peer())
        assert nameless.startswith("owner=sha256:") and len(nameless) == len("owner=sha256:") + 64
        await is_refused(address, certificates.peer(with_certificate=False))
        await is_refused(address, forged)
        await is_refused(address, None)


async def test_another_name_than_the_certificates_is_refused_unless_expected(certificates: Certificates) -> None:
    chain, key = certificates.issue("server")
    security = certificates.peer(with_certificate=False)
    async with served(tls_cert=chain, tls_key=key, listen="[::1]:0") as address:
        await is_refused(address, security)
        assert await asked(address, security._replace(server_name="localhost")) == "owner="


async def test_certificates_are_rotated_while_serving(certificates: Certificates, tmp_path: Path) -> None:
    chain, key = certificates.issue("server")
    replacement = make_certificates(tmp_path / "new")
    new_chain, new_key = replacement.issue("server")
    old, new = certificates.peer(with_certificate=False), replacement.peer(with_certificate=False)
    async with served(tls_cert=chain, tls_key=key) as address:
        assert await asked(address, old)
        shutil.copy(new_chain, chain)
        assert await asked(address, old), "half of a rotation must not count"
        shutil.copy(new_key, key)
        assert await asked(address, new)
        await is_refused(address, old)


async def test_a_unix_socket_stays_plaintext_and_says_so(
    certificates: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, key = certificates.issue("server")
    async with served(tls_cert=chain, tls_key=key, listen=f"unix:{tmp_path / 's.sock'}") as address:
        assert await asked(address, certificates.peer()) == "owner="
    assert "wire.plaintext" in "".join(capsys.readouterr())


@pytest.mark.parametrize(("listen", "warned"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
async def test_a_public_plaintext_address_is_warned_of(
    listen: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(listen=listen):
        pass
    assert ("wire.plaintext" in "".join(capsys.readouterr())) is warned


def test_wrong_files_are_named_by_their_option(certificates: Certificates, tmp_path: Path) -> None:
    chain, key = certificates.issue("server")
    _, other_key = certificates.issue("other")
    garbage, empty, missing = tmp_path / "garbage", tmp_path / "empty", str(tmp_path / "missing")
    garbage.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    empty.write_text("")
    wrong: list[tuple[str, dict[str, str]]] = [
        ("--tls-cert", {"tls_cert": chain}),
        ("--tls-key", {"tls_key": key}),
        ("--tls-client-ca", {"tls_client_ca": certificates.ca}),
        ("--tls-cert", {"tls_cert": missing, "tls_key": key}),
        ("--tls-cert", {"tls_cert": str(garbage), "tls_key": key}),
        ("--tls-cert", {"tls_cert": str(empty), "tls_key": key}),
        ("--tls-cert", {"tls_cert": "\0", "tls_key": key}),
        ("--tls-key", {"tls_cert": chain, "tls_key": missing}),
        ("--tls-key", {"tls_cert": chain, "tls_key": other_key}),
        ("--tls-key", {"tls_cert": chain, "tls_key": str(tmp_path)}),
        ("--tls-client-ca", {"tls_cert": chain, "tls_key": key, "tls_client_ca": str(garbage)}),
        ("--peer-ca", {"peer_ca": missing}),
        ("--peer-ca", {"peer_cert": chain, "peer_key": key}),
        ("--peer-key", {"peer_ca": certificates.ca, "peer_cert": chain}),
        ("--peer-key", {"peer_ca": certificates.ca, "peer_cert": chain, "peer_key": other_key}),
    ]
    for option, options in wrong:
        wire = WireOptions(**options)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfig, match=option):
            (wire.server_credentials(), wire.peer_security())


def test_what_stays_on_this_machine() -> None:
    local = ["unix:/run/s.sock", "127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "dns:///localhost:1"]
    public = ["0.0.0.0:1", "[::]:1", "example.org:1", "10.0.0.1:1", "localhost.example.org:1", ":1", "dns:host:1"]
    assert all(map(is_local, local))
    assert not any(map(is_local, public))


def test_options_are_flags() -> None:
    config = parse_config(WiredConfig, "gateway", ["--reflection", "true"], {"SLIPSTREAM_GATEWAY_TLS_CERT": "a.pem"})
    assert config.reflection and config.tls_cert == "a.pem"
    with pytest.raises(InvalidConfig, match="--reflection: 'yes'"):
        parse_config(WiredConfig, "gateway", ["--reflection", "yes"], {})


async def test_only_the_names_that_may_call_are_served(certificates: Certificates) -> None:
    chain, key = certificates.issue("server")
    wire = {"tls_cert": chain, "tls_key": key, "tls_client_ca": certificates.ca}
    async with served(**wire, tls_client_names="gateway, draft") as address:
        for name in ("gateway", "draft"):
            assert await asked(address, certificates.peer(name)) == f"owner={name}"
        for name in ("tenant-a", "gateway.evil", "Gateway", None):
            async with open_channel(address, certificates.peer(name)) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await target_pb2_grpc.TargetStub(channel).GetModel(common_pb2.GetModelRequest(), timeout=60)
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert isinstance(as_slipstream_error(refused.value, "target"), PermissionDenied)
    async with served(**wire, tls_client_names="localhost") as address:
        assert await asked(address, certificates.peer("anybody")), "a DNS name counts as well"


def test_names_need_certificates(certificates: Certificates, tmp_path: Path) -> None:
    chain, key = certificates.issue("server")
    with pytest.raises(InvalidConfig, match="--tls-client-names needs --tls-cert"):
        WireOptions(tls_client_names="gateway").server_credentials()
    with pytest.raises(InvalidConfig, match="--tls-client-names needs --tls-client-ca"):
        WireOptions(tls_client_names="gateway", tls_cert=chain, tls_key=key).server_credentials()
    wire = WiredConfig(
        listen=f"unix:{tmp_path}/s.sock",
        tls_client_names="gateway",
        tls_cert=chain,
        tls_key=key,
        tls_client_ca=certificates.ca,
    )
    with pytest.raises(InvalidConfig, match="unix socket"):
        make_server(wire, [])


@pytest.mark.parametrize("year", [2031, 2049, 2050, 2120])
def test_when_a_certificate_expires(certificates: Certificates, tmp_path: Path, year: int) -> None:
    end = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    issued = certificates.authority.issue_cert("localhost", not_after=end)
    path = tmp_path / "certificate.pem"
    path.write_bytes(b"some words\n" + b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    assert abs(seconds_left(path) - (end.timestamp() - time.time())) < 5
    assert list(WireOptions(tls_cert=str(path)).expiries) == ["server"]
    for broken in (b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"\xff"):
        path.write_bytes(broken)
        assert math.isnan(seconds_left(path))
    path.unlink()
    assert math.isnan(seconds_left(path))


def test_the_certificate_that_a_service_shows_is_the_one_that_it_has_read(
    certificates: Certificates, tmp_path: Path
) -> None:
    def replace_by(end: datetime) -> None:
        issued = certificates.authority.issue_cert("localhost", not_after=end)
        path.write_bytes(issued.cert_chain_pems[0].bytes())

    path, first, second = tmp_path / "c.pem", datetime(2031, 1, 1, tzinfo=UTC), datetime(2041, 1, 1, tzinfo=UTC)
    replace_by(first)
    left = WireOptions(tls_cert=str(path), peer_cert=str(path)).expiries
    replace_by(second)
    ends = {use: time.time() + seconds() for use, seconds in left.items()}
    assert ends == pytest.approx({"server": second.timestamp(), "client": first.timestamp()}, abs=5)
