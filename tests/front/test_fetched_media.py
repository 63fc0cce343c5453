"""Media that the front fetches itself: as large as any that are sent, and in the same room."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slipstream.errors import LimitExceeded, Overloaded
from slipstream.rpc.callers import Places
from slipstream.service_info import GatewayInfo
from slipstream.services.front.chat_messages import Medium, MediumKind
from slipstream.services.front.json_body import JsonBody
from slipstream.services.front.sources import Opened, Sources

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
        video: Any = opened.video
        assert video.read() == PIECE * MAX_PIECES and spooled.used == MAX_PIECES * len(PIECE)
    assert not spooled.used


@pytest.mark.parametrize(("room", "refusal"), [(10**6, LimitExceeded), (2500, Overloaded)])
async def test_too_much_is_not_fetched_to_its_end(room: int, refusal: type[Exception]) -> None:
    spooled = Places("spooled_bytes", room)
    with pytest.raises(refusal):
        async with fetched(MAX_PIECES + 1, spooled):
            pass
    assert not spooled.used
