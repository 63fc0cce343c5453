"""Indexes of what the archive has said: of exports, beside them or in a cache, and of batches; built when they are
needed, and anew when what they were built of has changed."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from slipstream.archive.messages import Job, JobKind, JobPart
from slipstream.archive.passages import ExportedPassages, Passage
from slipstream.archive.text_index import TextIndex, build_index
from slipstream.client.archive_client import ArchiveClient
from slipstream.config import user_folder
from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.objects.blocking import blocking_store, local_path, open_file, place_of
from slipstream.objects.store import ObjectUrl, is_remote_object

INDEX_EXTENSION = ".index"
_SQLITE = b"SQLite format 3\0"


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where indexes lie that cannot lie beside what they are of. Raises `InvalidConfig` where nobody knows."""
    return user_folder(environ, "XDG_CACHE_HOME", ".cache") / "slipstream" / "search"


def index_exports(exports: Sequence[str], index: Path) -> TextIndex:
    """Builds one index of several exports, in their order. An export is a path, or an object's address.

    Raises `InvalidRequest` for a file that cannot be read, or of whose lines none is an export's, what a store says,
    and `InvalidConfig` for an index that cannot be written, or would take the place of an export.
    """
    if taken := [export for export in exports if place_of(export) == place_of(str(index))]:
        raise InvalidConfig(f"cannot write the index {index}: it would take the place of {taken[0]}, which is read")
    stamps = [_stamp(export) for export in exports]
    num_damaged = 0

    def passages() -> Iterator[Passage]:
        nonlocal num_damaged
        for export in exports:
            with open_file(export) as file:
                said = ExportedPassages(file)
                has_text = False
                for passage in said:
                    has_text = True
                    yield passage
            if said.num_damaged and not has_text:  # a table, or another file altogether
                raise _no_text(export)
            num_damaged += said.num_damaged

    build_index(index, passages(), json.dumps(stamps), lambda: num_damaged)
    return TextIndex(index)


def _no_text(export: str) -> InvalidRequest:
    return InvalidRequest(f"{export} has no text; give JSON lines of `slipstream archive export`, or an index of them")


def open_export(export: str, cache: Path) -> TextIndex:
    """The index of an export of JSON lines, or the index itself; built now where there is none that is true. That of an
    object is in the cache.

    Raises `InvalidRequest` for a file that cannot be read, or that has no text of an archive, and what a store says.
    """
    stamp = _stamp(export)
    is_index = _is_index(export)
    if is_index and is_remote_object(export):
        raise InvalidRequest(f"{export} is an index, which is searched on this machine alone: copy it here")
    if is_index:
        return TextIndex(local_path(export))
    made_of = json.dumps([stamp])
    places = _places(export, cache)
    for place in places:
        if (known := _opened(place, made_of)) is not None:
            return known
    away = places[-1]
    place = places[0] if os.access(places[0].parent, os.W_OK) else away
    if place == away:
        _private(away)
    index = index_exports([export], place)
    if not len(index):
        index.close()
        place.unlink()
        raise _no_text(export)
    return index


def _is_index(export: str) -> bool:
    with open_file(export) as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _places(export: str, cache: Path) -> list[Path]:
    """Where the index of an export may lie, the best first; the last is in the cache."""
    if is_remote_object(export):
        return [cache / f"{_digest(export)}{INDEX_EXTENSION}"]
    path = local_path(export)
    beside = path.with_name(path.name + INDEX_EXTENSION)
    return [beside, cache / f"{_digest(str(path.resolve()))}{INDEX_EXTENSION}"]


async def open_batch(client: ArchiveClient, batch: str, cache: Path) -> TextIndex:
    """The index of a batch as it stands now. Raises what `client` does."""
    found = await client.get(batch)
    made_of = json.dumps([found.batch_id, found.counts.done, found.parts_done, found.ended_s])
    place = _private(cache / f"{_digest(found.batch_id)}{INDEX_EXTENSION}")
    if (known := _opened(place, made_of)) is not None:
        return known
    with tempfile.TemporaryFile("w+", dir=place.parent, encoding="utf-8") as lines:
        async with aclosing(client.jobs(batch)) as jobs:
            async for job in jobs:
                parts = [part async for part in client.parts(batch, job)]
                lines.write(json.dumps(_record(job, parts)) + "\n")
        lines.seek(0)
        build_index(place, ExportedPassages(lines), made_of)
    return TextIndex(place)


def _record(job: Job, parts: Sequence[JobPart]) -> dict[str, Any]:
    """What `ExportedPassages` reads of a job, as an export has it."""
    record: dict[str, Any] = {"custom_id": job.custom_id, "source": job.source, "kind": job.kind}
    if job.caption is not None:
        return record | {"text": job.caption.text, "receipt": {"video": {"duration_s": job.caption.video.duration_s}}}
    said = [(part, part.caption.text) for part in parts if part.caption is not None]
    if job.kind is JobKind.FILM:
        timed = [(part.segment, text) for part, text in said if part.segment is not None]
        segments = [
            {"segment": at.number, "start_s": at.start_s, "end_s": at.end_s, "text": text}
            for at, text in timed
            if not at.is_summary
        ]
        summary = next(({"text": text} for at, text in timed if at.is_summary), None)
        return record | {"parts": segments, "summary": summary}
    return record | {"parts": [{"page": part.page, "text": text} for part, text in said]}


def _opened(place: Path, made_of: str) -> TextIndex | None:
    """The index there, where it is one of the same content."""
    if not place.is_file():
        return None
    try:
        index = TextIndex(place)
    except InvalidConfig:
        return None
    if index.facts.get("made_of") == made_of:
        return index
    index.close()
    return None


def _stamp(export: str) -> list[str | int]:
    """Another one when the content is."""
    if is_remote_object(export):
        url = ObjectUrl.parse(export)
        facts = blocking_store(url.root).facts_now(url)
        return [export, facts.num_bytes, facts.etag]
    with open_file(export) as file:
        status = os.fstat(file.fileno())
    return [str(local_path(export).resolve()), status.st_size, status.st_mtime_ns]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:40]


def _private(place: Path) -> Path:
    """The same, in a folder that only this user may enter: it holds captions."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"cannot make the folder {place.parent}: {error.strerror}") from None
    return place
