"""Clients that mean harm, or are broken: refused early, in bounded memory, and nobody else notices."""

import asyncio
import io
import json
import os
import socket
import zipfile
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from slipstream import logs
from slipstream.services.front.server import TELL_OF_STRANGERS
from slipstream.stack.process import HttpProcess
from tests.cli.fake_gateway import TEXT, FakeGateway
from tests.support.front import (
    CHAT,
    asked,
    client_of,
    data_url,
    error_of,
    front_at,
    front_process,
    post,
    raw,
    status_of,
)
from tests.support.processes import eventually

MODEL = "big"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
MIB = 1024**2
MOST_GROWN = 64 * MIB
"""What a front may take more than at rest, whatever comes."""


def chat_body(url: str, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": asked(url)} | fields).encode()


@pytest_asyncio.fixture
async def process(gateway: FakeGateway, tmp_path: Path) -> AsyncIterator[HttpProcess]:
    front = front_process(gateway.address, tmp_path, "--head-s", "2", "--max-file-bytes", str(MIB))
    await front.start()
    try:
        await front.wait_serving(240)
        yield front
    finally:
        await front.stop(30)


async def test_hostile_bodies_are_refused(gateway: FakeGateway, tmp_path: Path) -> None:
    deep = b"[" * 200_000
    values = b"[" + b"{}," * 200_000 + b"{}]"
    cases: list[tuple[bytes, int]] = [
        (b"", 400),
        (b"\xff\xfe\x00", 400),
        (deep, 413),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400),
        (values, 413),
        (b'{"model": "' + b"x" * (5 * MIB) + b'"}', 413),
        (b'{"a": ' + b"9" * 10_000 + b"}", 400),
        (chat_body("data:video/mp4;base64,****"), 400),
        (chat_body("data:video/mp4;base64," + "A" * 4001), 400),
        (chat_body("data:video/mp4;base64,AAAA\n"), 400),
        (chat_body(data_url(b"good"), magic={"a": [1] * 100}), 400),
        (chat_body(data_url(b"x" * 5 * MIB)), 413),
    ]
    async with front_at(gateway.address, max_body_bytes=6 * MIB) as address:
        for body, status in cases:
            answer = await raw(address, post(CHAT, body))
            assert status_of(answer) == status, body[:80]
            assert error_of(answer)["type"] == "invalid_request_error"
        async with client_of(address) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=asked(data_url(b"good")))
            assert answer.choices[0].message.content == TEXT


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200), ("", 200)])
async def test_a_compressed_body_is_refused_as_one(gateway: FakeGateway, encoding: str, status: int) -> None:
    """It was called no valid JSON."""
    body = chat_body(data_url(b"good"))
    async with front_at(gateway.address) as address:
        answer = await raw(address, post(CHAT, body, more=f"Content-Encoding: {encoding}\r\n"))
    assert status_of(answer) == status
    assert status == 200 or "content-encoding" in error_of(answer)["message"]


@pytest.mark.parametrize("size", [0, 64 * 1024])
async def test_a_body_may_begin_with_the_mark_of_utf_8(gateway: FakeGateway, size: int) -> None:
    body = BOM_UTF8 + chat_body(data_url(b"good")) + b" " * size
    async with front_at(gateway.address) as address:
        assert status_of(await raw(address, post(CHAT, body))) == 200
        answer = await raw(address, post(CHAT, BOM_UTF8 + body))
    assert status_of(answer) == 400 and error_of(answer)["code"] == "invalid_json"


async def test_what_is_no_http(gateway: FakeGateway) -> None:
    async with front_at(gateway.address) as address:
        for data in (
            b"\x16\x03\x01\x02\x00\x01",
            b"GET\r\n\r\n",
            b"A" * 100_000,
            b"GET / HTTP/1.1\r\nA: " + b"b" * 100_000,
        ):
            answer = await raw(address, data + b"\r\n\r\n")
            assert not answer or status_of(answer) in (400, 431)
        two = (
            b"POST "
            + CHAT.encode()
            + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        answer = await raw(address, two + HEALTH)
        assert status_of(answer) == 400


async def test_who_speaks_no_http_fills_no_log(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(logs, "LOG_WINDOW_S", 3600.0)
    no_form = post("/v1/files", b"no form", more="Content-Type: multipart/form-data; boundary=b\r\n")
    async with front_at(gateway.address, data=str(tmp_path)) as address:
        for _ in range(logs.MAX_LINES_OF_ONE):
            for sent in (b"GET\r\n\r\n", no_form):
                assert status_of(await raw(address, sent)) == 400
    said = [record for record in caplog.records if record.name in TELL_OF_STRANGERS]
    assert len(said) == logs.MAX_LINES_OF_ONE and {record.name for record in said} == set(TELL_OF_STRANGERS)


async def test_an_upload_beyond_the_limit_is_refused_at_once(process: HttpProcess, tmp_path: Path) -> None:
    """Of 10 GB nothing is read that was announced, and little that was not."""
    kind = "Content-Type: multipart/form-data; boundary=b\r\n"
    answer = await raw(process.address, post("/v1/files", b"", length=10 * 1024**3, more=kind))
    assert status_of(answer) == 413 and error_of(answer)["code"] == "too_large"
    answer = await raw(process.address, post(CHAT, b"", length=10 * 1024**3))
    assert status_of(answer) == 413
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{kind}\r\n".encode()
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    piece = b"10000\r\n" + bytes(65536) + b"\r\n"
    answer = await raw(process.address, [head, b"%x\r\n" % len(part) + part + b"\r\n", *[piece] * 1000])
    assert not answer or status_of(answer) == 413
    assert status_of(await raw(process.address, HEALTH)) == 200, "it hangs up on nobody else"
    assert not list((tmp_path / "files" / "nobody").iterdir())


async def test_forms_that_are_none(gateway: FakeGateway, tmp_path: Path) -> None:
    kind = "Content-Type: multipart/form-data; boundary=b\r\n"
    file = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
    field = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    purpose, end = field % (b"purpose", b"user_data"), b"--b--\r\n"
    cases = [
        (b"", 400),
        (b"no form at all", 400),
        (end, 400),
        (purpose + end, 400),
        (file + end, 400),
        (file + purpose, 400),
        (file + file + purpose + end, 400),
        (file + purpose + purpose + end, 400),
        (file + purpose + field % (b"magic", b"1") + end, 400),
        (file + field % (b"purpose", b"p" * 9000) + end, 400),
        ((field % (b"a", b"1")) * 20 + end, 400),
        (b"--b\r\n" + b"A: b\r\n" * 5000 + b"\r\n", 400),
        (file.replace(b'"file"', b'"video"') + purpose + end, 400),
        (file + field % (b"file", b"x") + purpose + end, 400),
        (file + purpose + end, 200),
    ]
    async with front_at(gateway.address, data=str(tmp_path)) as address:
        for body, status in cases:
            answer = await raw(address, post("/v1/files", body, more=kind))
            assert status_of(answer) == status, (body[:200], answer)
        assert status_of(await raw(address, post("/v1/files", b"{}", more="Content-Type: application/json\r\n"))) == 415
    assert len(list((tmp_path / "files" / "nobody").iterdir())) == 1


@pytest.mark.parametrize(
    ("more", "filename"),
    [("", "file"), ("; filename*=UTF-8''a.mp4", "file"), ('; filename=""', "file"), ('; filename="a.mp4"', "a.mp4")],
)
async def test_the_part_named_file_is_the_file(gateway: FakeGateway, tmp_path: Path, more: str, filename: str) -> None:
    file = f'--b\r\nContent-Disposition: form-data; name="file"{more}\r\n\r\nx\r\n'
    purpose = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--b--\r\n'
    kind = "Content-Type: multipart/form-data; boundary=b\r\n"
    async with front_at(gateway.address, data=str(tmp_path)) as address:
        answer = await raw(address, post("/v1/files", (file + purpose).encode(), more=kind))
    assert status_of(answer) == 200
    kept = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert (kept["filename"], kept["bytes"]) == (filename, 1)


async def test_who_sends_slowly_is_let_go(gateway: FakeGateway) -> None:
    async with front_at(gateway.address, head_s=0.3) as address:
        assert await raw(address, b"GET /health HT") == b""
        assert await raw(address, b"") == b""
    async with front_at(gateway.address, head_s=2.0, upload_idle_s=0.3, min_upload_rate=0) as address:
        answer = await raw(address, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")  # and then nothing more
        assert status_of(answer) == 200
        answer = await raw(address, post(CHAT, b'{"mod', length=5000))
        assert status_of(answer) == 408 and error_of(answer)["code"] == "too_slow"
    async with front_at(gateway.address, upload_idle_s=0.3, min_upload_rate=10_000) as address:
        drops = [post(CHAT, b"", length=5000), *[b" "] * 400]
        answer = await raw(address, drops, pause_s=0.01)
        assert not answer or status_of(answer) == 408
        assert status_of(await raw(address, HEALTH)) == 200


async def test_who_does_not_read_is_let_go(gateway: FakeGateway, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": str(tmp_path), "write_s": 0.3, "max_connections": 1}
    async with front_at(gateway.address, **options) as address, asyncio.timeout(60):
        async with client_of(address) as client:
            file = await client.files.create(file=("v.mp4", bytes(30 * MIB)), purpose="user_data")
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as deaf:
            deaf.sendall(HEALTH.replace(b"/health", f"/v1/files/{file.id}/content".encode()))
            await asyncio.to_thread(deaf.recv, 1)
            assert not await raw(address, HEALTH)
            await eventually(lambda: raw(address, HEALTH))


async def test_many_who_only_hold_a_connection(process: HttpProcess, gateway: FakeGateway) -> None:
    host, _, port = process.address.rpartition(":")
    at_rest = psutil.Process(process.pid).memory_info().rss
    writers: list[asyncio.StreamWriter] = []
    try:
        for number in range(1000):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            if number % 2:
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        async with client_of(process.address) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=asked(data_url(b"good")))
        assert answer.choices[0].message.content == TEXT
        assert psutil.Process(process.pid).memory_info().rss - at_rest < MOST_GROWN
        descriptors = f"/proc/{process.pid}/fd"
        async with asyncio.timeout(60):
            while len(os.listdir(descriptors)) > 200:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
    finally:
        for writer in writers:
            writer.transport.abort()


@pytest.mark.long
async def test_large_media_go_through_in_little_memory(process: HttpProcess, gateway: FakeGateway) -> None:
    at_rest = psutil.Process(process.pid).memory_info().rss
    url = data_url(os.urandom(3 * MIB) * 40)
    body = chat_body(url)
    host, _, port = process.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(post(CHAT, body))
    reading, most = asyncio.create_task(reader.read()), 0
    while not reading.done():
        most = max(most, psutil.Process(process.pid).memory_info().rss)
        await asyncio.sleep(0.02)
    writer.transport.abort()
    assert status_of(await reading) == 200 and len(gateway.received) == 120 * MIB
    assert most - at_rest < MOST_GROWN


async def test_a_zip_is_no_bomb_here(gateway: FakeGateway) -> None:
    """Nothing is unpacked: what it is, the gateway finds out."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("video.mp4", bytes(64 * MIB))
    async with front_at(gateway.address) as address:
        assert status_of(await raw(address, post(CHAT, chat_body(data_url(target.getvalue()))))) == 200
    assert gateway.received == target.getvalue()
