"""What is fetched of an object, and what is kept of it: the cache of blocks, reading ahead, and what is left out."""

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ObjectUnavailable
from slipstream.objects.cached_reader import BLOCK_BYTES, READ_AHEAD_BLOCKS, BlockCache, CachedReader, runs
from slipstream.objects.store import ObjectFacts, ObjectUrl
from slipstream.video.ranged_reader import Holes

BLOCKS = 40
DATA = bytes(number % 251 for number in range(BLOCKS * BLOCK_BYTES - 777))
FACTS = ObjectFacts(ObjectUrl("s3://films", "a.mp4"), len(DATA), "one")


@dataclass
class MemoryStore:
    """Counts what it gives."""

    data: bytes = DATA
    given: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    hangs: bool = False

    async def read(self, facts: ObjectFacts, start: int = 0, end: int | None = None) -> bytes:
        if self.hangs:
            await asyncio.Event().wait()
        data = self.data[start:end]
        self.given += len(data)
        self.asked.append((start, len(data)))
        return data


def reader_of(store: MemoryStore, cache: BlockCache, timeout_s: float = 60.0) -> CachedReader:
    return CachedReader(store, FACTS, cache, timeout_s)  # type: ignore[arg-type]


EXTENTS = st.tuples(st.integers(0, len(DATA)), st.integers(0, 5 * BLOCK_BYTES)).map(lambda at: (at[0], at[0] + at[1]))


@given(st.lists(EXTENTS, min_size=1, max_size=20), st.integers(0, 30))
def test_whatever_is_read_is_what_is_there_and_the_cache_keeps_its_bound(
    extents: list[tuple[int, int]], blocks: int
) -> None:
    store, cache = MemoryStore(), BlockCache(blocks * BLOCK_BYTES)
    readers = [reader_of(store, cache), reader_of(store, cache)]

    async def read_all() -> None:
        for number, (start, end) in enumerate(extents):
            assert await readers[number % 2].read(start, end) == DATA[start : min(end, len(DATA))]
            assert cache.num_bytes <= cache.max_bytes

    asyncio.run(read_all())


@given(st.lists(EXTENTS, min_size=1, max_size=20))
def test_with_room_for_all_no_byte_is_fetched_twice(extents: list[tuple[int, int]]) -> None:
    store, cache = MemoryStore(), BlockCache(2 * len(DATA))

    async def read_all() -> None:
        for start, end in extents:
            await reader_of(store, cache).read(start, end)

    asyncio.run(read_all())
    assert store.given == cache.num_bytes <= len(DATA)


async def test_who_reads_on_gets_more_at_once_and_who_jumps_does_not() -> None:
    store, reader = MemoryStore(), reader_of(MemoryStore(), BlockCache(2 * len(DATA)))
    reader.store = store  # type: ignore[assignment]
    for number in range(8):
        await reader.read(number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
    assert [size // BLOCK_BYTES for _, size in store.asked] == [1, 2, 4, 8]
    await reader.read(30 * BLOCK_BYTES, 30 * BLOCK_BYTES + 1)
    assert store.asked[-1] == (30 * BLOCK_BYTES, BLOCK_BYTES) and READ_AHEAD_BLOCKS > 8


async def test_a_large_object_that_is_read_as_a_whole_drives_nothing_out() -> None:
    store, cache = MemoryStore(), BlockCache(2 * len(DATA))
    await reader_of(store, cache).read(0, BLOCK_BYTES)
    before = cache.num_bytes
    assert await reader_of(store, cache).read_whole(0, len(DATA)) == DATA
    assert cache.num_bytes == before


async def test_of_an_object_without_an_entity_tag_nothing_is_kept() -> None:
    """Another one of the same size may stand there by the next time."""
    cache, untagged = BlockCache(8 * len(DATA)), ObjectFacts(FACTS.url, len(DATA), "")
    for data in (DATA, DATA[::-1]):
        reader = CachedReader(MemoryStore(data), untagged, cache, 60.0)  # type: ignore[arg-type]
        assert await reader.read(5, BLOCK_BYTES + 9) == data[5 : BLOCK_BYTES + 9]
        assert await reader.read_whole(0, len(DATA)) == data
    assert cache.num_bytes == 0


async def test_a_store_that_says_nothing_is_not_waited_for() -> None:
    with pytest.raises(ObjectUnavailable, match=r"did not come within this server's limit of 0\.01 s"):
        await reader_of(MemoryStore(hangs=True), BlockCache(BLOCK_BYTES), timeout_s=0.01).read(0, 1)


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_numbers_again(numbers: set[int]) -> None:
    found = list(runs(sorted(numbers)))
    assert [number for low, high in found for number in range(low, high + 1)] == sorted(numbers)
    assert all(high + 1 < low for (_, high), (low, _) in pairwise(found))


SPANS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 30)).map(lambda at: (at[0], at[0] + at[1])), max_size=8)


@given(SPANS, SPANS, st.integers(0, 200), st.integers(1, 60))
def test_what_is_needed_is_all_but_the_media_that_nobody_wants(
    media: list[tuple[int, int]], wanted: list[tuple[int, int]], start: int, size: int
) -> None:
    media = [(2 * low, 2 * low + 1) if high > low else (2 * low, 2 * low) for low, high in sorted(set(media))]
    holes = Holes(media, wanted)
    is_media = {at for low, high in media for at in range(low, high)}
    is_wanted = {at for low, high in wanted for at in range(low, high)}
    needed = [at for low, high in holes.needed(start, start + size) for at in range(low, high)]
    assert needed == [at for at in range(start, start + size) if at not in is_media or at in is_wanted]
    for at in needed:
        assert holes.run_on(at + 1) > at
