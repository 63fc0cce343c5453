"""Films in a bucket that are larger than any file may be: read by ranges, and nowhere as a whole."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.errors import LimitExceeded
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from tests.support.films import make_noise_film
from tests.support.gateway_client import caption
from tests.support.huge_films import HugeStore, huge_store, spread_film
from tests.support.processes import running
from tests.support.world import PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 8, "max_new_tokens": 24}
NUM_BYTES = 4_600_000_000
"""More than 32 bits count."""


@dataclass(frozen=True)
class Door:
    """A gateway before a store of huge films."""

    channel: grpc.aio.Channel
    store: HugeStore
    film: bytes
    """That the huge one has been made of."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def door(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    folder = tmp_path_factory.mktemp("huge")
    film = make_noise_film(500)
    spread_film(film, folder / "film.mp4", NUM_BYTES)
    with (folder / "film.mkv").open("wb") as file:
        file.write(b"\x1a\x45\xdf\xa3")
        file.truncate(NUM_BYTES)
    async with huge_store(folder) as store, gateway(stack, store, folder) as channel:
        yield Door(channel, store, film)


@asynccontextmanager
async def gateway(stack: Stack, store: HugeStore, folder: Path, *flags: str) -> AsyncIterator[grpc.aio.Channel]:
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    roots = ("--object-roots", "s3://films")
    async with (
        running("gateway", folder / "gateway", *models, *roots, *flags, **store.environment) as process,
        open_channel(process.address) as channel,
    ):
        yield channel


async def test_a_film_of_more_than_4_gb_has_the_text_of_the_small_one(door: Door) -> None:
    status = (door.store.folder / "film.mp4").stat()
    assert status.st_size > 2**32 and status.st_blocks * 512 < 2 * len(door.film), "it is sparse"
    uploaded = await caption(door.channel, door.film, **SMALL)
    found = await caption(door.channel, path="s3://films/film.mp4", **SMALL)
    assert found.token_ids == uploaded.token_ids and found.text
    assert door.store.given < 4_000_000, "bytes of 4.6 GB"


async def test_what_has_to_be_fetched_whole_has_the_limit_of_a_file(door: Door) -> None:
    before = door.store.given
    with pytest.raises(LimitExceeded, match=r"4600000000 bytes, more than .* 2147483648 for an object that has to be"):
        await caption(door.channel, path="s3://films/film.mkv", **SMALL)
    assert door.store.given - before < 1_000_000


async def test_the_limit_of_ranges_is_one_of_its_own(door: Door, stack: Stack, tmp_path: Path) -> None:
    async with gateway(stack, door.store, tmp_path, "--max-ranged-bytes", str(2**32)) as strict:
        with pytest.raises(LimitExceeded, match="4294967296 for an object that is read by ranges"):
            await caption(strict, path="s3://films/film.mp4", **SMALL)
