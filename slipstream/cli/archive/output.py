"""Where results go: a file of JSON lines or a table, stdout, or a folder of subtitles or Markdown.

Files appear whole or not at all. Who names videos, and what a video shows, must not reach further than the text of a
cell: a table holds no formula and nothing steers a terminal.
"""

import csv
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any, TextIO

from slipstream.archive.film_results import segments_of
from slipstream.archive.messages import Job, JobKind, JobPart
from slipstream.archive.quality import UNKNOWN_BATCH, BatchNorms
from slipstream.archive.queue import JobState
from slipstream.archive.subtitles import (
    SEGMENTS_NOTE,
    Cue,
    safe_name,
    segment_cue,
    srt_of,
    to_srt,
    to_vtt,
    vtt_of,
)
from slipstream.cli.archive.job_lines import COLUMNS, NO_CAPTION, job_record, job_row
from slipstream.cli.archive.parquet_file import check_parquet, parquet_writer
from slipstream.client.archive_client import ArchiveClient
from slipstream.documents.output import markdown_page
from slipstream.errors import InvalidConfig
from slipstream.objects.blocking import blocking_store, place_of, real_path, writing, writing_bytes
from slipstream.objects.store import ObjectUrl, is_object_url

STDOUT = "-"
BLOCK_BYTES = 4096
"""Of a file that is written here, at once."""
NAMED_BYTES = 200
"""Of a file's name in that of the one that is written first: file systems take names of 255."""
FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")
"""A spreadsheet takes a cell that begins so for a formula; some also take the wide forms."""
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and marks that turn the direction of what follows."""

Write = Callable[[Job, Sequence[JobPart]], None]
"""Takes a job and those of its parts that there are."""


class Format(StrEnum):
    """How results are written."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    VTT = "vtt"
    SRT = "srt"
    MD = "md"

    @property
    def is_folder(self) -> bool:
        """One file a job, in a folder: subtitles of videos and films, Markdown of documents."""
        return self in (Format.VTT, Format.SRT, Format.MD)

    def takes(self, job: Job) -> bool:
        """Whether such a file can be made of the job."""
        if self is Format.MD:
            return job.kind is JobKind.DOCUMENT and job.parts_done > 0
        has_text = job.caption is not None or (job.kind is JobKind.FILM and job.parts_done > 0)
        return not self.is_folder or has_text


def choose_format(wanted: Format | None, output: str) -> Format:
    """The wanted format, or what the output's extension says; JSON lines else."""
    if wanted is None:
        wanted = next((form for form in Format if output.lower().endswith(f".{form}")), Format.JSONL)
        if wanted.is_folder:
            raise InvalidConfig(f"{output}: {wanted} is a file for each job: give --format {wanted} and a folder")
    if wanted.is_folder and output == STDOUT:
        raise InvalidConfig(f"{wanted} is a file for each job: --output must name a folder")
    if wanted is Format.PARQUET and output == STDOUT:
        raise InvalidConfig("parquet is no text: --output must name a file")
    return wanted


def check_output(output: str, form: Format) -> None:
    """Raises what can be known to be wrong with the output before there is a result."""
    path = Path(output)
    if form is Format.PARQUET:
        check_parquet()
    if output == STDOUT:
        return
    if is_object_url(output):
        _check_object(output, form)
    elif not form.is_folder:
        check_file(path)
    elif path.exists() and not path.is_dir():
        raise InvalidConfig(f"cannot write {form} files into {output}: it is no folder")
    elif not _takes_files(path if path.exists() else real_path(path).parent):
        raise InvalidConfig(f"cannot write {form} files into {output}: its folder takes none")


def check_file(path: Path) -> None:
    """The same of one file on this machine."""
    if path.exists() and not path.is_file():
        raise InvalidConfig(f"cannot write {path}: it is no regular file")
    if not real_path(path).parent.is_dir():
        raise InvalidConfig(f"cannot write {path}: its folder does not exist")
    if not _takes_files(real_path(path).parent):
        raise InvalidConfig(f"cannot write {path}: its folder takes no files")


def _takes_files(folder: Path) -> bool:
    """False where that is known, as on a disk that is only read; of a folder that is yet to be made nothing is."""
    return not folder.is_dir() or os.access(folder, os.W_OK | os.X_OK)


def check_unread(output: str, form: Format, sources: Iterable[str]) -> None:
    """Raises `InvalidConfig` where results or errors would take the place of a file or an object that is read."""
    if output == STDOUT:
        return
    written = [_errors_of(output)] if form.is_folder else [output, _errors_of(output)]
    places = {place_of(path): path for path in written}
    for source in sources:
        if (path := places.get(place_of(source))) is not None:
            raise InvalidConfig(f"cannot write {path}: it would take the place of {source}, which is read")


def _check_object(output: str, form: Format) -> None:
    url = ObjectUrl.parse(output)
    blocking_store(url.root)
    if not form.is_folder and (not url.key or url.key.endswith("/")):
        raise InvalidConfig(f"cannot write {output}: it names a folder; give the object's whole name")


def open_writer(output: "Output") -> AbstractContextManager[Write]:
    """The function that takes the jobs. What it writes is in place when the context is left without an error."""
    if output.form.is_folder and is_object_url(output.path):
        return _object_folder(ObjectUrl.parse(output.path), output.form)
    if output.form.is_folder:
        return _folder(Path(output.path), output.form)
    if output.path == STDOUT:
        return _stdout(output)
    if output.form is Format.PARQUET:
        return _parquet(output.path)
    return _whole_file(output)


def open_errors(output: str) -> AbstractContextManager[Write]:
    """The same for the jobs without a result: `<output>.errors.jsonl`, which exists only if there are any."""
    return _whole_file(Output(_errors_of(output), Format.JSONL), keep_empty=False)


def _errors_of(output: str) -> str:
    base = output.rstrip("/") if is_object_url(output) else str(Path(output))
    return f"{base}.errors.jsonl"


@contextmanager
def _stdout(output: "Output") -> Iterator[Write]:
    yield _line_writer(sys.stdout, output)
    sys.stdout.flush()


@contextmanager
def _whole_file(output: "Output", keep_empty: bool = True) -> Iterator[Write]:
    in_store = is_object_url(output.path)
    place = writing(ObjectUrl.parse(output.path), keep_empty) if in_store else replacing(Path(output.path), keep_empty)
    with place as file:
        yield _line_writer(file, output)


@contextmanager
def _parquet(output: str) -> Iterator[Write]:
    place = writing_bytes(ObjectUrl.parse(output)) if is_object_url(output) else replacing_bytes(Path(output))
    with place as file, parquet_writer(file) as write:
        yield write


@contextmanager
def _object_folder(folder: ObjectUrl, form: Format) -> Iterator[Write]:
    def write(job: Job, parts: Sequence[JobPart]) -> None:
        with writing(folder.below(safe_name(job.custom_id, f".{form}"))) as file:
            file.write(_file_content(job, parts, form))

    yield write


@contextmanager
def _folder(folder: Path, form: Format) -> Iterator[Write]:
    base = real_path(folder)
    extension = f".{form}"

    def write(job: Job, parts: Sequence[JobPart]) -> None:
        content = _file_content(job, parts, form)
        path = base / safe_name(job.custom_id, extension)
        with _named_failure(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not real_path(path.parent).is_relative_to(base):
            raise InvalidConfig(f"cannot write {path}: a link leads out of {folder}")
        with replacing(path) as file:
            file.write(content)

    with _named_failure(base):
        base.mkdir(parents=True, exist_ok=True)
    yield write


def _film_cues(parts: Sequence[JobPart]) -> list[Cue]:
    """A film as subtitles: of each segment all that was said of it."""
    return [
        segment_cue(result.segment.start_s, result.segment.end_s, result.texts)
        for result in segments_of(parts)
        if result.texts
    ]


def _file_content(job: Job, parts: Sequence[JobPart], form: Format) -> str:
    caption = job.caption or NO_CAPTION
    if form is Format.MD:
        read = ((part.page, part.caption) for part in parts if part.caption)
        return "".join(markdown_page(page, caption.text, caption.lossy_facts) for page, caption in read)
    if job.kind is JobKind.FILM:
        cues = _film_cues(parts)
        return vtt_of(cues, SEGMENTS_NOTE) if form is Format.VTT else srt_of(cues)
    if form is Format.VTT:
        return to_vtt(caption.text, caption.video.duration_s, caption.video.num_frames)
    return to_srt(caption.text, caption.video.duration_s)


@contextmanager
def replacing(path: Path, keep_empty: bool = True) -> Iterator[TextIO]:
    """A file that takes the place of `path` when the context is left without an error; until then nothing changes.

    Not `keep_empty`: a file without content is none, and an older one goes.
    """
    with replacing_bytes(path, keep_empty) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        try:
            yield text
        finally:
            text.detach()


@contextmanager
def replacing_bytes(path: Path, keep_empty: bool = True) -> Iterator[IO[bytes]]:
    """The same of a file that is no text."""
    final = real_path(path)
    name_end = os.fsdecode(os.fsencode(final.name)[-NAMED_BYTES:])  # its end: results and errors begin alike
    part = final.with_name(f".{name_end}.{os.getpid()}.part")
    with _named_failure(path):
        try:
            with io.BufferedWriter(_NamedFile(part, path), BLOCK_BYTES) as file:
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
    norms = output.norms
    if output.form is Format.JSONL:
        return lambda job, parts: print(_json_line(job_record(job, parts, norms)), file=file)
    how = csv.unix_dialect()  # its lines end in "\n"
    how.quoting = csv.QUOTE_NONNUMERIC  # else another separator splits a cell, and a lone "\r" its row
    table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", dialect=how)
    table.writeheader()
    shown = (lambda cell: cell) if output.csv_raw else plain_cell
    return lambda job, parts: table.writerow({name: shown(cell) for name, cell in job_row(job, parts, norms).items()})


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


class _NamedFile(io.FileIO):
    """A file whose failures name `path`, wherever they are caught: several are written at once."""

    def __init__(self, file: Path, path: Path) -> None:
        super().__init__(file, "wb")
        self._path = path

    def write(self, data: Any, /) -> int:
        with _named_failure(self._path):
            return super().write(data)


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
    """Jobs in these states, all to `path`. Empty: done ones to `path`, failed ones to `<path>.errors.jsonl`."""
    csv_raw: bool = False
    """Cells of a table are written as they are, for programs that read them; a spreadsheet may run them."""
    norms: BatchNorms = UNKNOWN_BATCH
    """What is usual in the batch."""


LEFT_OUT = "left_out"
"""Counted beside the states."""


async def _parts_of(client: ArchiveClient, batch: str, job: Job) -> list[JobPart]:
    """All of one job, which are bounded."""
    return [part async for part in client.parts(batch, job)]


async def export(client: ArchiveClient, batch: str, output: Output) -> Counter[str]:
    """Writes every job there is now; how many of each state, and how many of those that were wanted are `LEFT_OUT`, as
    no such file can be made of them. The same jobs give the same files, however often."""
    counts: Counter[str] = Counter()
    wanted = frozenset(output.states) or {JobState.DONE}
    asked = frozenset(output.states) or {JobState.DONE, *WITHOUT_RESULT}
    if output.form.is_folder:
        await client.get(batch)  # a folder for a batch that there is not would stay empty
    else:
        output = replace(output, norms=await client.norms(batch))
    with ExitStack() as beside, open_writer(output) as write:  # results are in place before errors are
        write_error = None
        if not output.states and output.path != STDOUT:
            write_error = beside.enter_context(open_errors(output.path))
        async with aclosing(client.jobs(batch, asked)) as jobs:
            async for job in jobs:
                counts[job.state] += 1
                if job.state in wanted:
                    if output.form.takes(job):
                        write(job, await _parts_of(client, batch, job))
                    else:
                        counts[LEFT_OUT] += 1
                elif write_error is not None:
                    write_error(job, await _parts_of(client, batch, job))
    return counts


def notes(counts: Counter[str], output: Output) -> list[str]:
    """Of which jobs there is no such file, and which file says why jobs have no result."""
    lines = []
    if number := counts[LEFT_OUT]:
        kind = "documents" if output.form is Format.MD else "videos"
        lines.append(f"{number:,} left out: {output.form} is made of {kind} alone; jsonl, csv and parquet take all")
    if (number := sum(counts[state] for state in WITHOUT_RESULT)) and not output.states and output.path != STDOUT:
        lines.append(f"{number:,} without a result, and why: {_errors_of(output.path)}")
    return lines
