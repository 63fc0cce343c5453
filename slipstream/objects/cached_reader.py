"""Objects by ranges, through a cache of blocks that all readers share."""

from collections import OrderedDict
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from slipstream.errors import ObjectUnavailable
from slipstream.objects.store import ObjectFacts, ObjectStore, ObjectUrl
from slipstream.time_limits import within

T = TypeVar("T")

BLOCK_BYTES = 64 * 1024
READ_AHEAD_BLOCKS = 32
"""Most blocks that are fetched together because they are read one after the other."""
LARGEST_SHARE = 0.25
"""Of the cache, that one object may have if it is read as a whole: a large one would drive all others out."""


class BlockCache:
    """Blocks of objects, at most `max_bytes` of them; those that were not read for longest go first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[tuple[ObjectFacts, int], bytes] = OrderedDict()

    def get(self, facts: ObjectFacts, number: int) -> bytes | None:
        """The block of that number, from 0."""
        block = self._blocks.get((facts, number))
        if block is not None:
            self._blocks.move_to_end((facts, number))
        return block

    def add(self, facts: ObjectFacts, number: int, block: bytes) -> None:
        """Keeps it for as long as there is room."""
        self.num_bytes += len(block) - len(self._blocks.pop((facts, number), b""))
        self._blocks[facts, number] = block
        while self.num_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= len(oldest)


@dataclass
class CachedReader:
    """One object as it was found. Several may read at once. Blocks of one without an entity tag are not kept: those of
    another version would not be told apart."""

    store: ObjectStore
    facts: ObjectFacts
    cache: BlockCache
    timeout_s: float
    """Longest time for one range."""
    _next: int = field(default=-1, init=False)
    """The block behind those that were fetched last,"""
    _ahead: int = field(default=1, init=False)
    """and how many are fetched when that one is wanted."""

    async def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, which is behind the last.

        Raises `ObjectChanged`, `ObjectNotFound`, `PermissionDenied`, and `ObjectUnavailable` also after `timeout_s`.
        """
        return await in_time(self._read(start, min(end, self.facts.num_bytes)), self.facts.url, self.timeout_s)

    async def read_whole(self, start: int, end: int) -> bytes:
        """The same for who goes through the whole object: a large one leaves the cache as it is."""
        if self.facts.num_bytes <= self.cache.max_bytes * LARGEST_SHARE:
            return await self.read(start, end)
        return await in_time(self.store.read(self.facts, start, end), self.facts.url, self.timeout_s)

    async def _read(self, start: int, end: int) -> bytes:
        if start >= end:
            return b""
        if not self.facts.etag:
            return await self.store.read(self.facts, start, end)
        first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        found: dict[int, bytes] = {}
        for number in range(first, last + 1):
            block = self.cache.get(self.facts, number)
            if block is not None:
                found[number] = block
        for low, high in runs([number for number in range(first, last + 1) if number not in found]):
            found |= await self._fetch(low, high)
        data = b"".join(found[number] for number in range(first, last + 1))
        return data[start - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    async def _fetch(self, low: int, high: int) -> dict[int, bytes]:
        """The blocks from `low` to `high`, and more where the ones before were fetched last."""
        self._ahead = min(2 * self._ahead, READ_AHEAD_BLOCKS) if low == self._next else 1
        high = max(high, low + self._ahead - 1)
        data = await self.store.read(self.facts, low * BLOCK_BYTES, (high + 1) * BLOCK_BYTES)
        offsets = range(0, len(data), BLOCK_BYTES)
        blocks = {low + offset // BLOCK_BYTES: data[offset : offset + BLOCK_BYTES] for offset in offsets}
        for number, block in blocks.items():
            self.cache.add(self.facts, number, block)
        self._next = high + 1
        return blocks


async def in_time(call: Awaitable[T], url: ObjectUrl, limit_s: float) -> T:
    """What the call gives. Raises `ObjectUnavailable` for one that takes longer."""
    late = f"{url} did not come within this server's limit of {limit_s:g} s; try later"
    async with within(limit_s, lambda: ObjectUnavailable(late)):
        return await call


def runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, last) of each run without a gap."""
    low = 0
    for place, number in enumerate(numbers):
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield numbers[low], number
            low = place + 1
