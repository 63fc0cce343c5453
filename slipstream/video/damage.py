"""What of a video could not be read or decoded, against the bounds. Pure.

A clip that is damaged too much is refused. A film may have any number of torn packets: each of its parts is judged by
itself.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from slipstream.errors import LimitExceeded, SlipstreamError, UnreadableVideo

LACKED_MEMORY = "decoding this video needs more memory than is allowed; scale it down, or raise decode_memory_mb"
LACK_OF_MEMORY = (MemoryError, BlockingIOError)
"""The latter is what libav says when there is no room for the stack of a thread."""


@dataclass
class DamageCount:
    """How many packets could not be read or decoded, against the bound."""

    limit: int
    count: int = 0
    last: str = field(default="", init=False)
    lacked_memory: bool = field(default=False, init=False)

    @property
    def is_too_much(self) -> bool:
        """Whether what is so damaged is refused."""
        return self.count > self.limit

    def at(self, packet: int) -> None:
        """What is read and decoded from here on is this packet, counted from 0. It matters to films alone."""

    def add(self, failure: object) -> None:
        """Count one packet; raise what `error` returns when it is one too many."""
        self.note(failure)
        if self.is_too_much:
            raise self.error(self.refusal("video"))

    def note(self, failure: object) -> None:
        """Count one packet, however many there are."""
        self.count += 1
        self.last = str(failure)
        self.lacked_memory |= isinstance(failure, LACK_OF_MEMORY)

    def refusal(self, what: str) -> str:
        """What to say of something that has too many."""
        return (
            f"the {what} is damaged: more than {self.limit} packets could not be decoded (the last: {self.last}); "
            "export it again"
        )

    def error(self, message: str) -> SlipstreamError:
        """What to raise: UnreadableVideo, or LimitExceeded when memory ran out rather than the file being damaged."""
        return LimitExceeded(LACKED_MEMORY) if self.lacked_memory else UnreadableVideo(message)

    def warnings(self) -> list[str]:
        """What to tell the caller about skipped packets."""
        if not self.count:
            return []
        return [f"{self.count} damaged packets were skipped (the last: {self.last})"]


def _no_part(packet: int) -> int | None:
    return None


class FilmDamage(DamageCount):
    """Counts damaged packets by the part of a film that they belong to, and refuses none of it.

    What it does bound are failures in one place: a demuxer that does not get past one fails there for ever.
    """

    def __init__(self, limit: int, part_of: Callable[[int], int | None] = _no_part) -> None:
        """`limit`: of failures in one place, and of damaged packets of a part that is still any good. `part_of`: the
        part that a packet, counted from 0, belongs to."""
        super().__init__(limit)
        self._part_of = part_of
        self._of_part: Counter[int] = Counter()
        self._packet, self._num_there = 0, 0

    def at(self, packet: int) -> None:
        """See `DamageCount`."""
        if packet != self._packet:
            self._packet, self._num_there = packet, 0

    def add(self, failure: object) -> None:
        """Count one packet. Raises what `error` returns when reading does not get on."""
        self.note(failure)
        self._num_there += 1
        if self._num_there > self.limit:
            raise self.error(f"the video cannot be read on from its packet {self._packet} ({self.last})")
        if (part := self._part_of(self._packet)) is not None:
            self._of_part[part] += 1

    def of(self, part: int) -> DamageCount:
        """Of a part alone."""
        found = DamageCount(self.limit, self._of_part[part])
        found.last, found.lacked_memory = self.last, self.lacked_memory
        return found
