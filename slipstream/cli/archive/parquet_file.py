"""Results as a Parquet file. Groups of rows are written while jobs come, so memory does not grow with their number."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO

from slipstream.archive.messages import Job, JobPart
from slipstream.archive.parquet_rows import ResultRow, rows_of, schema
from slipstream.errors import InvalidConfig

ROWS_A_GROUP = 4096
GROUP_BYTES = 16 * 1024**2
"""Of texts: a group is written when it has so many, or so many rows."""


def check_parquet() -> None:
    """Raises `InvalidConfig` where nothing here can write Parquet."""
    try:
        schema()
    except ImportError:
        raise InvalidConfig("--format parquet needs the extra `parquet`: pip install 'slipstream[parquet]'") from None


@contextmanager
def parquet_writer(file: IO[bytes]) -> Iterator[Callable[[Job, Sequence[JobPart]], None]]:
    """The function that takes the jobs; the file is whole when the context is left without an error."""
    import pyarrow
    from pyarrow import parquet

    columns = schema()
    rows: list[ResultRow] = []
    num_bytes = 0
    with parquet.ParquetWriter(file, columns, compression="zstd") as writer:

        def flush() -> None:
            nonlocal num_bytes
            writer.write_table(pyarrow.Table.from_pylist([asdict(row) for row in rows], columns))
            rows.clear()
            num_bytes = 0

        def write(job: Job, parts: Sequence[JobPart]) -> None:
            nonlocal num_bytes
            for row in rows_of(job, parts):
                rows.append(row)
                num_bytes += len(row.text or "") + len(row.options or "")
                if len(rows) >= ROWS_A_GROUP or num_bytes >= GROUP_BYTES:
                    flush()

        yield write
        if rows:
            flush()
