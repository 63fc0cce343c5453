"""Static steps of a model that several ranks share: rank 0 says which are made and taken, and all make and take them.

Every rank has steps of its own, over a pool of its own that gives the same places, with the sums over all ranks inside.
What goes into a step are a few numbers, so a record is all that a follower is told: the embeddings of the tokens come
from rank 0 within the step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, astuple
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor, nn

from slipstream.engine.forward import DecodeState, Note, Runner
from slipstream.engine.kv_cache import KVCache
from slipstream.engine.parallel.member import Member
from slipstream.engine.parallel.mirror import Director, number_of
from slipstream.engine.parallel.ranks import Leader
from slipstream.engine.segments import PassRows
from slipstream.engine.static.accord import Accord
from slipstream.engine.static.pool import SharedPool
from slipstream.engine.static.step import Entry, StaticStep
from slipstream.engine.static.steps import StaticSteps
from slipstream.engine.static.windows import StepShape
from slipstream.errors import DeviceLost

SaidT = TypeVar("SaidT")
AgreedT = TypeVar("AgreedT")


class LeaderAccord(Accord):
    """Rank 0's."""

    pool_type = SharedPool

    def __init__(self, leader: Leader) -> None:
        self._leader = leader

    def agree(self, said: SaidT, decide: Callable[[Sequence[SaidT]], AgreedT]) -> AgreedT:
        """See `Accord`. Raises `DeviceLost` when a rank is lost."""
        agreed = decide(self._leader.gather(said))
        self._leader.publish("agreed", what=agreed)
        return agreed

    def together(self) -> AbstractContextManager[None]:
        return self._leader.together()

    def embed(self, table: nn.Embedding, token_ids: Tensor) -> Tensor:
        hidden = cast(Tensor, table(token_ids))
        dist.broadcast(hidden, src=0)
        return hidden


class MemberAccord(Accord):
    """A follower's."""

    pool_type = SharedPool

    def __init__(self, member: Member) -> None:
        self._member = member

    def agree(self, said: SaidT, decide: Callable[[Sequence[SaidT]], AgreedT]) -> AgreedT:
        self._member.say(said)
        record = self._member.records.get()
        assert record["op"] == "agreed", "rank 0 says nothing else before"
        return cast(AgreedT, record["what"])

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Accord`. Raises `DeviceLost`, which ends this rank, and that the others."""
        try:
            yield
        except Exception as error:
            raise DeviceLost(f"a static step failed: {error}") from error

    def embed(self, table: nn.Embedding, token_ids: Tensor) -> Tensor:
        hidden = table.weight.new_empty(len(token_ids), table.weight.shape[1])
        dist.broadcast(hidden, src=0)
        return hidden


class MirroredSteps(StaticSteps):
    """Rank 0's, which tells the followers."""

    def __init__(self, runner: Runner, num_bytes: int, num_axes: int, *, width: int = 0, director: Director) -> None:
        self._director = director
        director.publish("open_steps", num_bytes=num_bytes, num_axes=num_axes, width=width)
        super().__init__(runner, num_bytes, num_axes, width=width, accord=LeaderAccord(director.leader))
        director.pool = self.pool

    def fix_widths(self) -> None:
        self._director.publish("fix_widths")
        super().fix_widths()

    def prepare(self) -> None:
        self._director.publish("prepare_steps")
        super().prepare()

    def drop(self) -> None:
        self._director.publish("drop_steps")
        super().drop()

    def step(self, shape: StepShape) -> StaticStep | None:
        if shape not in self._steps:
            self._director.publish("make_step", shape=astuple(shape))
        return super().step(shape)

    def _reserve(self, cache: KVCache, num_tokens: int) -> None:
        """A pass has every rank make room by itself; a step finds it made."""
        if not cache.has_room(num_tokens):
            self._director.publish("reserve", cache=number_of(cache), num_tokens=num_tokens)
            with self._director.leader.together():
                super()._reserve(cache, num_tokens)

    def _run(self, step: StaticStep, states: Sequence[DecodeState], entries: Sequence[Entry]) -> list[PassRows]:
        self._publish("run_step", step, states, entries)
        with self._director.leader.together():
            return super()._run(step, states, entries)

    def _write(
        self,
        step: StaticStep,
        states: Sequence[DecodeState],
        entries: Sequence[Entry],
        num_tokens: int,
        note: Note | None,
    ) -> list[list[int]]:
        self._publish("write_ahead", step, states, entries, num_tokens=num_tokens)
        with self._director.leader.together():
            return super()._write(step, states, entries, num_tokens, note)

    def _publish(
        self, op: str, step: StaticStep, states: Sequence[DecodeState], entries: Sequence[Entry], **fields: Any
    ) -> None:
        records = [_describe(state, entry) for state, entry in zip(states, entries, strict=True)]
        self._director.publish(op, shape=astuple(step.shape), entries=records, **fields)


def _describe(state: DecodeState, entry: Entry) -> dict[str, Any]:
    """A session's rows of a step, with the place that a follower must have, too."""
    record: dict[str, Any] = {
        "cache": number_of(state.cache),
        "start": entry.extent.start,
        "past": entry.past,
        "token_ids": [int(token) for token in entry.token_ids],
        "positions": list(entry.positions),
    }
    return record if entry.tree is None else record | {"tree": asdict(entry.tree)}
