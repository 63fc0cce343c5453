"""What the front keeps of its batches, on disk."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.services.front.batch_records import BatchRecords, Ending, HttpBatch, Stage

BATCH = HttpBatch("batch_" + "0" * 32, "file-1", "24h", created_s=1, expires_s=2)


def test_two_may_write_one_record_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two looks of one front, or two fronts whose processes have one id: what stands then is whole."""
    records, fsync = BatchRecords(str(tmp_path)), os.fsync

    def between(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        records.put("", replace(BATCH, stage=Stage.HANDED_IN, num_lines=10**6))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", between)
    records.put("", BATCH)
    assert records.list("") == [BATCH]
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]


def test_a_disk_that_is_full_keeps_no_batch_from_ending_later(tmp_path: Path) -> None:
    records = BatchRecords(str(tmp_path))
    records.put("", BATCH)
    held = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, held[1]))  # no file may have a byte
    try:
        with pytest.raises(OSError, match="File too large"):
            records.end("", BATCH.batch_id, Ending.EXPIRED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert not records.ending("", BATCH.batch_id)[0]
    for why in (Ending.CANCELLED, Ending.EXPIRED):
        records.end("", BATCH.batch_id, why)
        assert records.ending("", BATCH.batch_id)[0] == Ending.CANCELLED, "the first reason stays"
