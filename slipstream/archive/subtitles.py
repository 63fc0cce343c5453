"""Captions as WebVTT or SRT, and names of files that stay where they belong. Pure: no files, no service.

A caption is one text over frames of the whole video; no model said when each sentence happens. The sentences share the
video's duration in proportion to their length, so the times are approximate, and a WebVTT file says so. A segment of a
film has times of its own, which are those of the file's timestamps.
"""

import hashlib
import html
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MS_PER_S = 1000
LONGEST_NAME = 120
"""Bytes of one part of a file name, before its digest and extension."""
MOST_FOLDERS = 16
SAFE_CHARS = frozenset(" -_.()[]+,=@&#%!'")
DIGEST_CHARS = 12

_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"'”’)\]]*(?:\s+|(?<=[。！？]))|\n+")
_ARROW = "-->"


@dataclass(frozen=True)
class Cue:
    """What is shown from `start_ms` to `end_ms`, which is later: lines, none of them empty."""

    start_ms: int
    end_ms: int
    text: str


def split_sentences(text: str) -> list[str]:
    """The text in pieces that end where sentences or lines do; whitespace inside is collapsed."""
    pieces, start = [], 0
    for match in _SENTENCE_END.finditer(text):
        pieces.append(text[start : match.end()])
        start = match.end()
    pieces.append(text[start:])
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


def make_cues(text: str, duration_s: float) -> list[Cue]:
    """The sentences, one after the other without gaps from 0 to the end of the video, at least 1 ms each."""
    sentences = split_sentences(text)
    spare_ms = max(round(duration_s * MS_PER_S), len(sentences)) - len(sentences)
    whole = sum(len(sentence) for sentence in sentences)
    cues, start_ms, length = [], 0, 0
    for number, sentence in enumerate(sentences, start=1):
        length += len(sentence)
        end_ms = number + spare_ms * length // whole
        cues.append(Cue(start_ms, end_ms, sentence))
        start_ms = end_ms
    return cues


def to_vtt(text: str, duration_s: float, num_frames: int) -> str:
    """A WebVTT file with a note on what its times are."""
    note = (
        f"NOTE One caption of {num_frames} frames of the video, split into sentences. Their times are approximate:\n"
        "they share out the duration by length of text and were not found by a model."
    )
    return vtt_of(make_cues(text, duration_s), note)


def to_srt(text: str, duration_s: float) -> str:
    """A SubRip file. The format has no place for a note."""
    return srt_of(make_cues(text, duration_s))


SEGMENTS_NOTE = "NOTE Each cue is the caption of a segment of the film, from its first frame's timestamp in the file."


def segment_cue(start_s: float, end_s: float, texts: Sequence[str]) -> Cue:
    """One cue for a segment, a line for each of its texts, at its times; those before 0, which a file may have, are 0,
    and none is empty."""
    start_ms = max(round(start_s * MS_PER_S), 0)
    words = ((_visible(word) for word in text.split()) for text in texts)  # a tab is a control character, too
    lines = filter(None, (" ".join(filter(None, of_one)) for of_one in words))
    return Cue(start_ms, max(round(end_s * MS_PER_S), start_ms + 1), "\n".join(lines))


def vtt_of(cues: Sequence[Cue], note: str) -> str:
    """A WebVTT file of these cues, without those that say nothing."""
    lines = [
        f"{_time(cue.start_ms, '.')} {_ARROW} {_time(cue.end_ms, '.')}\n{html.escape(_visible(cue.text), quote=False)}"
        for cue in cues
        if cue.text
    ]
    return "\n\n".join(["WEBVTT", note, *lines]) + "\n"


def srt_of(cues: Sequence[Cue]) -> str:
    """A SubRip file of these cues, without those that say nothing."""
    lines = [
        f"{number}\n{_time(cue.start_ms, ',')} {_ARROW} {_time(cue.end_ms, ',')}\n"
        + _visible(cue.text).replace(_ARROW, "->")
        for number, cue in enumerate((cue for cue in cues if cue.text), start=1)
    ]
    return "\n\n".join(lines) + "\n" if lines else ""


def safe_name(custom_id: str, extension: str) -> str:
    """A relative path for this item's file that stays below its folder; no two custom ids share one.

    Folders in the custom id stay folders. Whatever a file system could take amiss is replaced, and then the name ends
    in a digest of the custom id.
    """
    parts = custom_id.split("/")
    safe = [_safe_part(part, extension, is_last=number == len(parts)) for number, part in enumerate(parts, start=1)]
    if safe != parts or not all(parts) or len(parts) > MOST_FOLDERS:
        digest = hashlib.sha256(custom_id.encode()).hexdigest()[:DIGEST_CHARS]
        folders = [part for part in safe[:-1] if part][:MOST_FOLDERS]
        safe = [*folders, f"{safe[-1]}~{digest}"]
    return "/".join(safe) + extension


def _safe_part(part: str, extension: str, is_last: bool) -> str:
    kept = "".join(char if char.isalnum() or char in SAFE_CHARS else "_" for char in part)
    kept = kept.lstrip(". ").rstrip(". ").encode()[:LONGEST_NAME].decode(errors="ignore")
    # A folder must not have the name that another item's file could have.
    return kept if is_last or not kept.lower().endswith(extension) else f"{kept}_"


def _visible(text: str) -> str:
    return "".join(char for char in text if char == "\n" or unicodedata.category(char) != "Cc")


def _time(total_ms: int, mark: str) -> str:
    seconds, ms = divmod(total_ms, MS_PER_S)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{mark}{ms:03}"
