"""Manifests: JSON lines, CSV and Parquet that name videos and documents, and what differs for each.

Each is gone through row by row, so that memory does not grow with their number, on this machine or in a bucket.
"""

import csv
import io
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.archive.messages import DOCUMENT_OPTIONS, BatchItem
from slipstream.cli.archive.manifest_items import SIZE_KEY, Folder, Row, item_of
from slipstream.config import is_sendable
from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.options import OPTIONS_BY_NAME

LONGEST_LINE = 1024 * 1024
"""Bytes."""
MOST_LINES = 1000
"""That one row of CSV has."""
_LONGEST_CSV = LONGEST_LINE + len("\r\n")
ROWS_AT_ONCE = 1000
NAMED_ROWS = 10
"""Bad ones that a message names."""


@dataclass(frozen=True)
class Numbered:
    """One row, and what people call it."""

    name: str
    fields: Row | InvalidRequest
    """Or what is wrong with it; the next one is read all the same."""
    num_rows: int = 1
    """That it stands for, where several cannot be read."""


class BadRow(InvalidRequest):
    """A row that is no item, or some in a row."""

    def __init__(self, where: str, reason: str, num_rows: int = 1) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason, self.num_rows = where, reason, num_rows


def read_manifest(
    content: BinaryIO, name: str, folder: Folder, on_bad: Callable[[BadRow], None] | None = None
) -> Iterator[BatchItem]:
    """One item a row; the name's extension says what it is. Raises `BadRow`, unless `on_bad` is to hear of it."""
    for item in _judged(content, name, folder):
        if not isinstance(item, BadRow):
            yield item
        elif on_bad is None:
            raise item
        else:
            on_bad(item)


def check_manifest(content: BinaryIO, name: str, folder: Folder) -> None:
    """Goes through all of it. Raises `InvalidRequest` that names the first bad rows and says how many there are."""
    named: list[str] = []
    num_unnamed = 0
    for item in _judged(content, name, folder):
        if isinstance(item, BadRow):
            if len(named) < NAMED_ROWS:
                named.append(str(item))
            else:
                num_unnamed += item.num_rows
    if num_unnamed:
        named.append(f"and {num_unnamed:,} more rows of {name} are bad")
    if named:
        raise InvalidRequest("\n".join(named))


def _judged(content: BinaryIO, name: str, folder: Folder) -> Iterator[BatchItem | BadRow]:
    rows = READERS.get(Path(name).suffix.lower(), json_rows)
    for row in rows(content):
        try:
            if isinstance(row.fields, InvalidRequest):
                raise row.fields
            yield item_of(row.fields, folder)
        except InvalidRequest as error:
            yield BadRow(f"{name} {row.name}", str(error), row.num_rows)


def json_rows(lines: BinaryIO) -> Iterator[Numbered]:
    """Of JSON objects, one a line. Of a line that is too long no more is held than that length."""
    number = 0
    while line := lines.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            yield Numbered(f"line {number}", InvalidRequest(f"longer than {LONGEST_LINE} bytes"))
            while line and not line.endswith(b"\n"):
                line = lines.readline(LONGEST_LINE + 1)
        elif line.strip():
            yield Numbered(f"line {number}", _fields_of(_json_object, line))


def csv_rows(content: BinaryIO) -> Iterator[Numbered]:
    """Of a table whose first line names the columns. An empty cell says nothing; numbers, truth values and lists are
    written as in JSON. What is behind a bad row is read from the line behind that row's first."""
    csv.field_size_limit(LONGEST_LINE)
    text = io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline="")
    try:
        lines = _Lines(text)
        rows = _rows_of(lines)
        names = _names_of(next(rows, []))
        if isinstance(names, InvalidRequest):
            yield Numbered(f"line {lines.number}", names)
            return
        read = partial(_cells, names)
        for cells in rows:
            fields = cells if isinstance(cells, InvalidRequest) else _fields_of(read, cells)
            yield Numbered(f"line {lines.number}", fields)
    finally:
        text.detach()


def _names_of(head: list[str] | InvalidRequest) -> list[str] | InvalidRequest:
    """Of the columns. Where a comma is the decimal point, office programs part them by semicolons."""
    if isinstance(head, InvalidRequest):
        return head
    if len(head) == 1:
        for mark in ";\t":
            if mark in head[0]:
                return InvalidRequest(f"the columns are parted by {mark!r}; part them by commas")
    return _named_twice(head) or head


def _named_twice(columns: Sequence[str]) -> InvalidRequest | None:
    """What is wrong where the cells of one column would be taken for those of another, as in joined tables."""
    named = Counter(columns)
    twice = next((name for name in named if name and named[name] > 1), None)
    return InvalidRequest(f"several columns are named {twice!r}; leave one of them") if twice else None


def _rows_of(lines: "_Lines") -> Iterator[list[str] | InvalidRequest]:
    """The cells of each row that has any, and what is wrong where there is no row."""
    table = csv.reader(lines)
    while True:
        lines.begin()
        try:
            cells = next(table)
            if not is_sendable("".join(cells)):
                raise InvalidRequest("its bytes are no text")
        except StopIteration:
            return
        except (csv.Error, InvalidRequest) as error:
            lines.give_back()
            yield InvalidRequest(f"no CSV in UTF-8: {error}")
        else:
            if cells:
                yield cells


class _Lines:
    """The lines of a table for a parser, which takes as many as a row has. Of a row that is none, all but the first are
    read again: the quote that it opened may be one too many. No more is held than two rows may have."""

    number = 1
    """Of the line with which the row begins."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self._row: list[str] = []
        self._num_chars = 0
        self._again: deque[str] = deque()

    def begin(self) -> None:
        """The next line is the first of a row."""
        self.number += len(self._row)
        self._row, self._num_chars = [], 0

    def give_back(self) -> None:
        """The next row begins behind the first line of this one."""
        self._again.extendleft(reversed(self._row[1:]))
        del self._row[1:]

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """Raises `InvalidRequest` where the row is too long, or has no end."""
        line = self._again.popleft() if self._again else self._read()
        if not line and self._row:
            raise InvalidRequest("a quote is opened and not closed")
        if not line:
            raise StopIteration
        self._row.append(line)
        self._num_chars += len(line)
        if self._num_chars > _LONGEST_CSV or len(self._row) > MOST_LINES:
            raise InvalidRequest(f"longer than {LONGEST_LINE} characters or {MOST_LINES} lines")
        return line

    def _read(self) -> str:
        """A line; of one that is too long a part."""
        line = piece = self._text.readline(_LONGEST_CSV + 1)
        while len(piece) > _LONGEST_CSV and not piece.endswith("\n"):
            piece = self._text.readline(_LONGEST_CSV + 1)
        return line


def parquet_rows(content: BinaryIO) -> Iterator[Numbered]:
    """Of a table with a column a key. Of a row group that cannot be read the others are. Raises
    `InvalidConfig` without the extra `parquet`."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InvalidConfig("Parquet needs pyarrow: pip install 'slipstream[parquet]'") from None
    number = end = 0
    try:
        table = ParquetFile(content)
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
    except (ArrowException, OSError) as error:
        yield _no_parquet("row 1", error)
        return
    if wrong := _named_twice(table.schema_arrow.names):
        yield Numbered("row 1", wrong)
        return
    for group, num_rows in enumerate(sizes):
        number, end = end, end + num_rows
        try:
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group]):
                for row in _rows_in(batch):
                    number += 1
                    yield Numbered(f"row {number}", row)
        except (ArrowException, OSError) as error:
            yield _no_parquet(f"rows {number + 1} to {end}", error, end - number)


def _rows_in(batch: Any) -> Iterator[Row | InvalidRequest]:
    """Of a batch of a table, one by one where a cell is none that Python has."""
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):
        for place in range(batch.num_rows):
            try:
                (row,) = batch.slice(place, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield InvalidRequest(f"a cell cannot be read: {_first_line(error)}")
            else:
                yield row
    else:
        yield from rows


def _no_parquet(name: str, error: Exception, num_rows: int = 1) -> Numbered:
    return Numbered(name, InvalidRequest(f"no Parquet that can be read: {_first_line(error)}"), num_rows)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


READERS: Mapping[str, Callable[[BinaryIO], Iterator[Numbered]]] = {
    ".jsonl": json_rows,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
}
"""By the extension of a manifest's name."""


def _fields_of(read: Callable[[Any], Row], row: Any) -> Row | InvalidRequest:
    try:
        return read(row)
    except InvalidRequest as error:
        return error


def _cells(names: Sequence[str], cells: Sequence[str]) -> Row:
    if len(cells) > len(names):
        raise InvalidRequest("more cells than the first line has names")
    return {name: _cell(name, cell) for name, cell in zip(names, cells, strict=False) if cell}


def _cell(name: str, text: str) -> Any:
    option = OPTIONS_BY_NAME.get(name)
    is_list = option is not None and option.repeated
    kind = option.kind if option is not None else {SIZE_KEY: int, **DOCUMENT_OPTIONS}.get(name, str)
    if kind is str and not is_list:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        what = "a list as in JSON" if is_list else "a number, true or false"
        raise InvalidRequest(f"{name} is {text[:40]!r}, which is not {what}") from None


def _named_once(pairs: list[tuple[str, Any]]) -> Row:
    """An object of JSON. Of a key that is given twice either could be meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise InvalidRequest(f"{twice[:40]!r} is given twice; leave one of them")
    return fields


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_named_once)
    except (ValueError, RecursionError):
        raise InvalidRequest("not a JSON object in UTF-8") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("not a JSON object in UTF-8")
    return fields
