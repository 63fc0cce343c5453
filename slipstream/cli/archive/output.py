"""Where results go: a file of JSON lines or a table, stdout, or a folder of subtitles.

Files appear whole or not at all. Who names videos, and what a video shows, must not reach further than the text of a
cell: a table holds no formula and nothing steers a terminal.
"""

import csv
import hashlib
import html
import json
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from slipstream.archive.messages import Job, ModelReceipt, Receipt
from slipstream.archive.queue import JobState
from slipstream.cli.views import caption_dict
from slipstream.client.archive_client import ArchiveClient
from slipstream.errors import InvalidConfig
from slipstream.messages import Caption

# -- subtitles --------------------------------------------------------------------------------------------------------

# A caption as WebVTT or SRT. Pure: no files, no service.
#
# A caption is one text over frames of the whole video; no model said when each sentence happens. The sentences share
# the video's duration in proportion to their length, so the times are approximate, and a WebVTT file says so.

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
    """One sentence from `start_ms` to `end_ms`, which is later."""

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
    cues = [
        f"{_time(cue.start_ms, '.')} {_ARROW} {_time(cue.end_ms, '.')}\n{html.escape(_visible(cue.text), quote=False)}"
        for cue in make_cues(text, duration_s)
    ]
    return "\n\n".join(["WEBVTT", note, *cues]) + "\n"


def to_srt(text: str, duration_s: float) -> str:
    """A SubRip file. The format has no place for a note."""
    cues = [
        f"{number}\n{_time(cue.start_ms, ',')} {_ARROW} {_time(cue.end_ms, ',')}\n"
        + _visible(cue.text).replace(_ARROW, "->")
        for number, cue in enumerate(make_cues(text, duration_s), start=1)
    ]
    return "\n\n".join(cues) + "\n" if cues else ""


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
    return "".join(char for char in text if unicodedata.category(char) != "Cc")


def _time(total_ms: int, mark: str) -> str:
    seconds, ms = divmod(total_ms, MS_PER_S)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{mark}{ms:03}"


# -- records ----------------------------------------------------------------------------------------------------------

# A job of the archive as a line of output: its text and its receipt, for JSON and for a table.

COLUMNS = (
    *("custom_id", "source", "state", "text", "error", "error_code", "num_tokens", "finish_reason"),
    *("prompt", "method", "num_frames", "seed", "duration_s"),
    *("target_model", "target_revision", "draft_model", "draft_revision"),
    *("kept_tokens", "kept_digest", "judged", "accepted", "first_token_s", "generate_s", "total_s", "tokens_per_s"),
    *("attempts", "reused", "video_sha256", "text_sha256", "slipstream_version", "job_id"),
)

NO_CAPTION = Caption("", 0, None)
NO_MODEL = ModelReceipt("", "", "")


def job_record(job: Job) -> dict[str, Any]:
    """The line of JSON: `receipt` holds what the caption was made of and by, and is absent without a result."""
    record: dict[str, Any] = {
        "custom_id": job.custom_id,
        "source": job.source,
        "state": str(job.state),
        "text": None if job.caption is None else job.caption.text,
        "error": job.error or None,
        "error_code": job.error_code or None,
        "job_id": job.job_id,
        "attempts": job.attempts,
        "crashes": job.crashes,
    }
    if job.caption is not None and job.receipt is not None:
        record["receipt"] = _receipt_dict(job, job.caption, job.receipt)
    return record


def _receipt_dict(job: Job, caption: Caption, receipt: Receipt) -> dict[str, Any]:
    made_of = {name: content for name, content in asdict(receipt).items() if content is not None}
    made_of["options"] = {"stop": (), **receipt.options}
    summary = caption_dict(caption)
    for stated_before in ("text", "request_id"):
        summary.pop(stated_before)
    run = {"worker": job.worker, "created_s": job.created_s, "started_s": job.started_s, "ended_s": job.ended_s}
    return made_of | summary | run


def job_row(job: Job) -> dict[str, Any]:
    """The row of the table: the same facts where they fit a cell, under `COLUMNS`."""
    record = job_record(job)
    caption, receipt = job.caption or NO_CAPTION, job.receipt
    options = receipt.options if receipt else {}
    target, draft = (receipt.target, receipt.draft or NO_MODEL) if receipt else (NO_MODEL, NO_MODEL)
    return {
        **record,
        **record.get("receipt", {}),
        **asdict(caption.timings),
        "prompt": options.get("prompt", ""),
        "method": caption.options.get("method", ""),
        "seed": options.get("seed", 0),
        "num_frames": caption.video.num_frames,
        "duration_s": caption.video.duration_s,
        "target_model": target.model_id,
        "target_revision": target.revision,
        "draft_model": draft.model_id,
        "draft_revision": draft.revision,
        "kept_tokens": caption.speculation.kept_tokens,
        "kept_digest": caption.speculation.kept_digest,
        "judged": caption.speculation.judged,
        "accepted": caption.speculation.accepted,
        "tokens_per_s": round(caption.decoding_rate, 3),
    }


# -- writers ----------------------------------------------------------------------------------------------------------

STDOUT = "-"
FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")
"""A spreadsheet takes a cell that begins so for a formula; some also take the wide forms."""
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and marks that turn the direction of what follows."""

Write = Callable[[Job], None]


class Format(StrEnum):
    """How results are written."""

    JSONL = "jsonl"
    CSV = "csv"
    VTT = "vtt"
    SRT = "srt"

    @property
    def is_subtitles(self) -> bool:
        """One file a video, in a folder."""
        return self in (Format.VTT, Format.SRT)


def choose_format(wanted: Format | None, output: str) -> Format:
    """The wanted format, or what the output's extension says; JSON lines else."""
    if wanted is None:
        wanted = Format.CSV if output.lower().endswith(".csv") else Format.JSONL
    if wanted.is_subtitles and output == STDOUT:
        raise InvalidConfig(f"{wanted} is a file a video: --output must name a folder")
    return wanted


def check_output(output: str, form: Format) -> None:
    """Raises what can be known to be wrong with the output before there is a result."""
    path = Path(output)
    if output == STDOUT:
        return
    if form.is_subtitles:
        if path.exists() and not path.is_dir():
            raise InvalidConfig(f"cannot write {form} files into {output}: it is no folder")
    elif path.exists() and not path.is_file():
        raise InvalidConfig(f"cannot write {output}: it is no regular file")
    elif not path.resolve().parent.is_dir():
        raise InvalidConfig(f"cannot write {output}: its folder does not exist")


def open_writer(output: "Output") -> AbstractContextManager[Write]:
    """The function that takes the jobs. What it writes is in place when the context is left without an error."""
    if output.form.is_subtitles:
        return _subtitle_folder(Path(output.path), output.form)
    if output.path == STDOUT:
        return _stdout(output)
    return _whole_file(Path(output.path), output)


def open_errors(output: str) -> AbstractContextManager[Write]:
    """The same for the jobs without a result: `<output>.errors.jsonl`, which exists only if there are any."""
    path = Path(output)
    path = path.with_name(f"{path.name}.errors.jsonl")
    return _whole_file(path, Output(str(path), Format.JSONL), keep_empty=False)


@contextmanager
def _stdout(output: "Output") -> Iterator[Write]:
    yield _line_writer(sys.stdout, output)
    sys.stdout.flush()


@contextmanager
def _whole_file(path: Path, output: "Output", keep_empty: bool = True) -> Iterator[Write]:
    with replacing(path, keep_empty) as file:
        yield _line_writer(file, output)


@contextmanager
def _subtitle_folder(folder: Path, form: Format) -> Iterator[Write]:
    base = folder.resolve()
    extension = f".{form}"

    def write(job: Job) -> None:
        caption = job.caption or NO_CAPTION
        if form is Format.VTT:
            content = to_vtt(caption.text, caption.video.duration_s, caption.video.num_frames)
        else:
            content = to_srt(caption.text, caption.video.duration_s)
        path = base / safe_name(job.custom_id, extension)
        with _named_failure(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(base):
            raise InvalidConfig(f"cannot write {path}: a link leads out of {folder}")
        with replacing(path) as file:
            file.write(content)

    with _named_failure(base):
        base.mkdir(parents=True, exist_ok=True)
    yield write


@contextmanager
def replacing(path: Path, keep_empty: bool = True) -> Iterator[TextIO]:
    """A file that takes the place of `path` when the context is left without an error; until then nothing changes.

    Not `keep_empty`: a file without content is none, and an older one goes.
    """
    final = path.resolve()
    part = final.with_name(f".{final.name[:200]}.{os.getpid()}.part")
    with _named_failure(path):
        try:
            with part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                is_empty = file.tell() == 0
            if is_empty and not keep_empty:
                final.unlink(missing_ok=True)
            else:
                part.replace(final)
        finally:
            part.unlink(missing_ok=True)


def _line_writer(file: TextIO, output: "Output") -> Write:
    if output.form is Format.JSONL:
        return lambda job: print(_json_line(job_record(job)), file=file)
    how = csv.unix_dialect()  # its lines end in "\n"
    how.quoting = csv.QUOTE_MINIMAL if output.csv_raw else csv.QUOTE_NONNUMERIC  # else another separator splits a cell
    table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", dialect=how)
    table.writeheader()
    shown = (lambda cell: cell) if output.csv_raw else plain_cell
    return lambda job: table.writerow({name: shown(cell) for name, cell in job_row(job).items()})


def plain_cell(cell: Any) -> Any:
    """What a spreadsheet shows as it is: text that would be a formula gets an apostrophe before it, and characters that
    steer a terminal or turn the text around become a visible mark."""
    if not isinstance(cell, str):
        return cell
    prefix = "'" if cell.startswith(FORMULA_STARTS) else ""
    return prefix + _STEERING.sub("\N{REPLACEMENT CHARACTER}", cell)


def _json_line(record: dict[str, Any]) -> str:
    """JSON that a terminal can be shown: what would steer it is escaped, so nothing is lost."""
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(record, ensure_ascii=False))


@contextmanager
def _named_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror or error}") from error


# -- export -----------------------------------------------------------------------------------------------------------

# Fetches a batch's jobs and writes them out: results to the output, the others to a file beside it.

WITHOUT_RESULT = frozenset({JobState.FAILED, JobState.DEAD, JobState.CANCELLED})


@dataclass(frozen=True)
class Output:
    """Where results go and which."""

    path: str
    """A file, a folder for subtitles, or "-"."""
    form: Format
    states: Collection[JobState] = ()
    """Jobs in these states, all to `path`. None: done ones to `path`, failed ones to `<path>.errors.jsonl`."""
    csv_raw: bool = False
    """Cells of a table are written as they are, for programs that read them; a spreadsheet may run them."""


async def export(client: ArchiveClient, batch: str, output: Output) -> Counter[str]:
    """Writes every job there is now; how many of each state. The same jobs give the same files, however often."""
    counts: Counter[str] = Counter()
    wanted = frozenset(output.states) or {JobState.DONE}
    asked = frozenset(output.states) or {JobState.DONE, *WITHOUT_RESULT}
    with ExitStack() as files:
        write = files.enter_context(open_writer(output))
        write_error = None
        if not output.states and output.path != STDOUT:
            write_error = files.enter_context(open_errors(output.path))
        async with aclosing(client.jobs(batch, asked)) as jobs:
            async for job in jobs:
                counts[job.state] += 1
                if job.state not in wanted:
                    if write_error is not None:
                        write_error(job)
                elif job.caption is not None or not output.form.is_subtitles:
                    write(job)
    return counts
