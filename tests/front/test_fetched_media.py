"""Media that the front puts on disk itself, fetched or made of pictures: as large as any that are sent, and in the same
room."""

import errno
import io
import tempfile
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from slipstream.errors import LimitExceeded, Overloaded
from slipstream.rpc.callers import Places
from slipstream.service_info import GatewayInfo
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import Medium, MediumKind
from slipstream.services.front.json_body import JsonBody, Media
from slipstream.services.front.sources import Opened, Sources
from tests.front.conftest import png

PIECE, MAX_PIECES = bytes(1000), 3
MEDIUM = Medium(MediumKind.VIDEO, "https://videos.example/a.mp4", "messages")


@asynccontextmanager
async def fetched(num_pieces: int, spooled: Places) -> AsyncIterator[Opened]:
    """A medium of so many pieces, of a server that does not say how many."""

    async def fetch(source: str, sink: Any, /) -> None:
        for _ in range(num_pieces):
            await sink.write(PIECE)

    sources = Sources(fetch, None, MAX_PIECES * len(PIECE), spooled)
    with JsonBody(10**6, 10**6) as body:
        async with sources.opened(MEDIUM, body, GatewayInfo(), "") as opened:
            yield opened


async def test_room_is_taken_while_they_are_there() -> None:
    spooled = Places("spooled_bytes", 10**6)
    async with fetched(MAX_PIECES, spooled) as opened:
        video: Any = opened.video()
        assert video.read() == PIECE * MAX_PIECES and spooled.used == MAX_PIECES * len(PIECE)
    assert not spooled.used


@pytest.mark.parametrize("kind", [MediumKind.IMAGE, MediumKind.FILE])
async def test_a_picture_that_nobody_reads_is_a_video_of_one_frame(kind: MediumKind) -> None:
    picture = png(9)

    async def fetch(source: str, sink: Any, /) -> None:
        await sink.write(picture)

    spooled = Places("spooled_bytes", 10**6)
    sources, medium = Sources(fetch, None, 10**6, spooled), replace(MEDIUM, kind=kind)
    with JsonBody(10**6, 10**6) as body:
        async with sources.opened(medium, body, GatewayInfo(reads_documents=True), "") as page:
            video: Any = page.video()
            assert page.is_document and video.read() == picture
        async with sources.opened(medium, body, GatewayInfo(), "") as opened:
            video = opened.video()
            data = video.read()
            assert not opened.is_document and data[:4] == b"RIFF" and picture in data
    assert not spooled.used


BEGINNINGS = [*(before + b"%PDF-1.7" for before in (b"", b"\r\n", BOM_UTF8, b"x" * 1019)), b"II*\0", b"MM\0*", b"II+\0"]


@pytest.mark.parametrize("beginning", BEGINNINGS)
async def test_what_a_reader_opens_is_a_document(beginning: bytes) -> None:
    async def fetch(source: str, sink: Any, /) -> None:
        await sink.write(beginning + bytes(100))

    sources = Sources(fetch, None, 10**6, Places("spooled_bytes", 10**6))
    medium = replace(MEDIUM, kind=MediumKind.FILE)
    with JsonBody(10**6, 10**6) as body:
        async with sources.opened(medium, body, GatewayInfo(reads_documents=True), "") as opened:
            video: Any = opened.video()
            assert opened.is_document and video.read() == beginning + bytes(100)
        with pytest.raises(ApiError, match="reader"):
            async with sources.opened(medium, body, GatewayInfo(), ""):
                pass


@pytest.mark.parametrize(("room", "refusal"), [(10**6, LimitExceeded), (2500, Overloaded)])
async def test_too_much_is_not_fetched_to_its_end(room: int, refusal: type[Exception]) -> None:
    spooled = Places("spooled_bytes", room)
    with pytest.raises(refusal):
        async with fetched(MAX_PIECES + 1, spooled):
            pass
    assert not spooled.used


async def test_a_disk_that_is_full_is_no_fault_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    spooled = Places("spooled_bytes", 10**6)
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "write", refuse)
    with pytest.raises(ApiError, match="what was fetched cannot be kept now: No space left") as refused:
        async with fetched(1, spooled):
            pass
    assert (refused.value.status, spooled.used) == (503, 0)


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_video_of_pictures_takes_room_beside_them(has_room: bool) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "jpeg")
    data = picture.getvalue()
    spooled = Places("spooled_bytes", 2 * len(data) - 1 + has_room)
    with JsonBody(10**6, 10**6) as body:
        body.spool.write(data * 2)
        media = Media("video/jpeg", 0, 2 * len(data), [len(data), 2 * len(data)])
        medium = Medium(MediumKind.FRAMES, media, "messages")
        sources = Sources(None, None, 10**6, spooled)  # type: ignore[arg-type]
        if not has_room:
            with pytest.raises(Overloaded):
                async with sources.opened(medium, body, GatewayInfo(), ""):
                    pass
        else:
            async with sources.opened(medium, body, GatewayInfo(), "") as opened:
                video: Any = opened.video()
                assert video.read(4) == b"RIFF" and spooled.used == 2 * len(data)
    assert not spooled.used
