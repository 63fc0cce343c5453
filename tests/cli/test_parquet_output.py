"""`--format parquet`: what the rows say of videos, films and documents, and that they are written while jobs come."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from slipstream.archive.messages import Job, JobKind, JobPart
from slipstream.archive.parquet_rows import schema
from slipstream.archive.queue import JobState
from slipstream.cli.archive import parquet_file
from slipstream.cli.archive.output import STDOUT, Format, Output, check_output, choose_format, open_writer
from slipstream.errors import InvalidConfig
from slipstream.messages import Segment, SharedFrom, VideoFacts
from tests.cli.test_film_output import JOB, PARTS, RECEIPT, TEXTS, caption

PROMPTS = ("What?", "Who?")
WHOLE = Segment(2, 1.4, 21.36, is_summary=True)


def written(path: Path, *jobs: tuple[Job, list[JobPart]]) -> list[dict[str, Any]]:
    with open_writer(Output(str(path), Format.PARQUET)) as write:
        for job, parts in jobs:
            write(job, parts)
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def answer(number: int, prompt: int) -> JobPart:
    receipt = replace(RECEIPT, options={"prompt": PROMPTS[prompt]})
    times = ((1.4, 11.4), (11.4, 21.36))[number]
    segment = Segment(number, *times, prompt=prompt)
    return JobPart(2 * number + prompt, caption=caption(f"{number} {prompt}"), receipt=receipt, segment=segment)


def test_a_film_has_a_row_for_each_segment_and_one_for_the_whole(tmp_path: Path) -> None:
    whole, *rows = written(tmp_path / "film.parquet", (JOB, PARTS))
    assert (whole["unit"], whole["kind"], whole["text"], whole["number"]) == ("whole", "film", None, None)
    assert (whole["start_s"], whole["end_s"]) == (1.4, 3723.0004)
    assert [(row["unit"], row["number"], row["start_s"], row["end_s"]) for row in rows] == [
        ("segment", 0, 1.4, 11.4),
        ("segment", 1, 11.4, 21.36),
        ("segment", 2, 21.36, 3723.0004),
    ]
    assert [row["text"] for row in rows] == [TEXTS[0], None, TEXTS[2]]
    assert [row["error"] for row in rows] == [None, "torn", None]
    assert (rows[0]["target_model"], rows[0]["draft_model"], rows[0]["text_sha256"]) == ("big", None, "cd")
    assert json.loads(rows[0]["options"]) == {"segments": "fixed:10s"}
    assert parquet.read_schema(tmp_path / "film.parquet").equals(schema())


def test_several_prompts_and_a_summary(tmp_path: Path) -> None:
    answers = [answer(number, prompt) for number in (0, 1) for prompt in (0, 1)]
    summary = JobPart(4, caption=caption("all of it"), receipt=RECEIPT, segment=WHOLE)
    whole, *rows = written(tmp_path / "film.parquet", (JOB, [*answers, summary]))
    assert (whole["text"], whole["start_s"], whole["end_s"]) == ("all of it", 1.4, 21.36)
    assert [(row["number"], row["prompt"], row["text"]) for row in rows] == [
        (0, "What?", "0 0"),
        (0, "Who?", "0 1"),
        (1, "What?", "1 0"),
        (1, "Who?", "1 1"),
    ]
    several = replace(RECEIPT, options={"prompt": "the gateway's", "prompts": ["What?", "Who?"]})
    whole, *_ = written(tmp_path / "without.parquet", (replace(JOB, receipt=several), answers))
    assert whole["prompt"] is None, "it was not asked"
    failed = replace(summary, caption=None, receipt=None, error="no room")
    whole, *_ = written(tmp_path / "failed.parquet", (JOB, [*answers, failed]))
    assert (whole["text"], whole["error"]) == (None, "no room")


def test_videos_documents_and_jobs_without_a_result(tmp_path: Path) -> None:
    said = replace(caption("a dog"), video=VideoFacts(num_frames=4, duration_s=7.5, warnings=("short",)))
    video = replace(JOB, kind=JobKind.VIDEO, caption=said, receipt=RECEIPT, parts_total=0, parts_done=0)
    document = replace(JOB, kind=JobKind.DOCUMENT)
    pages = [JobPart(0, 3, caption=caption("page three"), receipt=RECEIPT), JobPart(1, 5, error="damaged")]
    failed = replace(video, state=JobState.FAILED, caption=None, receipt=None, error="no video", error_code="X")
    rows = written(tmp_path / "all.parquet", (video, []), (document, pages), (failed, []))
    assert [(row["unit"], row["number"], row["text"]) for row in rows] == [
        ("whole", None, "a dog"),
        ("whole", None, None),
        ("page", 3, "page three"),
        ("page", 5, None),
        ("whole", None, None),
    ]
    assert (rows[0]["start_s"], rows[0]["end_s"], rows[0]["warnings"]) == (0.0, 7.5, ["short"])
    assert (rows[4]["state"], rows[4]["error"], rows[4]["error_code"]) == ("failed", "no video", "X")
    assert rows[4]["start_s"] is None and rows[4]["warnings"] is None and rows[4]["options"] is None


def test_a_text_that_was_shared_or_left_out_says_so(tmp_path: Path) -> None:
    black = replace(caption(""), video=VideoFacts(num_frames=4, duration_s=5.0, marks=("black",)), skipped="black")
    shared = replace(caption("a dog"), shared=SharedFrom("a" * 32, 3, 2.5))
    videos = [
        replace(JOB, kind=JobKind.VIDEO, caption=said, receipt=RECEIPT, parts_total=0, parts_done=0)
        for said in (black, shared, caption("a cat"))
    ]
    rows = written(tmp_path / "spared.parquet", *((video, []) for video in videos))
    columns = ("text", "marks", "skipped", "shared_job", "shared_segment", "shared_distance")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("", ["black"], "black", None, None, None),
        ("a dog", [], None, "a" * 32, 3, 2.5),
        ("a cat", [], None, None, None, None),
    ]


def test_groups_of_rows_are_written_while_jobs_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROWS_A_GROUP", 8)
    path = tmp_path / "many.parquet"
    sizes = []
    with open_writer(Output(str(path), Format.PARQUET)) as write:
        for _ in range(5):
            write(JOB, PARTS)
            (part,) = tmp_path.glob(".many.parquet.*.part")
            sizes.append(part.stat().st_size)
        assert not path.exists(), "it appears whole"
    assert sizes == sorted(sizes) and len(set(sizes)) > 1
    assert [parquet.ParquetFile(path).metadata.row_group(group).num_rows for group in range(3)] == [8, 8, 4]
    with pytest.raises(ZeroDivisionError), open_writer(Output(str(path), Format.PARQUET)) as write:
        write(JOB, PARTS * (1 // 0))
    assert parquet.ParquetFile(path).metadata.num_rows == 20, "the older file stays"
    assert [file.name for file in tmp_path.iterdir()] == ["many.parquet"]


def test_no_rows_are_a_file_too(tmp_path: Path) -> None:
    assert written(tmp_path / "none.parquet") == []


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_format(None, "a.PARQUET") is Format.PARQUET
    with pytest.raises(InvalidConfig, match="parquet is no text"):
        choose_format(Format.PARQUET, STDOUT)
    check_output(str(tmp_path / "a.parquet"), Format.PARQUET)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'slipstream\[parquet\]'"):
        check_output(str(tmp_path / "a.parquet"), Format.PARQUET)
