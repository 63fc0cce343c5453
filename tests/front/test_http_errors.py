"""What clients are told when things go wrong, before a gateway that does as it is told: statuses, forms, streams that
fail in their middle, gateways that are away."""

import asyncio
import contextlib
import errno
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from slipstream import errors
from slipstream.archive.messages import Job
from slipstream.archive.queue import JobState
from slipstream.services.front.api_errors import as_api_error
from slipstream.services.front.batch_lines import job_error_line
from slipstream.services.front.json_body import JsonBody
from tests.cli.fake_gateway import DETAILS, TEXT, FakeGateway
from tests.support.front import CHAT, asked, batch_line, client_of, data_url, error_of, front_at, post, raw, status_of
from tests.support.processes import eventually

MODEL = "big"
GOOD, HANG = b"good" * 1000, b"hang"


async def chat(address: str, video: bytes, **fields: Any) -> Any:
    async with client_of(address) as client:
        return await client.chat.completions.create(model=MODEL, messages=asked(data_url(video)), **fields)


def body_of(video: bytes, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": asked(data_url(video))} | fields).encode()


@contextlib.asynccontextmanager
async def streamed(address: str, video: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """The answer to a streaming request, from its first byte."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(post(CHAT, body_of(video, stream=True)))
        yield reader
    finally:
        writer.transport.abort()


@pytest.mark.parametrize(
    ("told", "param"),
    [
        ("max_window 9999 is more than this server's limit of 64", "slipstream.max_window"),
        ("num_frames 9999 is more than this server's limit of 256", None),
        ("system has 9000 characters; at most 8192 fit", None),
        ("max_new_tokens 9999 is more than this server's limit of 2048", None),
        ("regex: no text can be kept to it: there is no such text", None),
    ],
)
def test_a_line_of_a_batch_names_no_field_that_there_is_not(told: str, param: str | None) -> None:
    job = Job("j", "c", "/a.mp4", JobState.FAILED, "", told, "INVALID_ARGUMENT", 1, 0, "", 0, 0, 0)
    assert json.loads(job_error_line("b", job, ""))["response"]["body"]["error"]["param"] == param


async def test_text_and_figures_pass_through(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        answer = await chat(address, GOOD, seed=5, extra_body={"slipstream": {"alpha": 0.5}})
    assert answer.choices[0].message.content == TEXT and answer.choices[0].finish_reason == "stop"
    assert gateway.received == GOOD and (gateway.options.seed, gateway.options.alpha) == (5, 0.5)
    assert (answer.timings["draft_n"], answer.timings["draft_n_accepted"]) == (3, 2)
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0, "a draft's tokens are no predictions"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
        (grpc.StatusCode.FAILED_PRECONDITION, 400, "invalid_request_error"),
        (grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
        (grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error"),
        (grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
        (grpc.StatusCode.ALREADY_EXISTS, 409, "invalid_request_error"),
        (grpc.StatusCode.OUT_OF_RANGE, 413, "invalid_request_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
        (grpc.StatusCode.INTERNAL, 500, "server_error"),
        (grpc.StatusCode.UNAVAILABLE, 503, "server_error"),
    ],
)
async def test_statuses_of_the_gateway(gateway: FakeGateway, code: grpc.StatusCode, status: int, kind: str) -> None:
    async with front_at(gateway.address) as address:
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as refused:
                await chat(address, f"refuse {code.name}".encode(), stream=stream)
            assert (refused.value.status_code, refused.value.type) == (status, kind)
            assert DETAILS in refused.value.message or status == 503
            assert ("retry-after" in refused.value.response.headers) == (status in (429, 503))


async def test_media_that_a_gateway_cannot_read_have_a_code_of_their_own(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        for verb, code in (("unread", "unreadable_media"), ("answer", None)):
            with pytest.raises(openai.BadRequestError) as refused:
                await chat(address, f"{verb} INVALID_ARGUMENT".encode())
            assert (refused.value.code, refused.value.param) == (code, "messages[0].content[1]")


@pytest.mark.parametrize(
    ("lack", "status", "after"), [(errno.ENOSPC, 503, "10"), (errno.EMFILE, 429, "1")], ids=["disk", "descriptors"]
)
async def test_a_machine_that_is_full_may_have_room_later(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, lack: int, status: int, after: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(lack, os.strerror(lack))

    async with front_at(gateway.address) as address:
        with monkeypatch.context() as full:
            full.setattr(JsonBody, "feed", refuse)
            with pytest.raises(openai.APIStatusError, match=os.strerror(lack)) as refused:
                await chat(address, GOOD)
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (status, after)
        assert (await chat(address, GOOD)).choices[0].message.content == TEXT


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if hasattr(kind, "status")])
def test_every_error_of_ours_has_an_answer(kind: type[errors.SlipstreamError]) -> None:
    answer = as_api_error(kind("what is wrong"))
    assert 400 <= answer.status < 600 and answer.body["error"]["message"] == "what is wrong"
    assert set(answer.body["error"]) == {"message", "type", "param", "code"}


def test_how_long_to_wait_is_rounded_up() -> None:
    answer = as_api_error(errors.Overloaded("full", retry_after_s=0.4))
    assert answer.headers == {"retry-after": "1", "retry-after-ms": "400"}


async def test_a_stream_that_fails_says_so(gateway: FakeGateway) -> None:
    """The fake sends no summary, which no gateway does."""
    async with front_at(gateway.address) as address, client_of(address) as client:
        messages, pieces = asked(data_url(b"no summary")), []

        async def read() -> None:
            async for chunk in await client.chat.completions.create(model=MODEL, messages=messages, stream=True):
                pieces.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match="without a summary"):
            await read()
        assert "".join(filter(None, pieces)) == TEXT
        answer = await raw(address, post(CHAT, body_of(b"no summary", stream=True)))
    events = [line for line in answer.splitlines() if line.startswith(b"data: ")]
    assert json.loads(events[-2][6:])["error"]["type"] and events[-1] == b"data: [DONE]"


async def test_a_response_that_fails_in_its_stream_says_so_in_its_own_form(gateway: FakeGateway) -> None:
    part = {"type": "input_file", "file_data": data_url(b"no summary")}
    body = {"model": MODEL, "input": [{"role": "user", "content": [part]}], "stream": True}
    async with front_at(gateway.address) as address, client_of(address) as client:
        answer = await raw(address, post("/v1/responses", json.dumps(body).encode()))
        with pytest.raises(openai.APIError, match="without a summary"):
            async for _ in await client.responses.create(**body):
                pass
    *_, before, kind, data = [line for line in answer.splitlines() if line.startswith((b"event: ", b"data: "))]
    told, number = json.loads(data[6:]), json.loads(before[6:])["sequence_number"]
    assert kind == b"event: error" and told["type"] == "error" and told["sequence_number"] == number + 1
    assert "without a summary" in told["message"] and {"code", "param"} <= set(told)


async def test_a_silent_stream_says_that_it_lives(gateway: FakeGateway) -> None:
    async with front_at(gateway.address, ping_s=0.05) as address, streamed(address, HANG) as reader:
        async with asyncio.timeout(60):
            text = await reader.readuntil(b"A red")
            pings = [await reader.readuntil(b": ping\n\n") for _ in range(3)]
    assert text.startswith(b"HTTP/1.1 200") and b"text/event-stream" in text and len(pings) == 3


async def test_who_goes_ends_the_caption(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        async with streamed(address, HANG) as reader, asyncio.timeout(60):
            await reader.readuntil(b"A red")
        await eventually(gateway.cancelled.is_set)
        gateway.cancelled.clear()
        gateway.received = b""
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(post(CHAT, body_of(HANG)))
        await eventually(lambda: gateway.received == HANG)
        writer.transport.abort()
        await eventually(gateway.cancelled.is_set)


async def test_only_who_goes_first_is_counted_as_gone(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        for fields in ({}, {"stream": True}):
            await raw(address, post(CHAT, body_of(GOOD, **fields)))
        async with streamed(address, HANG) as reader:
            await reader.readuntil(b"A red")
        counted: dict[str, str] = {}
        while sum(float(number) for number in counted.values()) < 3:
            figures = await raw(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            found = re.findall(rf'http_requests_total{{endpoint="{CHAT}",status="(\d+)"}} (\S+)', figures.decode())
            counted = dict(found)
    assert counted == {"200": "2.0", "499": "1.0"}


async def test_a_front_that_ends_says_so(gateway: FakeGateway) -> None:
    async with contextlib.AsyncExitStack() as exits:
        async with front_at(gateway.address) as address:
            reader = await exits.enter_async_context(streamed(address, HANG))
            await reader.readuntil(b"A red")
        async with asyncio.timeout(60):
            rest = await reader.read()
    assert b"stopping" in rest and b"data: [DONE]" in rest


async def test_no_gateway_and_another_one(gateway: FakeGateway) -> None:
    async with front_at("127.0.0.1:1") as address:
        for path in ("/ready", "/v1/models"):
            answer = await raw(address, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert status_of(answer) == 503 and b"retry-after: 1" in answer
        assert status_of(await raw(address, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")) == 200
    async with front_at(f"127.0.0.1:1,{gateway.address}") as address:
        for _ in range(2):
            assert (await chat(address, GOOD)).choices[0].message.content == TEXT


async def test_too_long_is_a_timeout(gateway: FakeGateway) -> None:
    async with front_at(gateway.address, request_timeout_s=1.0) as address:
        with pytest.raises(openai.APIStatusError) as refused:
            await chat(address, HANG)
    assert refused.value.status_code == 504 and refused.value.code == "timeout"


async def test_too_long_at_the_gateway_is_a_timeout_too(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        with pytest.raises(openai.APIStatusError, match=DETAILS) as refused:
            await chat(address, b"answer DEADLINE_EXCEEDED")
    assert refused.value.status_code == 504 and refused.value.code == "timeout"
    assert "retry-after" not in refused.value.response.headers


async def test_a_batch_needs_an_archive(gateway: FakeGateway, tmp_path: Path) -> None:
    options: Any = {"endpoint": CHAT, "completion_window": "24h"}
    line = batch_line("a", {"model": MODEL, "messages": asked("file:///a.mp4")})
    async with front_at(gateway.address, data=str(tmp_path)) as address, client_of(address) as client:
        file = await client.files.create(file=("a.jsonl", line.encode()), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, **options)
        async with asyncio.timeout(60):
            while batch.status == "validating":
                batch = await client.batches.retrieve(batch.id)
    assert batch.status == "failed" and "has no archive" in batch.errors.data[0].message


async def test_paths_and_methods(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        cases = {
            "GET /nothing": 404,
            "GET /v1/": 404,
            "DELETE /v1/models": 405,
            "GET /v1/chat/completions": 405,
            "GET /v1/files": 400,
            "GET /v1/batches": 400,
            "GET /v1/models?magic=1": 400,
            "HEAD /health": 200,
            "OPTIONS /v1/models": 405,
        }
        for line, status in cases.items():
            answer = await raw(address, f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert status_of(answer) == status, line
            assert status == 200 or error_of(answer)["message"], line
            assert (b"allow: " in answer) == (status == 405)


async def test_a_target_may_name_the_host_as_to_a_proxy(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        cases = {
            "http://localhost/v1/models": 200,
            "HTTP://127.0.0.1:8000/v1/models?": 200,
            "https://[::1]/v1/%66iles/x": 400,
            "http://localhost/v1/models?magic=1": 400,
            "http://localhost": 200,
            "http://localhost/nothing": 404,
            "http://stranger.example/v1/models": 403,
            "ftp://localhost/v1/models": 404,
        }
        for target, status in cases.items():
            answer = await raw(address, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            assert status_of(answer) == status, target


async def test_who_may_ask_from_another_page(gateway: FakeGateway) -> None:
    ask = b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\nOrigin: https://a.example\r\n"
    ask += b"Access-Control-Request-Method: GET\r\nConnection: close\r\n\r\n"
    async with front_at(gateway.address) as address:
        assert b"access-control" not in await raw(address, ask)
    async with front_at(gateway.address, cors_origins="https://a.example") as address:
        assert b"access-control-allow-origin: https://a.example" in await raw(address, ask)
        assert b"access-control-allow-origin" not in await raw(address, ask.replace(b"a.example", b"b.example"))
        names = b"authorization,idempotency-key,x-stainless-lang"
        told = ask.replace(b"Connection", b"Access-Control-Request-Headers: " + names + b"\r\nConnection")
        answer = await raw(address, told)
        assert status_of(answer) == 200 and b"access-control-allow-headers: " + names in answer
        near = told.replace(b"Connection", b"Access-Control-Request-Private-Network: true\r\nConnection")
        answer = await raw(address, near)
        assert status_of(answer) == 200 and b"access-control-allow-private-network: true" in answer
        assert status_of(await raw(address, near.replace(b"a.example", b"b.example"))) == 400
        answer = await raw(address, told.replace(b"OPTIONS", b"GET"))
        assert b"access-control-expose-headers: x-request-id, retry-after, retry-after-ms" in answer


async def test_one_caller_has_a_share_of_the_places(gateway: FakeGateway) -> None:
    async with front_at(gateway.address, max_requests=1) as address, streamed(address, HANG) as reader:
        await reader.readuntil(b"A red")
        with pytest.raises(openai.RateLimitError):
            await chat(address, GOOD)


async def test_a_client_names_its_request(gateway: FakeGateway, tmp_path: Path) -> None:
    async with front_at(gateway.address) as address:
        answer = await raw(address, post(CHAT, body_of(GOOD), more="X-Request-Id: mine-1\r\n"))
        assert b"x-request-id: mine-1" in answer and gateway.options.request_id == "mine-1"
        await raw(address, post(CHAT, body_of(GOOD), more="X-Request-Id: no good\r\n"))
    assert len(gateway.options.request_id) == 32


async def test_a_file_that_is_not_there_is_said_of_the_field_that_names_it(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    async with front_at(gateway.address, data=str(tmp_path)) as address, client_of(address) as client:
        part: Any = {"type": "file", "file": {"file_id": "file-none"}}
        batch: Any = {"endpoint": CHAT, "completion_window": "24h"}
        for call, param in (
            (client.files.retrieve("file-none"), "file_id"),
            (client.batches.create(input_file_id="file-none", **batch), "input_file_id"),
            (
                client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}]),
                "messages[0].content[0].file.file_id",
            ),
        ):
            with pytest.raises(openai.NotFoundError) as refused:
                await call
            assert (refused.value.code, refused.value.param) == ("file_not_found", param)
