"""Where tokens are asked for: nobody gets in without one, and one owner's files and batches are unseen by another."""

import json
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from slipstream.errors import InvalidConfig
from slipstream.rpc.security import new_token
from slipstream.rpc.v1.gateway_pb2 import GatewayInfo
from tests.cli.fake_gateway import TEXT, FakeGateway
from tests.support.front import asked, client_of, data_url, error_of, front_at, raw, status_of

VIDEO = data_url(b"good")


@pytest.fixture
def tokens(tmp_path: Path) -> tuple[str, str, str]:
    """The file, and tokens of two owners."""
    pairs = [new_token(owner) for owner in ("ann", "bob")]
    path = tmp_path / "tokens"
    path.write_text("\n".join(line for _, line in pairs))
    return str(path), pairs[0][0], pairs[1][0]


async def test_owners(gateway: FakeGateway, tokens: tuple[str, str, str], tmp_path: Path) -> None:
    path, ann, bob = tokens
    async with (
        front_at(gateway.address, tokens=path, data=str(tmp_path / "data")) as address,
        client_of(address, ann) as hers,
        client_of(address, bob) as his,
        client_of(address, "wrong") as nobodys,
    ):
        for call in (nobodys.models.list(), nobodys.files.list()):
            with pytest.raises(openai.AuthenticationError):
                await call
        answer = await hers.chat.completions.create(model="big", messages=asked(VIDEO))
        assert answer.choices[0].message.content == TEXT
        file = await hers.files.create(file=("a.jsonl", b"no JSON"), purpose="batch")
        options: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = await hers.batches.create(input_file_id=file.id, **options)
        assert [one.id async for one in hers.files.list()] == [file.id]
        assert [one.id async for one in hers.batches.list()] == [batch.id]
        assert not [one async for one in his.files.list()] and not [one async for one in his.batches.list()]
        calls: list[Any] = [
            his.files.retrieve(file.id),
            his.files.content(file.id),
            his.files.delete(file.id),
            his.batches.retrieve(batch.id),
            his.batches.cancel(batch.id),
            his.batches.create(input_file_id=file.id, **options),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call
        part: Any = {"type": "file", "file": {"file_id": file.id}}
        with pytest.raises(openai.NotFoundError):
            await his.chat.completions.create(model="big", messages=[{"role": "user", "content": [part]}])
        assert (await hers.files.retrieve(file.id)).id == file.id


class AskingGateway(FakeGateway):
    """Knows no token of those that it is shown."""

    async def GetGateway(self, request: object, context: grpc.aio.ServicerContext[Any, Any]) -> GatewayInfo:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this gateway needs a token that it knows")
        raise AssertionError


async def test_it_is_no_clients_fault_that_the_front_hands_on_no_token(tokens: tuple[str, str, str]) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {tokens[1]}\r\n\r\n"
    with AskingGateway() as asking:
        async with front_at(asking.address) as address:
            answer = await raw(address, request.encode())
            assert status_of(answer) == 503 and "started with the gateway's --tokens" in error_of(answer)["message"]
        async with front_at(asking.address, tokens=tokens[0]) as address:
            assert status_of(await raw(address, request.encode())) == 401


@pytest.mark.parametrize(("scheme", "status"), [("Bearer", 200), ("bearer", 200), ("BEARER", 200), ("Basic", 401)])
async def test_the_scheme_may_be_written_in_any_case(
    gateway: FakeGateway, tokens: tuple[str, str, str], scheme: str, status: int
) -> None:
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {scheme} {tokens[1]}\r\n\r\n"
    async with front_at(gateway.address, tokens=tokens[0]) as address:
        assert status_of(await raw(address, request.encode())) == status


@pytest.mark.parametrize(("token", "status"), [(1, 200), ("", 401), ("other", 401)])
async def test_a_token_may_come_as_anthropics_clients_say_it(
    gateway: FakeGateway, tokens: tuple[str, str, str], token: int | str, status: int
) -> None:
    """Its absence is told in the form of the protocol that was asked by."""
    said = tokens[token] if isinstance(token, int) else token
    lines = ("Host: x", "Connection: close", f"x-api-key: {said}", "content-length: 2", "", "{}")
    async with front_at(gateway.address, tokens=tokens[0]) as address:
        request = "\r\n".join(("GET /v1/models HTTP/1.1", *lines[:3], "", ""))
        assert status_of(await raw(address, request.encode())) == status
        answer = await raw(address, "\r\n".join(("POST /v1/messages HTTP/1.1", *lines)).encode())
        error = json.loads(answer.partition(b"\r\n\r\n")[2])
        kind = "invalid_request_error" if status == 200 else "authentication_error"
        assert (error["type"], error["error"]["type"]) == ("error", kind)


async def test_tokens_do_not_travel_in_plaintext(tokens: tuple[str, str, str]) -> None:
    with pytest.raises(InvalidConfig, match="plaintext"):
        async with front_at("gateway.example:50050", tokens=tokens[0]):
            pass
