"""What the front keeps of its batches, on disk."""

import errno
import os
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from slipstream.errors import Overloaded
from slipstream.services.front.batch_records import BatchRecords, Ending, HttpBatch, Stage
from slipstream.services.front.batches import KEPT_S, Batches
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.file_store import FileStore, new_file_id

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


def test_nothing_is_missing_where_nothing_can_be_opened_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose file was said to be gone had failed for good."""
    records, files = BatchRecords(str(tmp_path)), FileStore(FrontConfig(listen="", gateway="", data=str(tmp_path)))
    records.put("", BATCH)
    with files.new("") as file:
        file.write(b"1")
        kept = file.keep(new_file_id(), "a", "batch", None)
    with monkeypatch.context() as full:
        full.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
        for look in (
            lambda: records.get("", BATCH.batch_id),
            lambda: records.list(""),
            lambda: records.ending("", BATCH.batch_id),
            lambda: files.get("", kept.file_id),
        ):
            with pytest.raises(Overloaded, match="no room now: Too many open files"):
                look()
    assert records.get("", BATCH.batch_id) == BATCH and files.get("", kept.file_id) == kept


def test_a_batch_that_its_owner_never_came_back_for_is_forgotten_with_its_media(tmp_path: Path) -> None:
    """Nobody else's token ends it. One that somebody looks at is gone on with, however late that is."""
    config = FrontConfig(listen="", gateway="", data=str(tmp_path))
    front, media, now = Batches(config, cast(Any, None), FileStore(config)), tmp_path / "media", int(time.time())
    ages_s = {"left": KEPT_S + 60, "late": KEPT_S - 60, "looked at": KEPT_S + 60}
    names = {f"batch_{number:032}": name for number, name in enumerate(ages_s)}
    for batch_id, name in names.items():
        over = replace(BATCH, batch_id=batch_id, stage=Stage.HANDED_IN, expires_s=now - int(ages_s[name]))
        front.records.put("alice", over)
        front.records.end("alice", batch_id, Ending.EXPIRED)
        (media / batch_id).mkdir(parents=True)
        if name == "looked at":
            front._open[batch_id] = ("alice", "a token")
    front._sweep()
    kept = {batch_id for batch_id, name in names.items() if name != "left"}
    assert {batch.batch_id for batch in front.records.list("alice")} == kept == {path.name for path in media.iterdir()}
    assert {path.stem for path in tmp_path.rglob("batch_*.*")} == kept
