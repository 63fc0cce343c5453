"""Jobs of many parts: pages of a document, later segments of a film. What is done of a job is kept part by part.

A part is written once, by the current holder of the job's lease only; whoever has the job next goes on behind the parts
that are there. They outlast every failure of the job, and go with it.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class PartLimits:
    """Bounds of what one job may keep."""

    max_parts: int = 10_000
    max_part_bytes: int = 1024**2
    max_job_bytes: int = 64 * 1024**2
    """Of all parts of a job together."""


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
    """What became of a part."""

    KEPT = "kept"
    KNOWN = "known"
    """It is there already and stays as it was; so a call without an answer may be repeated."""
    LOST = "lost"
    """Another worker has the job, or may have it: nothing was written."""
    FULL = "full"
    """Nothing was written: the job's parts would have more bytes than `PartLimits.max_job_bytes`."""


@dataclass(frozen=True)
class PartRecord:
    """One part as the queue knows it."""

    number: int
    """From 0."""
    data: bytes
    """As it was put; empty where it was damaged."""
    damage: str = ""
    """Why it cannot be used, if so."""
