"""A follower's side of the processes of one model."""

import json
import os
import queue
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from slipstream.engine.parallel.links import Link, LinkLost, connect, read_all
from slipstream.engine.parallel.ranks import (
    COLLECTIVE_S,
    JOIN_S,
    Group,
    RankOrder,
    not_met,
    rank_here,
    store_of_torchrun,
)
from slipstream.errors import DeviceLost
from slipstream.logs import get_logger

LOOK_AGAIN_S = 5.0
"""So long rank 0 is tried at one place."""


class Member(Group):
    """A follower's side. It lives as long as rank 0 does: what it reads is put into `records`, and a loss ends it."""

    def __init__(self, rank: int, size: int, store: Store) -> None:
        super().__init__(rank, size, store)
        self._link = self._meet(time.monotonic() + JOIN_S)
        self.records: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        read_all(self._link, self._on_record, self._end)

    def _meet(self, deadline: float) -> Link:
        """Rank 0's link, wherever the store says that it is by then: at first it may tell of an earlier start, whose
        processes `torchrun` has replaced. Raises `LinkLost`."""
        while True:
            host, port, self.token = json.loads(self.store.get("leader"))
            self.met_at = (host, port)
            try:
                return connect(self.met_at, {"rank": self.rank, "token": self.token}, LOOK_AGAIN_S)
            except LinkLost:
                if time.monotonic() > deadline:
                    raise

    def ready(self, device: torch.device) -> None:
        """Tells that this rank has loaded its share, and what room that leaves."""
        self._link.send({"free": torch.cuda.mem_get_info(device)[0]} if device.type == "cuda" else {})

    def say(self, said: Any) -> None:
        """For `Leader.gather`."""
        self._link.send({"said": said})

    def compare(self, facts: Mapping[str, str]) -> None:
        self.say(facts)

    def computing(self) -> AbstractContextManager[None]:
        """Around a recorded step, whose sums wait for the other ranks for as long as those take: this rank ends when
        that is too long, and with it all."""
        limit_s = COLLECTIVE_S[self.backend]
        return self._patience.within(limit_s, f"a step of all ranks does not end in {limit_s:g} s")

    def _on_record(self, record: dict[str, Any]) -> None:
        if record["op"] == "signs":
            self._link.expect_signs(record["silence_s"])
        else:
            self.records.put(record)

    def _end(self, why: str) -> None:
        get_logger().info("rank.ended", rank=self.rank, why=f"rank 0: {why}")
        os._exit(1)

    def _give_up(self, why: str) -> None:
        get_logger().error("rank.failed", error=why)
        os._exit(DeviceLost.exit_code)

    def _tell(self, failure: str) -> None:
        self._link.send({"failed": failure} if failure else {})
        if not failure:
            self.records.get()  # rank 0's word that all have come as far; a failure of another one ends this process


def join(order: RankOrder) -> Member:
    """The follower that the environment says this process is. Raises `ModelNotUsable` or `LinkLost`."""
    store = store_of_torchrun()
    try:
        return Member(rank_here() or 0, order.size, store)
    except dist.DistError as error:  # rank 0 has not said where it listens
        raise not_met(error) from error
