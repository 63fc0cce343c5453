"""Files of `/v1/files`, on disk: each in a folder of its own below its owner's, whole or not there at all."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from slipstream.errors import InvalidConfig, check_lacks
from slipstream.services.front.api_errors import ApiError, no_room, not_found, too_large
from slipstream.services.front.config import FrontConfig

PURPOSES = ("batch", "user_data", "vision")
OUTPUT = "batch_output"
MAX_FILES = 10_000
"""Of one owner."""
MAX_NAME_CHARS = 256
LEFT_S = 86_400.0
"""After so long, what was never finished was left by a process that ended."""
_FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_CONTENT, _FACTS, _NEW = "content", "facts.json", ".new-"


@dataclass(frozen=True)
class KeptFile:
    """What is known of a file."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int | None = None

    @property
    def is_expired(self) -> bool:
        """It is as if it were not there."""
        return self.expires_s is not None and time.time() >= self.expires_s

    def shown(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class Room:
    """The bytes of one owner: those of kept files, and those of all that are being written."""

    def __init__(self, most: int) -> None:
        self.kept = 0
        """As last counted on disk."""
        self._written = 0
        self._most = most
        self._lock = threading.Lock()

    def check(self, num_bytes: int) -> None:
        """Raises `ApiError` where there is no room for so many more."""
        used = self.kept + self._written
        if used + num_bytes > self._most:
            raise ApiError(
                f"your files have {used} of {self._most} bytes, those among them that are being written; delete some",
                status=413, code="quota_exceeded",
            )  # fmt: skip

    def take(self, num_bytes: int) -> None:
        """For a file that is being written. Raises `ApiError`, as `check` does."""
        with self._lock:
            self.check(num_bytes)
            self._written += num_bytes

    def leave(self, num_bytes: int, is_kept: bool) -> None:
        """A file of so many bytes is written no more."""
        with self._lock:
            self._written -= num_bytes
            self.kept += num_bytes if is_kept else 0


class NewFile:
    """A file that is being written. Nobody sees it before `keep`; a context manager that leaves nothing else behind."""

    def __init__(self, folder: Path, limit: int, room: Room) -> None:
        self._folder = folder / f"{_NEW}{secrets.token_hex(8)}"
        self._folder.mkdir(parents=True, mode=0o700)
        self._file: IO[bytes] = (self._folder / _CONTENT).open("wb")
        self._limit, self._room = limit, room
        self._naming = threading.Lock()
        self._is_kept = self._is_left = False
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        """Raises `ApiError` where it becomes too large, its owner has too much, or the disk is full."""
        self._room.take(len(data))
        self.num_bytes += len(data)
        if self.num_bytes > self._limit:
            raise too_large(f"the file has more than {self._limit} bytes, which is all that is taken", param="file")
        try:
            self._file.write(data)
        except OSError as error:
            raise no_room("the file", error) from None

    def keep(self, file_id: str, filename: str, purpose: str, expires_s: int | None) -> KeptFile:
        """Durable and seen from now on; what has this id already has the same content and stays, as it may be read. It
        may be left meanwhile, by who is cancelled while another thread is here, and is then not seen."""
        kept = KeptFile(file_id, filename, purpose, self.num_bytes, int(time.time()), expires_s)
        try:
            sync(self._file)
            with (self._folder / _FACTS).open("wb") as facts:
                facts.write(json.dumps(asdict(kept)).encode())
                sync(facts)
            sync_folder(self._folder)
            target = self._folder.parent / file_id
            with self._naming:  # else a folder that is being removed could become the file, and that stay empty
                if not self._is_left and not target.exists():
                    self._folder.rename(target)
                    self._is_kept = True
            sync_folder(target.parent)
        except OSError as error:
            raise no_room("the file", error) from None
        return kept

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *_: object) -> None:
        with self._naming:
            self._is_left = True
        with contextlib.suppress(OSError):  # what a full disk did not take is still buffered
            self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._room.leave(self.num_bytes, self._is_kept)


class FileStore:
    """All files. Every method blocks; owners see their own. Raises `InvalidConfig` where there can be no folder."""

    def __init__(self, config: FrontConfig) -> None:
        self._folder = Path(config.data) / "files"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidConfig(f"--data: {config.data!r} cannot be such a folder: {error.strerror}") from None
        self._config = config
        self._rooms: dict[str, Room] = {}

    def new(self, owner: str, limit: int | None = None) -> NewFile:
        """A file to write. Raises `ApiError` for an owner who has too many or too much. `limit`: of its bytes, where
        that is not what the owner has left."""
        room = self._room(owner) if limit is None else Room(limit)
        most = self._config.max_file_bytes if limit is None else limit
        try:
            return NewFile(self._folder / owner_key(owner), most, room)
        except OSError as error:
            raise no_room("the file", error) from None

    def _room(self, owner: str) -> Room:
        """The owner's, counted anew. Raises `ApiError` for one who has too much or too many."""
        kept = list(self._all(owner))
        if len(kept) >= MAX_FILES:
            raise ApiError(f"you have {len(kept)} files; delete some first", status=413, code="quota_exceeded")
        room = self._rooms.setdefault(owner, Room(self._config.max_owner_bytes))
        room.kept = sum(file.num_bytes for file in kept)
        room.check(1)
        return room

    def get(self, owner: str, file_id: str) -> KeptFile:
        """Raises `ApiError` where the owner has none of that id."""
        kept = self._read(self._path(owner, file_id)) if _FILE_ID.fullmatch(file_id) else None
        if kept is None or kept.is_expired:
            raise _unknown(file_id)
        return kept

    def open(self, owner: str, file_id: str) -> IO[bytes]:
        """Its content. Raises `ApiError` where the owner has none of that id."""
        try:
            return self.path(owner, file_id).open("rb")
        except FileNotFoundError:  # deleted meanwhile
            raise _unknown(file_id) from None

    def path(self, owner: str, file_id: str) -> Path:
        """Of its content, which never changes. Raises `ApiError` where the owner has none of that id."""
        return self._path(owner, self.get(owner, file_id).file_id) / _CONTENT

    def list(self, owner: str, purpose: str = "") -> "list[KeptFile]":
        """The owner's, the latest first."""
        kept = (file for file in self._all(owner) if not file.is_expired and purpose in ("", file.purpose))
        return sorted(kept, key=lambda file: (-file.created_s, file.file_id))

    def delete(self, owner: str, file_id: str) -> None:
        """Raises `ApiError` where the owner has none of that id."""
        self.get(owner, file_id)
        shutil.rmtree(self._path(owner, file_id), ignore_errors=True)

    def sweep(self) -> None:
        """Removes what has expired, and what was never finished."""
        for folder in self._folder.glob("*/*"):
            kept = self._read(folder)
            with contextlib.suppress(FileNotFoundError):  # another front of the same folder was there first
                is_left = folder.name.startswith(_NEW) and time.time() - folder.stat().st_mtime > LEFT_S
                if is_left or (kept is not None and kept.is_expired):
                    shutil.rmtree(folder, ignore_errors=True)

    def _all(self, owner: str) -> Iterator[KeptFile]:
        for folder in (self._folder / owner_key(owner)).glob("file-*"):
            if (kept := self._read(folder)) is not None:
                yield kept

    def _path(self, owner: str, file_id: str) -> Path:
        return self._folder / owner_key(owner) / file_id

    def _read(self, folder: Path) -> KeptFile | None:
        try:
            return KeptFile(**json.loads((folder / _FACTS).read_text()))
        except (OSError, ValueError, TypeError) as error:
            check_lacks(error)
            return None


def new_file_id() -> str:
    """Not to be guessed."""
    return f"file-{secrets.token_hex(16)}"


def owner_key(owner: str) -> str:
    """The name of an owner's folder; owners' own names may be anything."""
    return f"owner-{hashlib.sha256(owner.encode()).hexdigest()[:32]}" if owner else "nobody"


def sync(file: IO[bytes]) -> None:
    """What was written is durable."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """The names in it are durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unknown(file_id: str) -> ApiError:
    return not_found(f"there is no file {file_id[:64]!r}", param="file_id", code="file_not_found")
