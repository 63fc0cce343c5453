"""How a film in segments is shown: its segments as they come, each with its times; and written, as subtitles."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import typer

from slipstream.archive.subtitles import SEGMENTS_NOTE, Cue, segment_cue, srt_of, vtt_of
from slipstream.cli.archive.output import check_file, replacing
from slipstream.cli.common import video_at
from slipstream.cli.views import caption_dict, closing_line, complain, printable, spared_line
from slipstream.client.async_captioner import AsyncCaptioner
from slipstream.client.film_client import segment_captions
from slipstream.errors import InvalidConfig, InvalidRequest, SlipstreamError, with_notes
from slipstream.messages import FilmEvent, FilmFacts, SegmentCaption
from slipstream.options import CaptionOptions

EXTENSIONS = (".vtt", ".srt")


def check_subtitles(path: Path | None, options: CaptionOptions, num_videos: int) -> None:
    """Raises `InvalidConfig` for subtitles that cannot be written."""
    if path is None:
        return
    if path.suffix.lower() not in EXTENSIONS:
        raise InvalidConfig(f"--subtitles {str(path)!r}: the file's name must end in .vtt or .srt")
    if num_videos != 1:
        raise InvalidConfig(f"--subtitles is a file for one film: give {num_videos} films one by one")
    if not options.in_segments:
        raise InvalidConfig("--subtitles is for a film whose segments are captioned: give --segments too")
    check_file(path)


async def caption_film(
    captioner: AsyncCaptioner,
    video: str,
    options: CaptionOptions,
    timeout_s: float,
    as_json: bool,
    subtitles: Path | None,
) -> int:
    """Shows the captions of a film's segments; returns the exit status that this film asks for. What came before an
    error or an interruption is written all the same; where nothing came, a file that is there stays."""
    cues: list[Cue] = []
    exit_code, is_whole = 0, False
    try:
        events = _warned(video, captioner.film_events(video_at(video), options=options, timeout_s=timeout_s))
        async for part in segment_captions(events, options):
            if not part.segment.is_summary:
                cues.append(segment_cue(part.segment.start_s, part.segment.end_s, part.texts))
            typer.echo(json.dumps(segment_record(video, part)) if as_json else segment_line(part))
            if part.segment.error:
                complain(video, f"{_name(part)}: {part.segment.error}")
                exit_code = InvalidRequest.exit_code
        is_whole = True
    except SlipstreamError as error:
        if as_json:
            typer.echo(json.dumps({"file": video, "error": with_notes(error)}))
        complain(video, with_notes(error))
        exit_code = error.exit_code
    finally:
        if subtitles is not None and (cues or is_whole):
            _write_subtitles(subtitles, cues)
    return exit_code


def _write_subtitles(path: Path, cues: Sequence[Cue]) -> None:
    is_vtt = path.suffix.lower() == ".vtt"
    with replacing(path) as file:
        file.write(vtt_of(cues, SEGMENTS_NOTE) if is_vtt else srt_of(cues))


async def _warned(video: str, events: AsyncGenerator[FilmEvent, None]) -> AsyncGenerator[FilmEvent, None]:
    """The events; what is wrong with the film as a whole goes to stderr."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, FilmFacts):
                for warning in event.warnings:
                    complain(video, warning)
            yield event


def segment_record(video: str, part: SegmentCaption) -> dict[str, Any]:
    """A segment, or the summary, as a line of JSON."""
    segment = part.segment
    said = {"error": segment.error} if part.caption is None else caption_dict(part.caption)
    if segment.is_summary:
        return {"file": video, "summary": said}
    record: dict[str, Any] = {"file": video, "segment": segment.number, "start_s": segment.start_s}
    record |= {"end_s": segment.end_s} | said
    return record if len(part.captions) < 2 else record | {"texts": part.texts}


def segment_line(part: SegmentCaption) -> str:
    """A segment for people: its times, its texts and their figures."""
    segment = part.segment
    times = f"{clock_time(segment.start_s)} - {clock_time(segment.end_s)}"
    if part.caption is None:
        return f"{times}  ({printable(segment.error)})"
    name = f"{times} (all)" if segment.is_summary else times
    return "\n".join(
        f"{name}  {printable(caption.text)}\n[{spared_line(caption) or closing_line(caption)}]"
        for caption in part.captions
    )


def _name(part: SegmentCaption) -> str:
    return "the summary" if part.segment.is_summary else f"segment {part.segment.number}"


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds to the millisecond."""
    sign, total_ms = "-" if seconds < 0 else "", round(abs(seconds) * 1000)
    minutes, ms = divmod(total_ms, 60_000)
    return f"{sign}{minutes // 60:02}:{minutes % 60:02}:{ms // 1000:02}.{ms % 1000:03}"
