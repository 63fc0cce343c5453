"""What is kept of videos that were seen: a bounded LRU by bytes, and in it the target's prefills up to the text."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.budget import MIB
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.video_lm import PromptPlan
from slipstream.logs import get_logger

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")
SLACK = 1.25
"""A cache with more room than this times its rows is copied into a smaller one before it is kept."""


DIGEST_BYTES = 4 * MIB
"""One thread hashes so much of a video at a time."""
_hashing = ThreadPoolExecutor(thread_name_prefix="frames-digest")


def frames_digest(frames: NDArray[np.uint8]) -> bytes:
    """SHA-256 of the geometry and of the digests of the pixels, part by part: a core hashes one to two gigabytes a
    second, a video waits for it before it is encoded, and a host with a GPU has cores to spare."""
    pixels = np.ascontiguousarray(frames).data.cast("B")
    parts = (pixels[start : start + DIGEST_BYTES] for start in range(0, len(pixels), DIGEST_BYTES))
    digest = hashlib.sha256(repr(frames.shape).encode())
    for part in _hashing.map(hashlib.sha256, parts):
        digest.update(part.digest())
    return digest.digest()


class ByteLru(Generic[KeyT, ValueT]):
    """Values with a size; the ones that were not used for longest leave when the limit is passed. Not thread-safe.

    Args:
        limit_bytes: of all values together.
        flag: the flag that sets the limit: for the log, where a value alone is larger.
        on_evict: hears of a value that is not kept any more, or never was.
    """

    def __init__(self, limit_bytes: int, flag: str, on_evict: Callable[[ValueT], None] = lambda value: None) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._flag = flag
        self._on_evict = on_evict
        self._most_refused = 0
        self._entries: OrderedDict[KeyT, tuple[ValueT, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, key: KeyT) -> bool:
        """Whether there is a value now; the one thing that any thread may ask."""
        return key in self._entries

    def get(self, key: KeyT) -> ValueT | None:
        """The value, which counts as used now."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: KeyT, value: ValueT, num_bytes: int) -> None:
        """Adds a value, or tells its new size. Others may have to leave; what is over the limit alone is not kept."""
        if key in self._entries:
            before, size = self._entries.pop(key)
            self.num_bytes -= size
            if before is not value:
                self._on_evict(before)
        if num_bytes > self.limit_bytes:
            self._on_evict(value)
            self._complain(num_bytes)
            return
        self._entries[key] = value, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.limit_bytes:
            _, (evicted, size) = self._entries.popitem(last=False)
            self.num_bytes -= size
            self._on_evict(evicted)

    def drop(self, key: KeyT) -> None:
        """Takes a value out that is there."""
        value, size = self._entries.pop(key)
        self.num_bytes -= size
        self._on_evict(value)

    def _complain(self, num_bytes: int) -> None:
        """Once for a size: with a limit so low nothing of the kind is ever used again."""
        if self.limit_bytes and num_bytes > self._most_refused:
            self._most_refused = num_bytes
            get_logger().warning(
                "cache.too_small", needs_mb=-(-num_bytes // MIB), has_mb=self.limit_bytes // MIB, flag=self._flag
            )


@dataclass(frozen=True)
class PrefixKey:
    """All that decides a prefix: the pixels, and the plan without the text: tokens before it, places, grids."""

    frames: bytes
    plan: PromptPlan

    @classmethod
    def of(cls, plan: PromptPlan, digest: bytes) -> "PrefixKey":
        return cls(digest, replace(plan, token_ids=plan.token_ids[: plan.text_start]))


@dataclass(eq=False)
class VideoPrefix:
    """The prefill of a video up to where the text begins. While its session lives, the cache is the session's."""

    key: PrefixKey
    cache: KVCache
    video_states: tuple[Tensor, Tensor]
    """States of the video tokens before layer 1 and after layer L, bf16 [m, hidden]: all that guidance needs."""
    is_parked: bool = False

    @property
    def num_tokens(self) -> int:
        return self.key.plan.text_start

    @property
    def num_bytes(self) -> int:
        """Bytes that are held for its sake."""
        return sum(states.nbytes for states in self.video_states) + (self.cache.num_bytes if self.is_parked else 0)


def share_of_keys(kv_bytes_per_token: int, hidden_size: int) -> float:
    """The share of a kept prefix's bytes that is keys and values, which lie where all of them do; the rest is hidden
    states, in memory of their own."""
    return kv_bytes_per_token / (kv_bytes_per_token + 2 * hidden_size * torch.bfloat16.itemsize)


class PrefixCache:
    """Prefixes of running and ended sessions. Belongs to the model's thread. A limit of 0 keeps none."""

    def __init__(self, limit_bytes: int) -> None:
        self._lru: ByteLru[PrefixKey, VideoPrefix] = ByteLru(limit_bytes, "--prefix-cache-mb", _evict)

    @property
    def is_on(self) -> bool:
        return self._lru.limit_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._lru.num_bytes

    def find(self, key: PrefixKey) -> VideoPrefix | None:
        """The prefix, whose session may still run: the rows before the text never change."""
        return self._lru.get(key)

    def knows(self, key: PrefixKey) -> bool:
        """Whether there is one now; on any thread, and it counts as no use."""
        return self._lru.has(key)

    def share(self, prefix: VideoPrefix) -> None:
        """Lets others copy from a session that has just been prefilled."""
        if self._lru.get(prefix.key) is None:
            self._lru.put(prefix.key, prefix, prefix.num_bytes)

    def retire(self, prefix: VideoPrefix) -> None:
        """The session has ended: its cache, rolled back to the prefix, is kept if there is room, else freed."""
        if self._lru.get(prefix.key) is not prefix:
            prefix.cache.clear()
            return
        prefix.is_parked = True
        try:
            prefix.cache.rollback(prefix.num_tokens)
            if prefix.cache.capacity > SLACK * prefix.num_tokens:
                prefix.cache = prefix.cache.trimmed(prefix.num_tokens)
        except Exception:  # no memory for a copy
            self._lru.drop(prefix.key)
            raise
        self._lru.put(prefix.key, prefix, prefix.num_bytes)


def _evict(prefix: VideoPrefix) -> None:
    if prefix.is_parked:
        prefix.cache.clear()
