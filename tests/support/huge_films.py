"""Films of more bytes than this machine has: an MP4 whose samples lie far apart in a sparse file, and a store of such
files that holds none of them."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.object_store import BUCKET, KEYS

_FOLDERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")
_LONG_HEADER = 16
"""Bytes of the header of a box whose size has 64 bits."""


def spread_film(data: bytes, path: Path, num_bytes: int) -> None:
    """Writes an MP4 of one track anew as a sparse file of some `num_bytes`: its chunks are spread over a box of 64
    bits, and the index, which is behind them, has offsets of 64 bits."""
    boxes = {kind: (start, end) for kind, start, end in _boxes(data)}
    _, media_end = boxes[b"mdat"]
    start, end = boxes[b"moov"]
    starts = _chunks(data[start:end])
    first = 32 + _LONG_HEADER
    step = (num_bytes - first - (media_end - starts[-1])) // max(len(starts) - 1, 1)
    places = [first + number * step for number in range(len(starts))]
    size = places[-1] + media_end - starts[-1] - (first - _LONG_HEADER)
    with path.open("wb") as file:
        file.write(_box(b"ftyp", b"isom\0\0\2\0isomiso2avc1mp41"))
        file.write((1).to_bytes(4, "big") + b"mdat" + size.to_bytes(8, "big"))
        for place, begin, stop in zip(places, starts, [*starts[1:], media_end], strict=True):
            file.seek(place)
            file.write(data[begin:stop])
        file.write(_box(b"moov", _placed(data[start:end], places)))


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind, and where the content begins and ends."""
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "big")
        yield data[position + 4 : position + 8], position + 8, position + size
        position += size


def _box(kind: bytes, content: bytes) -> bytes:
    return (len(content) + 8).to_bytes(4, "big") + kind + content


def _chunks(index: bytes) -> list[int]:
    """Where the chunks of samples begin."""
    for kind, start, end in _boxes(index):
        if kind == b"stco":
            return [int.from_bytes(index[at : at + 4], "big") for at in range(start + 8, end, 4)]
        if kind in _FOLDERS and (found := _chunks(index[start:end])):
            return found
    return []


def _placed(index: bytes, places: Sequence[int]) -> bytes:
    """The same index for chunks that begin at these places."""
    written = b""
    for kind, start, end in _boxes(index):
        content = index[start:end]
        if kind == b"stco":
            written += _box(b"co64", content[:8] + b"".join(place.to_bytes(8, "big") for place in places))
        else:
            written += _box(kind, _placed(content, places) if kind in _FOLDERS else content)
    return written


@dataclass
class HugeStore:
    """A bucket whose objects are the files of a folder, read by ranges alone."""

    folder: Path
    address: str = ""
    given: int = 0
    """Bytes of objects that were sent."""

    @property
    def environment(self) -> dict[str, str]:
        """For a gateway that reads from it."""
        return {**KEYS, "AWS_ENDPOINT_URL": self.address, "AWS_ALLOW_HTTP": "true"}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of a connection. Of a GET without a range nothing is sent."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = request.split(" ")
            path = self.folder / target.removeprefix(f"/{BUCKET}/")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            size = path.stat().st_size
            start, end, status = 0, size, "200 OK"
            if "range" in headers:
                first, _, last = headers["range"].removeprefix("bytes=").partition("-")
                start, end, status = int(first), int(last) + 1, "206 Partial Content"
            facts = f"Content-Length: {end - start}\r\nContent-Range: bytes {start}-{end - 1}/{size}\r\n"
            more = 'ETag: "one"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\nConnection: close\r\n'
            writer.write(f"HTTP/1.1 {status}\r\n{facts}{more}\r\n".encode())
            if method == "GET" and "range" in headers:
                with path.open("rb") as file:
                    writer.write(os.pread(file.fileno(), end - start, start))
                self.given += end - start
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def huge_store(folder: Path) -> AsyncIterator[HugeStore]:
    """Serves until the context is left."""
    served = HugeStore(folder)
    server = await asyncio.start_server(served.answer, "127.0.0.1", 0)
    served.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield served
