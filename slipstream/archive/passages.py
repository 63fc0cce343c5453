"""What can be found in an export of the archive: each text with its file and its time in it. Pure.

A line of JSON is read as `slipstream archive export` writes it; those of other releases give what is understood.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.archive.messages import JobKind


@dataclass(frozen=True)
class Passage:
    """A text of the archive: the caption of a video or segment, or a page."""

    custom_id: str
    source: str
    """The file or address, as the gateway was told it."""
    text: str
    start_s: float = 0.0
    end_s: float = 0.0
    """Where it is in the film, by the container's clock; of a video that was not cut, all of it. 0 both: not known."""
    page: int = 0
    """Of a document, from 1; 0: it is a video."""
    is_segment: bool = False
    """Its times are those of a segment, and not just of the whole video."""


@dataclass
class ExportedPassages:
    """Those of all lines of an export, in their order."""

    lines: Iterable[str | bytes]
    num_damaged: int = 0
    """Lines so far that are neither empty nor of an export."""

    def __iter__(self) -> Iterator[Passage]:
        for line in self.lines:
            record = _record_of(line)
            if record is not None:
                yield from _passages_of(record)
            elif line.strip():
                self.num_damaged += 1


def _record_of(line: str | bytes) -> dict[str, Any] | None:
    """What it says of a job; None where it is no line of an export."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and _is_text(record.get("custom_id")) else None


def _passages_of(record: Mapping[str, Any]) -> Iterator[Passage]:
    source = record["source"] if _is_text(record.get("source")) else ""
    for part in _said(record):
        if _is_text(part.get("text")) and part["text"].strip():
            yield _passage(part, record["custom_id"], source, is_document=record.get("kind") == JobKind.DOCUMENT)


def _said(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All that has a text: a video, or pages, or segments with each of several answers, and the summary of them."""
    if not isinstance(record.get("parts"), list):
        yield record
        return
    for part in _mappings(record["parts"]):
        yield from [{**part, "text": None, **answer} for answer in _mappings(part.get("answers")) or [part]]
    yield from _mappings([record.get("summary")])


def _mappings(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _passage(part: Mapping[str, Any], custom_id: str, source: str, is_document: bool) -> Passage:
    if is_document:
        page = part.get("page")
        return Passage(custom_id, source, part["text"], page=page if type(page) is int and 0 < page < 2**31 else 0)
    if "segment" in part:
        start_s, end_s = _seconds(part.get("start_s")), _seconds(part.get("end_s"))
        return Passage(custom_id, source, part["text"], start_s, max(start_s, end_s), is_segment=True)
    return Passage(custom_id, source, part["text"], 0.0, max(_duration_s(part), 0.0))


def _duration_s(record: Mapping[str, Any]) -> float:
    receipt = record.get("receipt")
    video = receipt.get("video") if isinstance(receipt, dict) else None
    return _seconds(video.get("duration_s")) if isinstance(video, dict) else 0.0


def _seconds(value: object) -> float:
    """A time that a film can have; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e9 and math.isfinite(value) else 0.0  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    """Whether it is a text that can be kept: no lone surrogate, which is no UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
