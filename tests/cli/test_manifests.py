"""Manifests in their three forms: the same items, bad rows by their numbers, and memory that does not grow."""

import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive.messages import BatchItem
from slipstream.cli.archive.manifests import LONGEST_LINE, BadRow, check_manifest, read_manifest
from slipstream.errors import InvalidRequest
from slipstream.objects.store import ObjectUrl

FOLDER = Path("/videos")
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=12)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"source": st.from_regex(r"[a-z]{1,8}\.mp4", fullmatch=True)},
        optional={
            "prompt": TEXT,
            "num_frames": st.integers(1, 64),
            "temperature": st.floats(0, 2, width=16),
            "stop": st.lists(TEXT, min_size=1, max_size=3),
        },
    ),
    min_size=1,
    max_size=5,
)


def items(content: bytes, name: str, folder: Path | ObjectUrl = FOLDER) -> list[BatchItem]:
    check_manifest(io.BytesIO(content), name, folder)
    return list(read_manifest(io.BytesIO(content), name, folder))


def error(content: bytes, name: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        items(content, name)
    return str(refused.value)


def test_null_says_nothing_in_any_form() -> None:
    """As a table has it that was written with a column a key."""
    row = {"path": "a.mp4", "url": None, "sha256": None, "custom_id": None, "kind": None, "size": None, "prompt": None}
    (wanted,) = items(b'{"path": "a.mp4"}', "a.jsonl")
    assert items(json.dumps(row).encode(), "a.jsonl") == items(as_parquet([row]), "a.parquet") == [wanted]
    assert "exactly one of source, path and url" in error(b'{"path": null}', "a.jsonl")


def test_of_a_key_that_is_given_twice_neither_is_taken() -> None:
    told = error(b'{"path": "a.mp4"}\n{"path": "b.mp4", "prompt": "why", "path": "c.mp4"}', "a.jsonl")
    assert told == "a.jsonl line 2: 'path' is given twice; leave one of them"


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    names = sorted({name for row in rows for name in row})
    lines = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    return "\r\n".join(",".join(f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in line) for line in lines).encode()


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    names = sorted({name for row in rows for name in row})
    content = io.BytesIO()
    table = pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pyarrow.parquet.write_table(table, content)
    return content.getvalue()


@given(ROWS)
def test_all_forms_say_the_same(rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    found = items(lines, "list.jsonl")
    assert [item.source for item in found] == [f"/videos/{row['source']}" for row in rows]
    assert items(as_csv(rows), "list.csv") == found
    assert items(as_parquet(rows), "LIST.PARQUET") == found


def test_whole_numbers_may_be_floats() -> None:
    """As pandas writes them where one of a column is missing."""
    rows = [{"source": "a.mp4", "num_frames": 32.0, "top_k": 5.0, "size": 7.0, "temperature": 1.0}, {"source": "b.mp4"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for found in (items(lines, "a.jsonl"), items(as_csv(rows), "a.csv"), items(as_parquet(rows), "a.parquet")):
        assert found[0].caption == {"num_frames": 32, "top_k": 5, "temperature": 1} and found[0].num_bytes == 7
    assert "num_frames must be a whole number, not 32.5" in error(b'{"source": "a", "num_frames": 32.5}', "a.jsonl")


def test_a_manifest_may_say_how_large_each_is() -> None:
    rows = [{"source": "a.mp4", "size": 2**40}, {"source": "b.mp4"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for found in (items(lines, "a.jsonl"), items(as_csv(rows), "a.csv"), items(as_parquet(rows), "a.parquet")):
        assert [item.num_bytes for item in found] == [2**40, None]


@pytest.mark.parametrize("size", ["-1", "1.5", "true", '"12"', "9223372036854775808"])
def test_a_size_is_a_number_of_bytes(size: str) -> None:
    assert "size must be a number of bytes" in error(f'{{"source": "a", "size": {size}}}'.encode(), "list.jsonl")


def test_paths_of_a_manifest_in_a_bucket_are_below_its_folder() -> None:
    lines = b'{"source": "a.mp4"}\n{"source": "/b.mp4"}\n{"source": "gs://other/c.mp4"}\n{"url": "https://h/d.mp4"}\n'
    found = items(lines, "list.jsonl", ObjectUrl.parse("s3://films/deep"))
    sources = ["s3://films/deep/a.mp4", "/b.mp4", "gs://other/c.mp4", "https://h/d.mp4"]
    assert [item.source for item in found] == sources


@pytest.mark.parametrize("folder", [FOLDER / "lists", ObjectUrl.parse("s3://films/lists")])
def test_a_path_may_lead_out_of_the_folder_of_its_manifest(folder: Path | ObjectUrl) -> None:
    """Gateways refuse paths and keys with such steps."""
    lines = b'{"source": "../1998/a.mp4"}\n{"source": "./b.mp4"}\n{"source": "/c/../d.mp4"}\n'
    above = "/videos" if isinstance(folder, Path) else "s3://films"
    found = items(lines, "list.jsonl", folder)
    assert [item.source for item in found] == [f"{above}/1998/a.mp4", f"{above}/lists/b.mp4", "/d.mp4"]
    assert [item.custom_id for item in found] == ["../1998/a.mp4", "./b.mp4", "/c/../d.mp4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("source,num_frames\na.mp4,4\nb.mp4,four\n", "list.csv line 3: num_frames is 'four', which is not a number"),
        ("source,stop\na.mp4,end\n", "line 2: stop is 'end', which is not a list as in JSON"),
        ("source\na.mp4,4\n", "line 2: more cells than the first line has names"),
        ("source,colour\na.mp4,red\n", "line 2: unknown key 'colour'"),
        ("prompt\nWhat?\n", "line 2: give exactly one of source, path and url"),
        ('source\n"' + "a" * 2_000_000, "no CSV in UTF-8"),
        ("path;prompt\na.mp4;What?\nb.mp4;Who?\n", "line 1: the columns are parted by ';'; part them by commas"),
        ('"path"\t"prompt"\na.mp4\tWhat?\n', r"line 1: the columns are parted by '\t'; part them by commas"),
        ("source\n\udcff\n", "no CSV in UTF-8"),
        ("source,seed,source,,\na.mp4,1,b.mp4,,\n", "line 1: several columns are named 'source'; leave one of them"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_line(content: str, message: str) -> None:
    assert message in error(content.encode(errors="surrogateescape"), "list.csv")


def test_parquet_that_is_none_or_cut_off() -> None:
    assert "row 1: no Parquet" in error(b"PAR1 and nothing else", "list.parquet")
    whole = as_parquet([{"source": "a.mp4"}])
    assert "row 1: no Parquet" in error(whole[:-20], "list.parquet")
    assert "list.parquet row 2: unknown key" in error(
        as_parquet([{"source": "a"}, {"source": "b", "x": 1}]), "list.parquet"
    )
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table([["a.mp4"], ["b.mp4"]], ["source", "source"]), content)
    assert "row 1: several columns are named 'source'" in error(content.getvalue(), "list.parquet")


def test_the_first_bad_rows_are_named_and_all_are_counted() -> None:
    lines = b"".join(b'{"source": "a"}\n' if number % 2 else b"bad\n" for number in range(60))
    told = error(lines, "list.jsonl").splitlines()
    assert [line.split(":")[0] for line in told[:10]] == [f"list.jsonl line {1 + 2 * number}" for number in range(10)]
    assert told[10] == "and 20 more rows of list.jsonl are bad"


@pytest.mark.parametrize("excess", [0, 1, 1_000_000, 4_000_000])
def test_lines_behind_one_that_is_too_long_are_read(excess: int) -> None:
    long = b"x" * (LONGEST_LINE + excess)
    for end in (b"\n", b"\r\n"):
        told: list[BadRow] = []
        lines = b'{"source": "a"}' + end + long + end + b"bad" + end + b'{"source": "b"}'
        found = read_manifest(io.BytesIO(lines), "list.jsonl", FOLDER, told.append)
        assert [item.source for item in found] == ["/videos/a", "/videos/b"]
        assert [row.where for row in told] == ["list.jsonl line 2", "list.jsonl line 3"]
        assert told[0].reason == f"longer than {LONGEST_LINE} bytes" and str(told[1]).startswith(
            "list.jsonl line 3: not"
        )


def judged(content: bytes, name: str) -> tuple[list[str], list[tuple[str, str, int]]]:
    """Sources of the items, and what is told of bad rows."""
    told: list[BadRow] = []
    found = [item.source for item in read_manifest(io.BytesIO(content), name, FOLDER, told.append)]
    return found, [(row.where.removeprefix(f"{name} "), row.reason, row.num_rows) for row in told]


LONG = "x" * (LONGEST_LINE + 5)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("\udcff,4", "no CSV in UTF-8: its bytes are no text"),
        ("a\0,4", "no CSV in UTF-8: its bytes are no text"),
        (f"{LONG},4", f"no CSV in UTF-8: longer than {LONGEST_LINE} characters or 1000 lines"),
        (f'"{LONG}",4', f"no CSV in UTF-8: longer than {LONGEST_LINE} characters or 1000 lines"),
        ('"c.mp4,4', "no CSV in UTF-8: a quote is opened and not closed"),
        ("c.mp4,4,4", "more cells than the first line has names"),
        ("c.mp4,four", "num_frames is 'four', which is not a number, true or false"),
    ],
)
def test_rows_behind_a_bad_one_of_a_table_are_read(bad: str, reason: str, end: str) -> None:
    rows = ["source,num_frames", "a.mp4,4", bad, "", "b.mp4,4", bad if bad[0] != '"' else "\udcff", "d.mp4"]
    found, told = judged(end.join(rows).encode(errors="surrogateescape"), "list.csv")
    assert found == ["/videos/a.mp4", "/videos/b.mp4", "/videos/d.mp4"]
    assert told[0] == ("line 3", reason, 1) and [where for where, *_ in told] == ["line 3", "line 6"]


@pytest.mark.parametrize("excess", [-4, -3, -2, -1, 0, 1, LONGEST_LINE - 2, LONGEST_LINE - 1, LONGEST_LINE])
def test_lines_of_a_table_are_counted_whatever_their_length(excess: int) -> None:
    for end in ("\n", "\r\n"):
        rows = ["source,prompt", f"a.mp4,{'x' * (LONGEST_LINE + excess)}", "b.mp4,bad,bad", "c.mp4,"]
        _, told = judged(end.join(rows).encode(), "list.csv")
        assert [where for where, *_ in told][-1] == "line 3"


def test_a_quote_without_an_end_costs_one_row_and_not_those_behind_it() -> None:
    rows = ["source,prompt", 'a.mp4,"once', *(f"{number}.mp4," for number in range(3000)), 'b.mp4,"two\nlines"']
    found, told = judged("\n".join(rows).encode(), "list.csv")
    assert len(found) == 3001 and found[-1] == "/videos/b.mp4"
    assert told == [("line 2", f"no CSV in UTF-8: longer than {LONGEST_LINE} characters or 1000 lines", 1)]


@given(st.lists(st.sampled_from(['"', ",", "\n", "a", "\r", "\udcff"]), max_size=40))
def test_a_table_of_anything_is_read_to_its_end(marks: list[str]) -> None:
    """Whatever is written before it, a row that is a line of its own is read."""
    content = "source\n" + "".join(marks) + "\n" + "\n" * 1001 + "last.mp4\n"
    found, _ = judged(content.encode(errors="surrogateescape"), "list.csv")
    assert found[-1:] == ["/videos/last.mp4"]


def test_names_of_columns_that_cannot_be_read_end_a_table() -> None:
    assert judged(b"source,\xff\na.mp4,4\n", "list.csv") == (
        [],
        [("line 1", "no CSV in UTF-8: its bytes are no text", 1)],
    )
    assert judged(b"", "list.csv") == ([], [])


def grouped(sources: list[Any], size: int, **options: Any) -> bytes:
    content = io.BytesIO()
    table = pyarrow.table({"source": sources})
    pyarrow.parquet.write_table(table, content, row_group_size=size, use_dictionary=False, **options)
    return content.getvalue()


def test_a_row_group_that_cannot_be_read_costs_its_rows_alone() -> None:
    content = grouped([f"{number}.mp4" for number in range(3000)], 1000, compression="gzip")
    column = pyarrow.parquet.ParquetFile(io.BytesIO(content)).metadata.row_group(1).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    found, told = judged(content[:middle] + bytes(64) + content[middle + 64 :], "list.parquet")
    assert found == [f"/videos/{number}.mp4" for number in (*range(1000), *range(2000, 3000))]
    ((where, reason, num_rows),) = told
    assert (where, num_rows) == ("rows 1001 to 2000", 1000) and reason.startswith("no Parquet that can be read: ")


def test_a_cell_that_is_no_text_costs_its_row_alone() -> None:
    cells = pyarrow.array([b"a.mp4", b"\xff", b"b.mp4"]).view(pyarrow.string())
    found, told = judged(grouped(cells, 3), "list.parquet")
    assert found == ["/videos/a.mp4", "/videos/b.mp4"]
    assert [where for where, *_ in told] == ["row 2"] and "cell cannot be read" in told[0][1]


class Endless(io.RawIOBase):
    """So many lines, made as they are read; each hundredth is bad."""

    def __init__(self, num_lines: int) -> None:
        self._lines = self._made(num_lines)
        self._left = b""

    def _made(self, num_lines: int) -> Iterator[bytes]:
        for number in range(num_lines):
            yield b'{"source": "%d.mp4", "prompt": "%s"}\n' % (number, b"?" * 200) if number % 100 else b"bad\n"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._left = self._left or next(self._lines, b"")
        piece, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


def peak_of(num_lines: int) -> int:
    """Bytes. Other threads of the process are measured, too, so the least of some times counts."""
    peaks = []
    for _ in range(4):
        tracemalloc.start()
        with pytest.raises(InvalidRequest, match=f"and {num_lines // 100 - 10} more rows"):
            check_manifest(io.BufferedReader(Endless(num_lines)), "list.jsonl", FOLDER)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return min(peaks)


@pytest.mark.long
def test_memory_does_not_grow_with_the_rows() -> None:
    assert peak_of(6_000) < peak_of(1_500) + 100_000
