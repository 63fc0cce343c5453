"""Clients that mean harm before the HTTP front of a running stack: what they are answered, what the front's memory does
meanwhile, and that others are still served."""

import asyncio
import base64
import contextlib
import io
import json
import os
import time
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import held_out_clips, say
from slipstream.stack.local import Stack
from tests.support.front import CHAT, asked, client_of, data_url, error_of, post, raw, status_of

MIB, GIB = 1024**2, 1024**3
MODEL = "pocket/target"
MOST_GROWN_MB = 64.0
"""What the front may take more than before, whatever comes."""
NUM_IDLE, NUM_SLOW = 1000, 200
LET_GO_S = 60.0
NUM_TOKENS = 8


@dataclass
class Watched:
    """The front's memory while something happens to it."""

    before: int
    most: int = 0

    @property
    def grown_mb(self) -> float:
        return round((self.most - self.before) / 1e6, 1)


@contextlib.asynccontextmanager
async def watched(stack: Stack) -> AsyncIterator[Watched]:
    """Looks at it again and again."""
    pid = stack.processes["front"].pid
    found = Watched(resident_bytes(pid))

    async def look() -> None:
        while True:
            found.most = max(found.most, resident_bytes(pid))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(look())
    try:
        yield found
    finally:
        found.most = max(found.most, resident_bytes(pid))
        task.cancel()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def is_served(address: str) -> bool:
    """Somebody else gets a caption."""
    async with client_of(address) as client:
        answer: Any = await client.chat.completions.create(
            model=MODEL,
            messages=asked(data_url(held_out_clips(1)[0].read_bytes())),
            max_completion_tokens=NUM_TOKENS,
            extra_body={"slipstream": {"num_frames": 4}},
        )
    return bool(answer.choices[0].message.content)


def chat(url: str) -> bytes:
    return json.dumps({"model": MODEL, "messages": asked(url)}).encode()


def refused(answer: bytes, status: int) -> bool:
    """With this status, in OpenAI's form."""
    return status_of(answer) == status and error_of(answer)["type"] == "invalid_request_error"


# -- what is done to it -----------------------------------------------------------------------------------------------


async def huge_uploads(address: str) -> bool:
    """10 GB: where it is announced nothing is read; where it is not, it ends at the limit of a body or before."""
    kind = "Content-Type: multipart/form-data; boundary=b\r\n"
    for path, more in ((CHAT, ""), ("/v1/files", kind)):
        start = time.monotonic()
        if not refused(await raw(address, post(path, b"", length=10 * GIB, more=more)), 413):
            return False
        if time.monotonic() - start > 10:
            return False
    head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{kind}\r\n".encode()
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    sent, answer = await poured(address, [head, b"%x\r\n" % len(part) + part + b"\r\n"], 10 * GIB)
    return sent < GIB and (not answer or status_of(answer) == 413)


async def poured(address: str, begin: Sequence[bytes], most: int) -> tuple[int, bytes]:
    """Sends chunks of zeros until they are not taken any more; how many bytes were, and the answer."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    piece, sent, answer = b"100000\r\n" + bytes(MIB) + b"\r\n", 0, b""
    reading = asyncio.create_task(reader.read(65_536))
    with contextlib.suppress(ConnectionError):
        writer.writelines(begin)
        while sent < most and not reading.done():
            writer.write(piece)
            await writer.drain()
            sent += MIB
    with contextlib.suppress(ConnectionError, TimeoutError):
        answer = await asyncio.wait_for(reading, LET_GO_S)
    writer.transport.abort()
    return sent, answer


async def broken_base64(address: str) -> bool:
    """Large, and broken at its very end."""
    good = base64.b64encode(os.urandom(48 * MIB)).decode()
    urls = [f"data:video/mp4;base64,{text}" for text in (good + "*", good + "A", good[:-2] + "==A=", "====")]
    return all([refused(await raw(address, post(CHAT, chat(url))), 400) for url in urls])


async def zipped_video(address: str) -> bool:
    """A clip in a zip, and a zip of a gigabyte of nothing: no videos, and nothing unpacks them."""
    answers = []
    for data in (held_out_clips(1)[0].read_bytes(), bytes(GIB)):
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("video.mp4", data)
        answers.append(await raw(address, post(CHAT, chat(data_url(target.getvalue())))))
    return all(refused(answer, 400) for answer in answers)


async def idle_connections(address: str) -> bool:
    """A thousand, half of them with half a head: others are served meanwhile, and all are let go."""
    host, _, port = address.rpartition(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(NUM_IDLE)]
    try:
        for _, writer in streams[::2]:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        served = await is_served(address)
        async with asyncio.timeout(LET_GO_S):
            await asyncio.gather(*(_ended(reader) for reader, _ in streams))
        return served
    except TimeoutError:
        return False
    finally:
        for _, writer in streams:
            writer.transport.abort()


async def slow_loris(address: str) -> bool:
    """Heads and bodies that come byte by byte, each byte in time: let go all the same, and others are served."""
    host, _, port = address.rpartition(":")
    heads = [b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: ", post(CHAT, b"{", length=1_000_000)]
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(NUM_SLOW)]
    ended = [asyncio.ensure_future(_ended(reader)) for reader, _ in streams]
    try:
        for index, (_, writer) in enumerate(streams):
            writer.write(heads[index % 2])
        served = asyncio.ensure_future(is_served(address))
        async with asyncio.timeout(LET_GO_S):
            while not all(done.done() for done in ended):
                for _, writer in streams:
                    writer.write(b" ")
                await asyncio.sleep(0.5)
        return await served
    except TimeoutError:
        return False
    finally:
        for _, writer in streams:
            writer.transport.abort()
        await asyncio.gather(*ended, return_exceptions=True)


async def _ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()


# -- all of it --------------------------------------------------------------------------------------------------------

ATTACKS: dict[str, Callable[[str], Awaitable[bool]]] = {
    "10 GB uploads": huge_uploads,
    "broken base64": broken_base64,
    "a zip of a video": zipped_video,
    f"{NUM_IDLE} idle connections": idle_connections,
    f"{NUM_SLOW} slow-loris connections": slow_loris,
}


async def hostile(stack: Stack) -> dict[str, Any]:
    """Each attack; `passed`: all were answered as documented, and memory grew by at most `MOST_GROWN_MB`."""
    address, found = stack.http_address, dict[str, Any]()
    await is_served(address)  # what is made at the first request is there
    starts = stack.processes["front"].starts
    for name, attack in ATTACKS.items():
        async with watched(stack) as memory:
            start = time.monotonic()
            as_told = await attack(address)
        is_bounded = memory.grown_mb <= MOST_GROWN_MB
        seconds = round(time.monotonic() - start, 1)
        found[name] = {"as_documented": as_told, "grown_mb": memory.grown_mb, "seconds": seconds}
        found[name]["passed"] = as_told and is_bounded
        say(f"{name}: {found[name]}")
    is_alive = stack.processes["front"].starts == starts and await is_served(address)
    return {"passed": is_alive and all(one["passed"] for one in found.values()), "alive": is_alive} | found
