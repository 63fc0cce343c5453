"""A film's line of output: its segments, each with the answers to all prompts, and the summary, as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slipstream.archive.film_results import SegmentResult, segments_of, summary_of
from slipstream.archive.messages import JobPart
from slipstream.archive.quality import Norms, marks_of
from slipstream.archive.subtitles import Cue, segment_cue
from slipstream.cli.views import caption_dict
from slipstream.messages import Caption


def film_fields(parts: Sequence[JobPart], norms: Norms) -> dict[str, Any]:
    """What a film's line has beside what all lines have: `parts`, and `summary` where one was asked for."""
    summary = summary_of(parts)
    fields: dict[str, Any] = {"parts": [_segment_dict(result, norms) for result in segments_of(parts)]}
    return fields if summary is None else fields | {"summary": _answer_dict(summary, norms)}


def film_cues(parts: Sequence[JobPart]) -> list[Cue]:
    """A film as subtitles: of each segment all that was said of it."""
    return [
        segment_cue(result.segment.start_s, result.segment.end_s, " ".join(result.texts))
        for result in segments_of(parts)
        if result.texts
    ]


def spared_fields(caption: Caption) -> dict[str, Any]:
    """What is to see, where that is little, and why the text is not of the video's own frames; empty for most."""
    told = {"marks": list(caption.video.marks), "skipped": caption.skipped}
    shared = {} if caption.shared is None else {"shared": asdict(caption.shared)}
    return {name: content for name, content in told.items() if content} | shared


def _segment_dict(result: SegmentResult, norms: Norms) -> dict[str, Any]:
    segment, first = result.segment, result.answers[0]
    times = {"segment": segment.number, "start_s": segment.start_s, "end_s": segment.end_s}
    record = times | _answer_dict(first, norms)
    if len(result.answers) == 1:
        return record
    prompts = [answer.receipt.options.get("prompt", "") if answer.receipt else "" for answer in result.answers]
    answers = [
        {"prompt": prompt} | _answer_dict(answer, norms) for prompt, answer in zip(prompts, result.answers, strict=True)
    ]
    return record | {"answers": answers}


def _answer_dict(part: JobPart, norms: Norms) -> dict[str, Any]:
    if part.caption is None or part.receipt is None:
        return {"error": part.error}
    summary = caption_dict(part.caption)
    for stated_before in ("text", "request_id"):
        summary.pop(stated_before)
    said = {"text": part.caption.text} | spared_fields(part.caption)
    return said | {"receipt": part.receipt.as_record() | summary, "quality": list(marks_of(part.caption, norms))}
