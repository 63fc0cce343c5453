"""Where results go: a file of JSON lines or a table, stdout, or a folder of subtitles. Knows no service.

Files appear whole or not at all.
"""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from slipstream.cli.archive.records import COLUMNS, job_record, job_row
from slipstream.cli.archive.subtitles import safe_name, to_srt, to_vtt
from slipstream.errors import InvalidConfig
from slipstream.rpc.v1.archive_pb2 import Job

STDOUT = "-"

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


def open_writer(output: str, form: Format) -> AbstractContextManager[Write]:
    """The function that takes the jobs. What it writes is in place when the context is left without an error."""
    if form.is_subtitles:
        return _subtitle_folder(Path(output), form)
    if output == STDOUT:
        return _stdout(form)
    return _whole_file(Path(output), form)


def open_errors(output: str) -> AbstractContextManager[Write]:
    """The same for the jobs without a result: `<output>.errors.jsonl`, which exists only if there are any."""
    path = Path(output)
    return _whole_file(path.with_name(f"{path.name}.errors.jsonl"), Format.JSONL, keep_empty=False)


@contextmanager
def _stdout(form: Format) -> Iterator[Write]:
    yield _line_writer(sys.stdout, form)
    sys.stdout.flush()


@contextmanager
def _whole_file(path: Path, form: Format, keep_empty: bool = True) -> Iterator[Write]:
    with replacing(path, keep_empty) as file:
        yield _line_writer(file, form)


@contextmanager
def _subtitle_folder(folder: Path, form: Format) -> Iterator[Write]:
    base = folder.resolve()
    extension = f".{form}"

    def write(job: Job) -> None:
        video = job.summary.video
        if form is Format.VTT:
            content = to_vtt(job.summary.text, video.duration_s, video.num_frames)
        else:
            content = to_srt(job.summary.text, video.duration_s)
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


def _line_writer(file: TextIO, form: Format) -> Write:
    if form is Format.JSONL:
        return lambda job: print(json.dumps(job_record(job), ensure_ascii=False), file=file)
    table = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    return lambda job: table.writerow(job_row(job))


@contextmanager
def _named_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidConfig(f"cannot write {path}: {error.strerror or error}") from error
