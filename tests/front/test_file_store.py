"""Files on disk, and how much of it one owner may have."""

import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from slipstream.services.front import file_store
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.file_store import FileStore, NewFile, new_file_id


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(FrontConfig(listen="", gateway="", data=str(tmp_path), max_owner_bytes=10, max_file_bytes=8))


def kept(file: NewFile) -> str:
    with file:
        return file.keep(new_file_id(), "a", "user_data", None).file_id


def refusal(file: NewFile, data: bytes) -> str | None:
    with pytest.raises(ApiError) as refused:
        file.write(data)
    assert refused.value.status == 413
    return refused.value.code


def test_files_written_at_once_share_what_their_owner_may_have(files: FileStore) -> None:
    first, second, other = files.new("ann"), files.new("ann"), files.new("bob")
    with other:
        for file in (first, second, other):
            file.write(bytes(5))
        assert refusal(first, b"1") == refusal(second, b"1") == "quota_exceeded"
        other.write(bytes(3))
    kept(first)
    assert refusal(second, b"1") == "quota_exceeded"
    with second, pytest.raises(ApiError, match="10 of 10 bytes"):
        files.new("ann")
    with files.new("ann") as third:
        third.write(bytes(5))
        assert refusal(third, b"1") == "quota_exceeded"


def test_what_is_deleted_makes_room(files: FileStore) -> None:
    with files.new("ann") as open_all_the_time:
        for _ in range(3):
            file = files.new("ann")
            file.write(bytes(8))
            files.delete("ann", kept(file))
        open_all_the_time.write(bytes(2))
    with files.new("ann") as large:
        assert refusal(large, bytes(9)) == "too_large"


def test_of_a_file_that_a_full_disk_did_not_take_nothing_stays(files: FileStore, tmp_path: Path) -> None:
    """Neither on the disk, which it would keep full, nor among what its owner has."""
    held = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, held[1]))  # no file may have a byte
    try:
        for _ in range(2):
            file = files.new("ann")
            file.write(bytes(8))
            with pytest.raises(ApiError, match="cannot be kept now"):
                kept(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".new-")]
    with files.new("ann") as file:
        file.write(bytes(8))


def test_a_file_that_is_deleted_while_it_is_looked_for_is_not_found(files: FileStore) -> None:
    with files.new("ann") as file:
        file.write(b"a")
        file_id = kept(file)
    files.path("ann", file_id).unlink()
    with pytest.raises(ApiError, match="there is no file") as refused:
        files.open("ann", file_id)
    assert refused.value.status == 404


def test_a_file_that_is_left_while_it_is_kept_has_no_name(files: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    is_synced, is_left, file_id = threading.Event(), threading.Event(), new_file_id()
    sync_folder, unlink = file_store.sync_folder, os.unlink

    def paused(folder: Path) -> None:
        sync_folder(folder)
        is_synced.set()
        assert is_left.wait(60)

    def removed(*file: Any, **at: Any) -> None:
        is_left.set()
        keeping.join()
        unlink(*file, **at)

    with monkeypatch.context() as patches:
        patches.setattr(file_store, "sync_folder", paused)
        patches.setattr(os, "unlink", removed)
        with files.new("ann") as file:
            file.write(b"a")
            keeping = threading.Thread(target=file.keep, args=(file_id, "a", "user_data", None))
            keeping.start()
            assert is_synced.wait(60)
    with files.new("ann") as again:
        again.write(b"a")
        again.keep(file_id, "a", "user_data", None)
    with files.open("ann", file_id) as found:
        assert found.read() == b"a"
