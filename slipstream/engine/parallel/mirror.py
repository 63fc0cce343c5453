"""What rank 0 computes with: a runner, passes and caches that tell the followers what they are asked to do, and do it.

Everything comes from one thread, so the order of the records is all the protocol there is. Small things are in the
record; rows of a pass are broadcast behind it.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.engine.forward import ForwardPass, Runner
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.parallel.ranks import Leader
from slipstream.engine.parallel.shards import join_heads, own_heads
from slipstream.engine.segments import Observer, Recording, Rows
from slipstream.engine.static.pool import KVPool, PooledCache

# -- to the followers -------------------------------------------------------------------------------------------------


class Director:
    """Names what followers hold, and has them let go of what is no more."""

    def __init__(self, leader: Leader, device: torch.device) -> None:
        self.leader = leader
        self._device = device
        self._numbers = itertools.count()
        self._gone: deque[int] = deque()
        self.pool: KVPool | None = None
        """Where caches lie once there are static steps."""

    def name(self, thing: object) -> int:
        """A number for a cache or a pass; the followers forget theirs some time after it is collected here."""
        number = next(self._numbers)
        weakref.finalize(thing, self._gone.append, number).atexit = False
        return number

    def publish(self, op: str, **fields: Any) -> None:
        """See `Leader.publish`."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        free = [] if self.pool is None else self.pool.ownerless()
        if self.pool is not None:
            self.pool.free(free)  # here and now, as the followers do before anything else
        self.leader.publish(op, **fields, **({"gone": gone} if gone else {}), **({"free": free} if free else {}))

    def share(self, *tensors: Tensor) -> None:
        """Broadcasts what a record has described, from the device that the ranks compute on."""
        for tensor in tensors:
            dist.broadcast(tensor.to(self._device).contiguous(), src=0)


def described(tensor: Tensor) -> dict[str, Any]:
    """What a follower makes an empty one of."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


# -- mirrored engine --------------------------------------------------------------------------------------------------


class MirroredCache(KVCache):
    """Rank 0's heads of a cache; what is not done by a pass is told to the others."""

    def __init__(self, director: Director, num_layers: int, *, capacity: int, **layout: Any) -> None:
        super().__init__(num_layers, capacity=capacity, **layout)
        self._director = director
        self._layout = layout
        self.number = director.name(self)
        director.publish("new_cache", cache=self.number, capacity=capacity, num_text=layout.get("num_text", 0))

    def empty_like(self, capacity: int) -> KVCache:
        return type(self)(self._director, self.num_layers, capacity=capacity, **self._layout)

    def rollback(self, length: int) -> None:
        assert 0 <= length <= self.length, "rollback goes backwards only"
        if length != self.length:
            self._director.publish("rollback", cache=self.number, length=length)
        super().rollback(length)

    def keep(self, num_before: int, rows: Sequence[int]) -> None:
        self._director.publish("keep", cache=self.number, num_before=num_before, rows=list(rows))
        with self._director.leader.together():
            super().keep(num_before, rows)

    def copy_from(self, other: KVCache, num_tokens: int) -> None:
        self._director.publish("copy_from", cache=self.number, other=number_of(other), num_tokens=num_tokens)
        with self._director.leader.together():
            super().copy_from(other, num_tokens)

    def copy_chosen(self, other: KVCache, among: Tensor, chosen: Sequence[Tensor]) -> None:
        """`chosen` is that of all heads; every rank copies its own."""
        picked = torch.stack(list(chosen))
        described_ = {"among": described(among), "chosen": described(picked)}
        self._director.publish("copy_chosen", cache=self.number, other=number_of(other), **described_)
        with self._director.leader.together():
            self._director.share(among, picked)
            super().copy_chosen(other, among, list(picked[:, own_heads(picked.shape[1])]))

    def clear(self) -> None:
        if self._director.leader.loss is None:
            self._director.publish("clear", cache=self.number)
        super().clear()


class MirroredPooledCache(MirroredCache, PooledCache):
    """One whose rows lie in a pool, at every rank in the same place: all take, move and give back rows in one order."""

    def trimmed(self, num_tokens: int) -> KVCache:
        if self.extent is not None:
            self.rollback(num_tokens)
            self._director.publish("trim", cache=self.number, num_tokens=num_tokens)
        return super().trimmed(num_tokens)


def number_of(cache: KVCache) -> int:
    """By which the followers know it."""
    assert isinstance(cache, MirroredCache), "caches of one model are of one kind"
    return cache.number


class MirroredPass(ForwardPass):
    """A pass that the followers run, too."""

    def __init__(
        self, runner: "MirroredRunner", batch: Sequence[Rows], director: Director, *, is_whole: bool = False
    ) -> None:
        self._director = director
        self._num_heads: int = runner.decoder.config.num_key_value_heads
        self._is_whole = is_whole
        """Whether the followers were told to run all of it at once."""
        self.number = director.name(self)
        self._observers: Sequence[Observer | None] = [rows.observer for rows in batch]
        self._told: dict[int, tuple[Recording, Tensor]] = {}
        """What the followers know of each observer: they are kept here, so that nothing new can be taken for them."""
        op = "run" if is_whole else "start"
        director.publish(op, number=self.number, rows=[describe_rows(rows) for rows in batch])
        with director.leader.together():
            for rows in batch:
                director.share(*tensors_of(rows))
            super().__init__(runner, batch)

    def run_layers(self, until_layer: int) -> None:
        if self._is_whole or until_layer <= self.next_layer:
            return super().run_layers(until_layer)
        recordings = self._new_recordings()
        self._director.publish(
            "run_layers", number=self.number, until=until_layer, recordings=[told for told, _ in recordings]
        )
        with self._director.leader.together():
            self._director.share(*(video for _, video in recordings))
            super().run_layers(until_layer)

    def keep_rows(self, keep: Tensor) -> None:
        self._director.publish("keep_rows", number=self.number, keep=described(keep))
        with self._director.leader.together():
            self._director.share(keep)
            super().keep_rows(keep)

    def _conclude(self, last_row_only: bool) -> list[Tensor]:
        if not self._is_whole:
            self._director.publish("conclude", number=self.number, last_row_only=last_row_only)
        with self._director.leader.together():
            return super()._conclude(last_row_only)

    def _new_recordings(self) -> list[tuple[dict[str, Any], Tensor]]:
        """What observers record otherwise than when the followers were last told."""
        new = []
        for index, observer in enumerate(self._observers):
            recording = observer.recording if observer is not None else None
            if recording is None:
                continue
            told_of, told_video = self._told.get(index, (None, None))
            if told_of is recording and told_video is recording.video:
                continue
            self._told[index] = recording, recording.video
            recording.join_heads = partial(join_heads, num_heads=self._num_heads)
            record = {"segment": index, "order": recording.order, "video": described(recording.video)}
            new.append((record, recording.video))
        return new


class MirroredRunner(Runner):
    """A runner of rank 0's share."""

    def __init__(self, *args: Any, director: Director, **options: Any) -> None:
        super().__init__(*args, **options)
        self._director = director

    def room(self, free_bytes: int) -> int:
        """What the rank with the least room has; ranks on a CPU have one memory."""
        least = self._director.leader.least_free
        return free_bytes // self._director.leader.size if least is None else min(free_bytes, least)

    def new_cache(self, capacity: int, num_text: int = 0) -> KVCache:
        if self.pool is not None:
            layout = {"pool": self.pool, "whole_granules": self.fixed_shapes}
            return MirroredPooledCache(self._director, self.num_layers, capacity=capacity, **layout)
        return MirroredCache(self._director, self.num_layers, capacity=capacity, **self.cache_layout)

    def start(self, batch: Sequence[Rows]) -> ForwardPass:
        return self._begin(batch)

    def run(self, batch: Sequence[Rows]) -> list[Tensor]:
        """One record for all of it: that is what decoding does again and again."""
        with self._director.leader.together():
            return self._begin(batch, is_whole=True).finish()

    def _begin(self, batch: Sequence[Rows], *, is_whole: bool = False) -> ForwardPass:
        assert all(rows.observer is None for rows in batch) or not is_whole, "prompts alone are observed"
        with torch.inference_mode():
            return MirroredPass(self, batch, self._director, is_whole=is_whole)


# -- rows -------------------------------------------------------------------------------------------------------------


def describe_rows(rows: Rows) -> dict[str, Any]:
    """Of a session's rows all but the tensors."""
    record: dict[str, Any] = {"cache": number_of(rows.cache), "tensors": list(map(described, tensors_of(rows)))}
    if rows.tree is not None:
        record["tree"] = asdict(rows.tree)
    return record


def tensors_of(rows: Rows) -> Sequence[Tensor]:
    """Embeddings and positions, then the rows and features of additions, if there are any."""
    additions = () if rows.additions is None else (rows.additions.rows, *rows.additions.features)
    return rows.hidden, rows.positions, *additions
