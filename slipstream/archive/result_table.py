"""Finished jobs as a table: Parquet with zstd, for DuckDB, pandas and their like. It goes with the lines of the same
jobs, and says so by their digest; what is read back is the lines."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.archive.messages import Job, JobPart
from slipstream.archive.records import job_of, part_of
from slipstream.archive.result_files import FinishedJob

DIGEST_KEY = b"slipstream.lines_sha256"
SHORT = ("custom_id", "source", "state", "text", "error")
"""What of a row stands ahead of a line of JSON."""
_TEXTS = ("custom_id", "source", "state", "kind", "text", "error", "error_code", "job_id")
_MADE_BY = ("method", "target_model", "target_revision", "video_sha256", "text_sha256", "slipstream_version")
_NUMBERS = ("position", "num_tokens", "num_frames", "attempts", "epoch")
_TIMES = ("duration_s", "created_s", "started_s", "ended_s")
_PART_TIMES = ("start_s", "end_s")


def row_of(finished: FinishedJob) -> dict[str, Any]:
    """The facts of a job that fit columns. The text of a document or film is that of its parts."""
    job = job_of(finished.record)
    parts = [_part_row(part) for part in map(part_of, finished.parts)]
    whole = "\n\n".join(part["text"] for part in parts if part["text"])
    row: dict[str, Any] = {
        name: getattr(job, name) for name in ("custom_id", "source", "error", "error_code", "job_id")
    }
    row |= {"state": str(job.state), "kind": str(job.kind), "position": finished.position, "parts": parts}
    row |= {"attempts": job.attempts, "epoch": finished.record.epoch}
    row |= {name: getattr(job, name) for name in ("created_s", "started_s", "ended_s")}
    return row | {"text": job.caption.text if job.caption else whole or None} | _made_by(job)


def _made_by(job: Job) -> dict[str, Any]:
    caption, receipt = job.caption, job.receipt
    return {
        "num_tokens": caption.num_tokens if caption else None,
        "num_frames": caption.video.num_frames if caption else None,
        "duration_s": caption.video.duration_s if caption else None,
        "method": str(caption.options.get("method", "")) if caption else None,
        "target_model": receipt.target.model_id if receipt else None,
        "target_revision": receipt.target.revision if receipt else None,
        "video_sha256": receipt.video_sha256 if receipt else None,
        "text_sha256": receipt.text_sha256 if receipt else None,
        "slipstream_version": receipt.slipstream_version if receipt else None,
    }


def _part_row(part: JobPart) -> dict[str, Any]:
    segment = part.segment
    times = {name: getattr(segment, name) if segment else None for name in _PART_TIMES}
    text = part.caption.text if part.caption else None
    return {"number": part.number, "page": part.page or None, "text": text, "error": part.error or None} | times


def has_tables() -> bool:
    """Whether Parquet can be written here (the extra `parquet`)."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


class ResultTableWriter:
    """The rows of one file, a group at a time."""

    def __init__(self) -> None:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        part = {"number": arrow.int64(), "page": arrow.int64(), "text": arrow.string(), "error": arrow.string()}
        part |= dict.fromkeys(_PART_TIMES, arrow.float64())
        columns: dict[str, Any] = dict.fromkeys((*_TEXTS, *_MADE_BY), arrow.string())
        columns |= dict.fromkeys(_NUMBERS, arrow.int64()) | dict.fromkeys(_TIMES, arrow.float64())
        columns["parts"] = arrow.list_(arrow.struct(list(part.items())))
        self._arrow: Any = arrow
        self._schema = arrow.schema(list(columns.items()))
        self._file = io.BytesIO()
        self._writer: Any = parquet.ParquetWriter(self._file, self._schema, compression="zstd")

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """More of them, as a row group."""
        self._writer.write_table(self._arrow.Table.from_pylist(list(rows), schema=self._schema))

    def finish(self, digest: str) -> bytes:
        """The file, which says the digest of the lines that it goes with."""
        self._writer.add_key_value_metadata({DIGEST_KEY.decode(): digest})
        self._writer.close()
        return self._file.getvalue()


def digest_of(data: bytes) -> str:
    """Which lines a table goes with; "" for what is no table of ours."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        metadata = parquet.read_metadata(arrow.BufferReader(data)).metadata or {}
    except (arrow.ArrowException, OSError, ValueError):
        return ""
    return str(metadata.get(DIGEST_KEY, b"").decode(errors="replace"))
