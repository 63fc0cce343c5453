"""Tokens against a real server: who is let in under which name, what a stranger learns, and changes of the file."""

from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.cli.common import ConnectionOptions
from slipstream.errors import InvalidConfig, Unauthenticated
from slipstream.metrics import REGISTRY
from slipstream.rpc import security
from slipstream.rpc.calls import as_slipstream_error, open_channel, token_metadata
from slipstream.rpc.security import OwnerRights, TokenFile, current_owner, current_rights, new_token
from slipstream.rpc.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.rpc.secured import Certificates, WhoAmI, make_certificates, served


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A tokens file, and the tokens by owner."""
    made = {owner: new_token(owner) for owner in ("alice", "bob")}
    path = tmp_path / "tokens"
    path.write_text("# who may caption\n\n" + "".join(f"{line}  # since May\n" for _, line in made.values()))
    return path, {owner: token for owner, (token, _) in made.items()}


async def ask(channel: grpc.aio.Channel, *metadata: tuple[str, Any]) -> str:
    stub = target_pb2_grpc.TargetStub(channel)
    answer = await stub.GetModel(common_pb2.GetModelRequest(), timeout=60, metadata=metadata or None)
    return str(answer.model_id)


async def pull(channel: grpc.aio.Channel, *metadata: tuple[str, Any]) -> bytes:
    stub = target_pb2_grpc.TargetStub(channel)
    call = stub.PullGuidance(target_pb2.PullGuidanceRequest(), timeout=60, metadata=metadata or None)
    return b"".join([chunk.data async for chunk in call])


async def test_a_token_names_its_owner(keys: tuple[Path, dict[str, str]]) -> None:
    path, known = keys
    async with served(tokens=str(path)) as address:
        for owner, token in known.items():
            metadata = token_metadata(address, None, token)
            async with open_channel(address) as channel:
                assert await ask(channel, *metadata) == f"owner={owner}"
                assert await ask(channel, ("x-request-id", "r"), *metadata) == f"owner={owner}"
                assert await ask(channel, ("authorization", f"bEARER {token}")) == f"owner={owner}"
                assert await pull(channel, *metadata) == owner.encode()


async def test_a_stranger_learns_nothing_but_that_health_is_open(keys: tuple[Path, dict[str, str]]) -> None:
    path, known = keys
    digest = next(line for line in path.read_text().splitlines() if line.startswith("alice")).split()[1]
    good = f"Bearer {known['alice']}"
    attempts: list[tuple[tuple[str, Any], ...]] = [
        (),
        *((("authorization", text),) for text in ("", "Bearer ", "Bearer wrong", f"Bearer {digest}", known["alice"])),
        *(
            (("authorization", text),)
            for text in (f"Basic {known['alice']}", f"{good} ", f"{good}x", "Bearer " + "x" * 4000)
        ),
        (("authorization", good), ("authorization", good)),
        (("authorization-bin", good.encode()),),
    ]
    said = set()
    async with served(tokens=str(path), reflection=True) as address, open_channel(address) as channel:
        for metadata in attempts:
            for call in (ask, pull):
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(channel, *metadata)
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED, metadata
                said.add(refusal.value.details())
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert isinstance(as_slipstream_error(refusal.value, "gateway"), Unauthenticated)
    assert len(said) == 1


async def test_the_file_is_read_again(keys: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    path, known = keys
    monkeypatch.setattr(security, "RELOAD_S", 0.0)
    token, line = new_token("carol")
    async with served(tokens=str(path)) as address, open_channel(address) as channel:
        metadata = token_metadata(address, None, token)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(channel, *metadata)
        path.write_text(line)
        assert await ask(channel, *metadata) == "owner=carol"
        for broken in ("carol not-a-digest", "\ud800".encode("utf-16", "surrogatepass")):
            path.write_bytes(broken.encode() if isinstance(broken, str) else broken)
            assert await ask(channel, *metadata) == "owner=carol", "what it said last holds"
        path.unlink()
        assert await ask(channel, *metadata) == "owner=carol"
        path.write_text("")
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(channel, *metadata)
    assert TokenFile(str(path)).owner(known["alice"]) is None


async def test_open_streams_end_with_their_token(
    keys: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, known = keys
    monkeypatch.setattr(security, "RELOAD_S", 0.0)
    monkeypatch.setattr(security, "LOOK_S", 0.01)
    async with served(WhoAmI(seconds=60), tokens=str(path)) as address, open_channel(address) as channel:
        stub, streams = target_pb2_grpc.TargetStub(channel), {}
        for owner, token in known.items():
            metadata = token_metadata(address, None, token)
            streams[owner] = stub.PullGuidance(target_pb2.PullGuidanceRequest(), timeout=60, metadata=metadata)
            assert (await streams[owner].read()).data == owner.encode()
        path.write_text(next(line for line in path.read_text().splitlines() if line.startswith("bob")))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await streams["alice"].read()
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "no longer accepted" in (refusal.value.details() or "")
        assert not streams["bob"].done()


async def test_an_unreadable_file_raises_an_alarm(
    keys: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, known = keys
    monkeypatch.setattr(security, "RELOAD_S", 0.0)
    content, file = path.read_bytes(), TokenFile(str(path))

    def alarm() -> float | None:
        return REGISTRY.get_sample_value("slipstream_tokens_unreadable")

    with structlog.testing.capture_logs() as events:
        assert alarm() == 0
        path.write_text("half a li")
        assert (alarm(), alarm()) == (1, 1), "nobody needs to call for it"
        assert file.owner(known["alice"]) == "alice"
        path.write_bytes(content)
        assert alarm() == 0
    assert [(event["log_level"], event["event"]) for event in events] == [
        ("error", "tokens.unreadable"),
        ("info", "tokens.reloaded"),
    ]


def test_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    digest = "0" * 64
    for content in (
        b"alice",
        b"alice " + digest[1:].encode(),
        f"al ice {digest}".encode(),
        f"a/b {digest}".encode(),
        b"\xff",
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidConfig, match="--tokens: "):
            TokenFile(str(path))
    for unreadable in (str(tmp_path), str(tmp_path / "missing"), "\0"):
        with pytest.raises(InvalidConfig, match="--tokens: cannot read"):
            TokenFile(unreadable)
    with pytest.raises(InvalidConfig, match="no owner"):
        new_token("two words")


def test_a_line_may_say_what_its_owner_may(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    digest = "0" * 64
    path.write_text(
        f"alice {digest} max-waiting=100 high=yes  # two lines, one owner\n"
        f"alice {'1' * 64} max-captions=4 high=yes\nbob {'2' * 64}\ncarol {'3' * 64} high=no max-waiting=0\n"
    )
    tokens = TokenFile(str(path))
    assert tokens.rights("alice") == OwnerRights(max_waiting=100, max_captions=4, may_use_high=True)
    assert tokens.rights("bob") == tokens.rights("nobody") == OwnerRights()
    assert tokens.rights("carol") == OwnerRights(max_waiting=0, may_use_high=False)
    for wrong, complaint in (
        ("max-jobs=1", "'max-jobs=1' is none of max-waiting=N"),
        ("max-waiting=-1", "is none of"),
        ("max-waiting=", "is none of"),
        ("high=maybe", "is none of"),
        ("high=yes high=no", "contradicts"),
        (f"high=yes\nalice {digest} high=no", "line 2.*contradicts"),
    ):
        path.write_text(f"alice {digest} {wrong}\n")
        with pytest.raises(InvalidConfig, match=complaint):
            TokenFile(str(path))


async def test_rights_are_those_of_the_caller(keys: tuple[Path, dict[str, str]]) -> None:
    path, known = keys
    path.write_text(path.read_text().replace("  # since", " max-waiting=7  # since", 1))
    seen: dict[str, OwnerRights] = {}

    class Recorder(WhoAmI):
        async def GetModel(self, request: Any, context: Any) -> common_pb2.ModelInfo:
            seen[current_owner()] = current_rights()
            return await super().GetModel(request, context)

    async with served(Recorder(), tokens=str(path)) as address:
        for token in known.values():
            async with open_channel(address) as channel:
                await ask(channel, *token_metadata(address, None, token))
    assert seen == {"alice": OwnerRights(max_waiting=7), "bob": OwnerRights()}
    assert current_rights() == OwnerRights()


async def test_tokens_do_not_travel_in_plaintext(keys: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    path, known = keys
    with pytest.raises(InvalidConfig, match="--tls-cert"):
        async with served(tokens=str(path), listen="0.0.0.0:0"):
            pass
    with pytest.raises(InvalidConfig, match="plaintext"):
        token_metadata("gateway.example.org:443", None, known["alice"])
    certificates: Certificates = make_certificates(tmp_path / "ca")
    chain, key = certificates.issue("server")
    async with served(tokens=str(path), listen="0.0.0.0:0", tls_cert=chain, tls_key=key) as address:
        local = f"localhost:{address.rpartition(':')[2]}"
        (tmp_path / "token").write_text(known["bob"] + "\n")
        options = ConnectionOptions(ca=Path(certificates.ca), token_file=tmp_path / "token")
        async with options.gateway(local).open() as connection:
            assert await ask(connection.channel, *connection.metadata) == "owner=bob"


async def test_a_token_comes_before_a_certificates_name(keys: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    path, known = keys
    certificates = make_certificates(tmp_path / "ca")
    chain, key = certificates.issue("server")
    security = certificates.peer("mallory")
    async with served(tokens=str(path), tls_cert=chain, tls_key=key, tls_client_ca=certificates.ca) as address:
        async with open_channel(address, security) as channel:
            assert await ask(channel, *token_metadata(address, security, known["alice"])) == "owner=alice"
        async with open_channel(address, security) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask(channel)


def test_where_the_command_line_takes_its_token_from(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    (tmp_path / "empty").write_text("\n")
    assert ConnectionOptions().token({"SLIPSTREAM_TOKEN": "from-environment"}) == "from-environment"
    assert ConnectionOptions(token_file=tmp_path / "token").token({"SLIPSTREAM_TOKEN": "x"}) == "from-file"
    for name in ("empty", "missing"):
        with pytest.raises(InvalidConfig, match="--token-file"):
            ConnectionOptions(token_file=tmp_path / name).token({})
    for token in ("two words", "x" * 1000, "é", "a\nb"):
        with pytest.raises(InvalidConfig, match="token"):
            token_metadata("127.0.0.1:1", None, token)
