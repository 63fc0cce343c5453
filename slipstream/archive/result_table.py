"""Finished jobs as a table: Parquet with zstd, for DuckDB, pandas and their like. It goes with the lines of the same
jobs, and says so by their digest; what is read back is the lines."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.archive.messages import JobKind, JobPart
from slipstream.archive.queue import JobRecord
from slipstream.archive.records import OtherVersion, part_of, read_bytes, read_job
from slipstream.archive.result_files import FinishedJob
from slipstream.rpc.archive_codec import receipt_facts, result_facts

DIGEST_KEY = b"slipstream.lines_sha256"
SHORT = ("custom_id", "source", "state", "text", "error")
"""What of a row stands ahead of a line of JSON."""
_TEXTS = ("custom_id", "source", "state", "kind", "text", "error", "error_code", "job_id")
_MADE_BY = ("method", "target_model", "target_revision", "video_sha256", "text_sha256", "slipstream_version")
_NUMBERS = ("position", "num_tokens", "num_frames", "attempts", "epoch")
_TIMES = ("duration_s", "created_s", "started_s", "ended_s")
_OF_RECORD = ("custom_id", "job_id", "error_code", "attempts", "epoch", "created_s", "started_s", "ended_s")
_PART_TIMES = ("start_s", "end_s")


def row_of(finished: FinishedJob) -> dict[str, Any]:
    """The facts of a job that fit columns. The text of a document or film is that of its parts."""
    record, parts = finished.record, [_part_row(part) for part in map(part_of, finished.parts)]
    row: dict[str, Any] = {name: getattr(record, name) for name in _OF_RECORD}
    row |= {"state": str(record.state), "position": finished.position, "parts": parts}
    row |= {"text": "\n\n".join(part["text"] for part in parts if part["text"]) or None}
    facts = _facts_of(record)
    return row | facts | {"kind": str(facts["kind"])}


def _facts_of(record: JobRecord) -> dict[str, Any]:
    """Of what was asked, and of what came of it. `job_of` reads the same with all the rest: four times the work."""
    facts: dict[str, Any] = {"source": "", "kind": JobKind.VIDEO, "error": record.error}
    try:
        payload = read_job(record.payload)
        facts |= {"source": payload.source, "kind": payload.kind}
        if record.result and payload.kind.has_parts:
            facts |= read_bytes(record.result, receipt_facts, "receipt")
        elif record.result:
            facts |= read_bytes(record.result, result_facts, "summary", "receipt")
    except OtherVersion as error:
        facts["error"] = record.error or str(error)
    return facts


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
