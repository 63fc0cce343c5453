"""What the front keeps of its batches, on disk."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.services.front.batch_records import BatchRecords, HttpBatch, Stage

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
