"""The parts of a film's job for whoever reads results: segments with the answers to all prompts, and the summary."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from slipstream.archive.messages import JobPart
from slipstream.messages import Segment


@dataclass(frozen=True)
class SegmentResult:
    """What became of one segment."""

    segment: Segment
    """Without an error where any prompt was answered."""
    answers: tuple[JobPart, ...]
    """By prompt; each has a caption, or says why not. Of a film that goes on some may be missing."""

    @property
    def texts(self) -> list[str]:
        """Of the answers that there are."""
        return [answer.caption.text for answer in self.answers if answer.caption is not None]

    @property
    def error(self) -> str:
        """Why there is none."""
        return "" if self.texts else next((answer.error for answer in self.answers if answer.error), "")


def segments_of(parts: Sequence[JobPart]) -> list[SegmentResult]:
    """A film's segments, in order. A part that was damaged in the store, and knows no segment, stands alone."""
    plain = [part for part in parts if part.segment is None or not part.segment.is_summary]
    grouped = groupby(plain, key=lambda part: (part.segment is None, _segment(part).number))
    return [_result(tuple(answers)) for _, answers in grouped]


def summary_of(parts: Sequence[JobPart]) -> JobPart | None:
    """The text about the whole; None where there is none."""
    return next((part for part in parts if part.segment is not None and part.segment.is_summary), None)


def _result(answers: tuple[JobPart, ...]) -> SegmentResult:
    return SegmentResult(_segment(answers[0]), answers)


def _segment(part: JobPart) -> Segment:
    return part.segment or Segment(part.number)
