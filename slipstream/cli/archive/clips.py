"""`slipstream archive search --clip`: the segments that were found, cut out of films on this machine or in a bucket."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import typer

from slipstream.archive.passages import Passage
from slipstream.archive.subtitles import safe_name
from slipstream.captioning.object_sources import identity_of
from slipstream.cli.film import clock_time
from slipstream.cli.views import complain, printable
from slipstream.errors import (
    InvalidRequest,
    LimitExceeded,
    ObjectChanged,
    ObjectNotFound,
    ObjectUnavailable,
    PermissionDenied,
    UnreadableVideo,
    VideoNotFound,
)
from slipstream.logs import configure_logs
from slipstream.objects.blocking import blocking_store, local_path
from slipstream.objects.cached_reader import BlockCache, CachedReader, in_time
from slipstream.objects.store import ObjectUrl, is_remote_object
from slipstream.video.clip_process import Clip, ClipCutter
from slipstream.video.ranged_film import RangedFilm, media_of

CACHE_BYTES = 64 * 1024**2
RANGE_S = 60.0
"""Longest time for one range of an object."""
_OF_FILM = (
    *(UnreadableVideo, LimitExceeded, VideoNotFound),
    *(ObjectNotFound, ObjectChanged, ObjectUnavailable, PermissionDenied, InvalidRequest),
)
"""Why one film gives no clip; the next one is tried."""


async def cut_passages(passages: Sequence[Passage], folder: Path) -> dict[Passage, Clip]:
    """The clips of those that are segments of films which can be read here; of the others it says why there is none."""
    configure_logs("search", "error")
    clips: dict[Passage, Clip] = {}
    cache = BlockCache(CACHE_BYTES)
    waiting = deque(passages)
    while waiting:
        async with ClipCutter() as cutter:
            while waiting:
                passage = waiting.popleft()
                try:
                    clips[passage] = clip = await _cut(cutter, passage, folder, cache)
                    typer.echo(f"slipstream: {printable(str(clip.path))}: from {clock_time(clip.begins_s)}", err=True)
                except _OF_FILM as error:
                    complain(passage.custom_id, f"no clip: {error}")
                    if not cutter.is_alive:  # the next film gets another
                        break
    return clips


async def _cut(cutter: ClipCutter, passage: Passage, folder: Path, cache: BlockCache) -> Clip:
    if not passage.is_segment:
        raise VideoNotFound("it is no segment of a film, so where it is said is not known")
    path = folder / safe_name(f"{passage.custom_id}@{passage.start_s:.3f}", ".mkv")
    if is_remote_object(passage.source):
        film = await _in_store(passage.source, cache)
        return await cutter.cut(film, passage.start_s, passage.end_s, path)
    with _on_this_machine(passage.source) as file:
        return await cutter.cut(file, passage.start_s, passage.end_s, path)


async def _in_store(source: str, cache: BlockCache) -> RangedFilm:
    """The film of an object, opened with the credentials of this command. Raises `ObjectUnavailable` for one without an
    entity tag, as a change between two ranges would go unseen, and what a store says."""
    url = ObjectUrl.parse(source)
    store = blocking_store(url.root)
    facts = await in_time(store.facts(url), url, RANGE_S)
    if not facts.etag:
        raise ObjectUnavailable(f"{url} has no entity tag, so it is not read by ranges; cut a copy of it here")
    reader = CachedReader(store, facts, cache, RANGE_S)
    return RangedFilm(facts.num_bytes, reader.read, await media_of(facts.num_bytes, reader.read), identity_of(facts))


@contextmanager
def _on_this_machine(source: str) -> Iterator[BinaryIO]:
    """Raises `VideoNotFound` for what is no file here."""
    path = local_path(source)
    if not os.path.isfile(path):
        raise VideoNotFound(f"{source!r} is no file on this machine, and no object; cut where the gateway's files are")
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise VideoNotFound(f"{source!r} cannot be read: {error.strerror}") from None
    with file:
        yield file
