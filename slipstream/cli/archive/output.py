"""Where results go: a file of JSON lines or a table, stdout, or a folder of subtitles.

Files appear whole or not at all.
"""

import csv
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from slipstream.cli.archive.batch_view import message_dict
from slipstream.cli.archive.subtitles import safe_name, to_srt, to_vtt
from slipstream.cli.views import caption_dict
from slipstream.client.archive_client import ArchiveClient
from slipstream.errors import InvalidConfig
from slipstream.rpc.gateway_codec import read_summary
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1.archive_pb2 import Job

# -- records ----------------------------------------------------------------------------------------------------------

# A job of the archive as a line of output: its text and its receipt, for JSON and for a table.

STATES = {
    "queued": pb.JOB_STATE_QUEUED,
    "running": pb.JOB_STATE_RUNNING,
    "done": pb.JOB_STATE_DONE,
    "failed": pb.JOB_STATE_FAILED,
    "dead": pb.JOB_STATE_DEAD,
    "cancelled": pb.JOB_STATE_CANCELLED,
}
"""The contract's number of every state, by the name that users know it by."""
NAMES = {number: name for name, number in STATES.items()}

COLUMNS = (
    *("custom_id", "source", "state", "text", "error", "error_code", "num_tokens", "finish_reason"),
    *("prompt", "method", "num_frames", "seed", "duration_s"),
    *("target_model", "target_revision", "draft_model", "draft_revision"),
    *("kept_tokens", "kept_digest", "judged", "accepted", "first_token_s", "generate_s", "total_s", "tokens_per_s"),
    *("attempts", "reused", "video_sha256", "text_sha256", "slipstream_version", "job_id"),
)


def job_record(job: pb.Job) -> dict[str, Any]:
    """The line of JSON: `receipt` holds what the caption was made of and by, and is absent without a result."""
    record: dict[str, Any] = {
        "custom_id": job.custom_id,
        "source": job.source,
        "state": NAMES.get(job.state, "unspecified"),
        "text": job.summary.text if job.HasField("summary") else None,
        "error": job.error or None,
        "error_code": job.error_code or None,
        "job_id": job.job_id,
        "attempts": job.attempts,
        "crashes": job.crashes,
    }
    if job.HasField("receipt") or job.HasField("summary"):
        record["receipt"] = _receipt(job)
    return record


def _receipt(job: pb.Job) -> dict[str, Any]:
    summary = caption_dict(read_summary(job.summary))
    for stated_before in ("text", "request_id"):
        summary.pop(stated_before)
    run = {"worker": job.worker, "created_s": job.created_s, "started_s": job.started_s, "ended_s": job.ended_s}
    return message_dict(job.receipt) | summary | run


def job_row(job: pb.Job) -> dict[str, Any]:
    """The row of the table: the same facts where they fit a cell, under `COLUMNS`."""
    record = job_record(job)
    receipt, summary = job.receipt, job.summary
    return {
        **record,
        **record.get("receipt", {}),
        **message_dict(summary.timings),
        "prompt": receipt.options.prompt,
        "method": summary.method,
        "seed": receipt.options.seed,
        "num_frames": summary.video.num_frames,
        "duration_s": summary.video.duration_s,
        "target_model": receipt.target.model_id,
        "target_revision": receipt.target.revision,
        "draft_model": receipt.draft.model_id,
        "draft_revision": receipt.draft.revision,
        "kept_tokens": summary.speculation.kept_tokens,
        "kept_digest": summary.speculation.kept_digest,
        "judged": summary.speculation.judged,
        "accepted": summary.speculation.accepted,
        "tokens_per_s": round(read_summary(summary).decoding_rate, 3),
    }


# -- writers ----------------------------------------------------------------------------------------------------------

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


# -- export -----------------------------------------------------------------------------------------------------------

# Fetches a batch's jobs and writes them out: results to the output, the others to a file beside it.

WITHOUT_RESULT = frozenset(STATES[name] for name in ("failed", "dead", "cancelled"))


@dataclass(frozen=True)
class Output:
    """Where results go and which."""

    path: str
    """A file, a folder for subtitles, or "-"."""
    form: Format
    states: Collection[pb.JobState] = ()
    """Jobs in these states, all to `path`. None: done ones to `path`, failed ones to `<path>.errors.jsonl`."""


async def export(client: ArchiveClient, batch: str, output: Output) -> Counter[str]:
    """Writes every job there is now; how many of each state. The same jobs give the same files, however often."""
    counts: Counter[str] = Counter()
    wanted = frozenset(output.states) or {pb.JOB_STATE_DONE}
    asked = sorted(output.states) or [pb.JOB_STATE_DONE, *sorted(WITHOUT_RESULT)]
    with ExitStack() as files:
        write = files.enter_context(open_writer(output.path, output.form))
        write_error = None
        if not output.states and output.path != STDOUT:
            write_error = files.enter_context(open_errors(output.path))
        async with aclosing(client.jobs(batch, asked)) as jobs:
            async for job in jobs:
                counts[NAMES.get(job.state, "unspecified")] += 1
                if job.state not in wanted:
                    if write_error is not None:
                        write_error(job)
                elif job.HasField("summary") or not output.form.is_subtitles:
                    write(job)
    return counts
