"""Finished jobs into a file and back: nothing is lost, whatever they say, and what is damaged is told."""

import contextlib
import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.archive import result_files
from slipstream.archive.chunks import Chunk, write_chunk
from slipstream.archive.messages import ModelReceipt, Receipt
from slipstream.archive.parts import PartRecord
from slipstream.archive.queue import DamagedRecord, JobRecord, JobSpec, JobState, Priority
from slipstream.archive.records import JobPayload, job_of, write_job, write_result
from slipstream.archive.result_files import FinishedJob, ResultFile, ResultFileWriter, read_block, survey
from slipstream.archive.result_table import ResultTableWriter, digest_of, row_of
from slipstream.messages import Caption, VideoFacts

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
JOB = JobRecord("id", "batch", "a", JobState.DONE, "{}", "", "", "", "w", 1, 0, 0, "", 1.0, 2.0, 3.0)


def written(jobs: list[FinishedJob]) -> tuple[ResultFile, bytes]:
    writer = ResultFileWriter()
    for start in range(0, len(jobs), 3):
        some = jobs[start : start + 3]
        writer.add(some, ({"custom_id": job.record.custom_id} for job in some))
    return writer.finish("batch", 7)


def finished(texts: list[str]) -> list[FinishedJob]:
    parts = (PartRecord(0, b"\x00\xff"), PartRecord(2, b"", "damaged"))
    jobs = [replace(JOB, custom_id=text, result=text, error=text[::-1]) for text in texts]
    return [FinishedJob(3 * at + 1, job, parts[: at % 3]) for at, job in enumerate(jobs)]


@given(texts=st.lists(TEXTS, min_size=1, max_size=12), block_bytes=st.sampled_from([1, 900, 1 << 20]))
def test_what_is_written_is_read(texts: list[str], block_bytes: int) -> None:
    jobs = finished(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_files, "BLOCK_BYTES", block_bytes)
        file, data = written(jobs)
        assert written(jobs) == (file, data), "the same jobs make the same bytes"
    assert (file.num_jobs, file.num_bytes) == (len(jobs), len(data))
    assert survey(file.name, data) == file == ResultFile.read(file.write())
    assert [job for number in range(len(file.blocks)) for job in read_block(data[slice(*file.span(number))])] == jobs
    lines = gzip.decompress(data).splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == texts, "all tools read it"
    for at, job in enumerate(jobs):
        found = [
            one for number in file.blocks_of([job.position]) for one in read_block(data[slice(*file.span(number))])
        ]
        assert jobs[at] in found
    assert survey(file.name, gzip.compress(gzip.decompress(data), 1)).digest == file.digest, "however compressed"


def test_no_block_is_read_in_vain() -> None:
    file, _ = written(finished(["a"]))
    assert list(file.blocks_of([0])) == list(file.blocks_of([2, 3])) == list(file.blocks_of([])) == []
    assert list(file.blocks_of([0, 1, 9])) == [0]


@given(damage=st.data())
def test_what_is_damaged_is_told(damage: st.DataObject) -> None:
    file, data = written(finished(["a", "b", "c"]))
    at = damage.draw(st.integers(0, len(data) - 1))
    spoiled = damage.draw(
        st.sampled_from([data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :], b"x" + data, data + b"x"])
    )
    with contextlib.suppress(ValueError):
        assert survey(file.name, spoiled).digest != file.digest or gzip.decompress(spoiled) == gzip.decompress(data)
    if at:
        with pytest.raises(DamagedRecord):
            read_block(data[:at])


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b'{"position":1,"record":{"state":"odd"}}', b'{"record":1}', b"null"]
)
def test_a_file_of_something_else_is_none(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"no finished job|without jobs"):
        survey("x", gzip.compress(line + b"\n"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '["a","b",1,2,[[1]]]', '["a","b","c",2,[]]'])
def test_what_the_store_says_of_a_file_may_be_damaged(text: str) -> None:
    with pytest.raises(DamagedRecord):
        ResultFile.read(text)


def test_the_table_says_which_lines_it_goes_with() -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = ResultTableWriter()
    table.add([row_of(job) for job in finished(["a", "b"])])
    table.add([row_of(FinishedJob(9, replace(JOB, state=JobState.CANCELLED)))])
    data = table.finish("digest")
    assert digest_of(data) == "digest" and digest_of(b"PAR1") == digest_of(b"") == ""
    rows = parquet.read_table(arrow.BufferReader(data)).to_pylist()
    assert [(row["custom_id"], row["position"], row["state"]) for row in rows] == [
        ("a", 1, "done"),
        ("b", 4, "done"),
        ("a", 9, "cancelled"),
    ]
    assert [part["error"] for part in rows[1]["parts"]] == ["another release wrote this part"]


def test_a_row_says_what_the_job_says() -> None:
    video = VideoFacts(duration_s=2.5, num_frames=3, timestamps_s=(0.0, 1.0, 2.0))
    caption = Caption("a cat", 7, None, video=video, options={"method": "autoregressive"})
    model = ModelReceipt("target", "revision", "float32")
    receipt = Receipt("1.0", model, None, {"prompt": "?"}, "of the video", 9, "of the text")
    payload = write_job(JobPayload("/a.mp4", {}, ""))
    record = replace(JOB, payload=payload, result=write_result(caption, receipt), attempts=2)
    row, job = row_of(FinishedJob(4, record)), job_of(record)
    assert job.caption is not None and job.receipt is not None
    assert row == {
        **{name: getattr(job, name) for name in ("custom_id", "job_id", "source", "error", "error_code", "attempts")},
        **{name: getattr(job, name) for name in ("created_s", "started_s", "ended_s")},
        **{"state": "done", "kind": "video", "position": 4, "epoch": record.epoch, "parts": []},
        **{"text": job.caption.text, "num_tokens": job.caption.num_tokens, "method": job.caption.options["method"]},
        **{"num_frames": job.caption.video.num_frames, "duration_s": job.caption.video.duration_s},
        **{"target_model": job.receipt.target.model_id, "target_revision": job.receipt.target.revision},
        **{name: getattr(job.receipt, name) for name in ("video_sha256", "text_sha256", "slipstream_version")},
    }
    other = row_of(FinishedJob(4, replace(record, result='{"v":99}')))
    assert other["error"] == job_of(replace(record, result='{"v":99}')).error and other["text"] is None


def test_a_chunk_holds_what_was_handed_in() -> None:
    jobs = [
        JobSpec("a", "{}"),
        JobSpec("ü", '{"x":"\\n"}', Priority.LOW, "why", 3),
        JobSpec("c", "{}", rejection="large", rejection_code="OUT_OF_RANGE"),
    ]
    name, data = write_chunk("batch", jobs)
    assert Chunk(name, 3, "").jobs_in(data) == jobs
    assert Chunk.read(f"{name} 2 101").jobs_in(data) == [jobs[0], jobs[2]]
    for spoiled in (data[:-1], b"", gzip.compress(b"[]\n"), write_chunk("batch", jobs[:2])[1]):
        with pytest.raises(DamagedRecord, match="chunk-"):
            Chunk(name, 3, "").jobs_in(spoiled)
    with pytest.raises(DamagedRecord):
        Chunk.read("odd")
