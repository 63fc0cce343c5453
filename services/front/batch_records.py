"""What the front itself keeps of a batch, on disk: what was asked, and how far it is. How its jobs stand the archive
knows. A record is replaced as a whole, so one that is read is sound, whoever was killed meanwhile."""

import json
import re
import secrets
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from slipstream.errors import check_lacks
from slipstream.services.front.api_errors import not_found
from slipstream.services.front.batch_forms import CHAT
from slipstream.services.front.file_store import owner_key, sync, sync_folder

_BATCH_ID = re.compile(r"batch_[0-9a-f]{32}")
_KEY = "http-"


def is_of_http(key: str) -> bool:
    """Whether what the archive calls so was opened here."""
    return key.startswith(_KEY) and bool(_BATCH_ID.fullmatch(key.removeprefix(_KEY)))


class Stage(StrEnum):
    """How far a batch is."""

    VALIDATING = "validating"
    """It is read, or being handed in; who does so may be killed, and another goes on."""
    HANDED_IN = "handed_in"
    """The archive has all of it; or what it has is all that there will be, as the batch is to end."""
    FAILED = "failed"
    """It could not be read, or this server failed in it; nothing of it runs."""
    ENDED = "ended"
    """Its files are written."""


class Ending(StrEnum):
    """Why a batch was ended ahead of its time; also the states of OpenAI's."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True)
class HttpBatch:
    """One batch. Times are unix seconds."""

    batch_id: str
    input_file_id: str
    completion_window: str
    created_s: int
    expires_s: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    output_life_s: int | None = None
    endpoint: str = CHAT.url
    """Where its requests would go; records of earlier releases do not say it."""
    stage: Stage = Stage.VALIDATING
    errors: tuple[Mapping[str, Any], ...] = ()
    num_lines: int = 0
    num_refused: int = 0
    """Lines that were never handed in."""
    num_done: int = 0
    num_failed: int = 0
    """Of one that has ended; the refused ones among them."""
    has_output: bool = False
    has_errors: bool = False
    handed_in_s: int | None = None
    """When the archive had all of it; None where it never did."""
    ended_s: int | None = None
    ending: str = ""
    """An `Ending`, or '' where all was run."""

    @property
    def key(self) -> str:
        """What it is called in the archive."""
        return f"{_KEY}{self.batch_id}"

    def file_id(self, what: str) -> str:
        """Of its output or error file: the same, whoever writes it."""
        return f"file-{self.batch_id.removeprefix('batch_')[:31]}{'1' if what == 'output' else '2'}"


@contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that is whole when it has its name, whoever reads or writes the same at that time: a gateway, another
    thread, another front of the same folder (in containers of one process id)."""
    unfinished = path.with_suffix(f".{secrets.token_hex(8)}.new")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_durably(path: Path, said: Mapping[str, Any]) -> None:
    with written_whole(path) as file:
        file.write(json.dumps(said).encode())
        sync(file)
    sync_folder(path.parent)


class BatchRecords:
    """All records. Every method blocks; owners see their own."""

    def __init__(self, data: str) -> None:
        self._folder = Path(data) / "batches"

    def get(self, owner: str, batch_id: str) -> HttpBatch:
        """Raises `ApiError` where the owner has none of that id."""
        batch = self._read(self._path(owner, batch_id)) if _BATCH_ID.fullmatch(batch_id) else None
        if batch is None:
            raise not_found(f"there is no batch {batch_id[:64]!r}", param="batch_id", code="batch_not_found")
        return batch

    def put(self, owner: str, batch: HttpBatch) -> None:
        """Durable, in place of what it was."""
        path = self._path(owner, batch.batch_id)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_durably(path, asdict(batch))

    def list(self, owner: str) -> "list[HttpBatch]":
        """The owner's, the latest first."""
        found = (self._read(path) for path in (self._folder / owner_key(owner)).glob("batch_*.json"))
        batches = [batch for batch in found if batch is not None]
        return sorted(batches, key=lambda batch: (-batch.created_s, batch.batch_id))

    def end(self, owner: str, batch_id: str, why: Ending) -> None:
        """Says that the batch is to end. The first reason stays (of two at once, either), in a file of its own, which
        no other writer replaces. One that was cut off, as by a disk that is full, is none."""
        if self.ending(owner, batch_id)[0]:
            return
        _write_durably(self._path(owner, batch_id).with_suffix(".end"), {"why": why, "at": int(time.time())})

    def ending(self, owner: str, batch_id: str) -> tuple[str, int]:
        """Why the batch is to end, and since when; '' and 0 where it is not."""
        try:
            said = json.loads(self._path(owner, batch_id).with_suffix(".end").read_text())
            return str(said["why"]), int(said["at"])
        except (OSError, ValueError) as error:
            check_lacks(error)
            return "", 0

    def refusals(self, owner: str, batch_id: str) -> Path:
        """The file with the lines of requests that were never handed in."""
        return self._path(owner, batch_id).with_suffix(".refused")

    def kept(self, owner: str, batch_id: str) -> Path:
        """The file with what answers are to have of their requests."""
        return self._path(owner, batch_id).with_suffix(".kept")

    def sweep(self, kept_s: float, at_work: Container[str]) -> Iterator[str]:
        """Forgets batches that ended so long ago, or whose time was over then and whose owner never came back; not
        those `at_work`. Gives the id of each before its record goes, for what else there is of it."""
        for path in self._folder.glob("*/batch_*.json"):
            batch = self._read(path)
            if batch is None or batch.batch_id in at_work:
                continue
            over_s = batch.expires_s if batch.ended_s is None else batch.ended_s
            if time.time() - over_s > kept_s:
                yield batch.batch_id
                for suffix in (".refused", ".kept", ".end", ".json"):
                    path.with_suffix(suffix).unlink(missing_ok=True)

    def open_of_nobody(self) -> Iterator[HttpBatch]:
        """Those without an owner that have not ended, which a front goes on with by itself."""
        yield from (batch for batch in self.list("") if batch.stage in (Stage.VALIDATING, Stage.HANDED_IN))

    def _path(self, owner: str, batch_id: str) -> Path:
        return self._folder / owner_key(owner) / f"{batch_id}.json"

    def _read(self, path: Path) -> HttpBatch | None:
        try:
            said = json.loads(path.read_text())
            return HttpBatch(**said | {"stage": Stage(said["stage"]), "errors": tuple(said["errors"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            check_lacks(error)
            return None
