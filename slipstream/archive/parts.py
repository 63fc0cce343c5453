"""Jobs of many parts: pages of a document, or segments of a film. What is done of a job is kept part by part.

A part is written once, by the current holder of the job's lease only; whoever has the job next goes on behind the parts
that are there. They outlast every failure of the job, and go with it. A *note* is kept in the same way, of what a job
makes on the way to its last part: it is for the job's later runs alone, and goes when the last part is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from slipstream.archive.queue import Lease


@dataclass(frozen=True)
class PartLimits:
    """Bounds of what one job may keep."""

    max_parts: int = 10_000
    max_part_bytes: int = 1024**2
    max_job_bytes: int = 64 * 1024**2
    """Of all parts and notes of a job together."""


@dataclass(frozen=True)
class PartsState:
    """What there is of a job's parts."""

    total: int
    """How many parts the job has; 0: nobody has found out yet."""
    layout: str
    """What the parts are, in the words of whoever made them out."""
    done: tuple[int, ...]
    """Numbers of those that are there, from 0, ascending."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of the others."""
        there = frozenset(self.done)
        return tuple(number for number in range(self.total) if number not in there)


class PutAnswer(StrEnum):
    """What became of a part or note."""

    KEPT = "kept"
    KNOWN = "known"
    """It is there already and stays as it was; so a call without an answer may be repeated."""
    LOST = "lost"
    """Another worker has the job, or may have it: nothing was written."""
    FULL = "full"
    """Nothing was written: the job's parts and notes would have more bytes than `PartLimits.max_job_bytes`."""


@dataclass(frozen=True)
class PartRecord:
    """One part as the queue knows it."""

    number: int
    """From 0."""
    data: bytes
    """As it was put; empty where it was damaged."""
    damage: str = ""
    """Why it cannot be used, if so."""


class PartStore(Protocol):
    """What a queue promises of the parts of its jobs. Every method may raise `QueueUnavailable`."""

    async def open_parts(self, lease: "Lease", key: str, total: int = 0, layout: str = "") -> PartsState | None:
        """What there is of the job's parts; those of another `key`, which names all that they depend on, are
        dropped with all notes. `total` and `layout` are told once they are known. None: the lease is lost. Raises
        `LimitExceeded`."""

    async def put_part(self, lease: "Lease", number: int, data: bytes, tallies: Mapping[str, float]) -> PutAnswer:
        """Keeps a part, durably and once, and forgets the failures and deaths that the job has had so far: a job that
        gets on is no poison. Raises `LimitExceeded` for a part that is too large."""

    async def put_note(self, lease: "Lease", name: str, data: bytes) -> PutAnswer:
        """The same for a note, which is written over where it differs: one that was damaged is made again."""

    async def find_note(self, lease: "Lease", name: str) -> bytes | None:
        """The note of this name, if there is one; empty where it was damaged."""

    async def list_parts(
        self, batch_id: str, job_id: str, after: int = 0, limit: int = 100
    ) -> tuple[list[PartRecord], int]:
        """Parts of a job from number `after` on; and the number to go on from, 0 at the end. May return fewer than
        `limit` before the end. Raises `UnknownBatch` when the batch has no such job."""
