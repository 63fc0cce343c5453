"""How much of a film in a store of objects is fetched for its frames: rendered, read by a confined decoder through
obstore's local store, or from servers that answer as clouds do (`--stores gs az`), which are asked for what the archive
rests on, too. Each film is read twice, and its frames are held against those of the file.

With `--clip` the film is one clip as the plan of docs/scaling.md counts them: 256 frames of that size, at 5 Mbit/s.

Not against moto's server, which copies the whole object for each range that it is asked for.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import at_least, machine_facts, make_parser, run_to_end
from bench.output import finish
from bench.tables import print_rows
from slipstream.errors import ObjectChanged, ObjectNotFound
from slipstream.objects.cached_reader import BlockCache, CachedReader
from slipstream.objects.store import ObjectFacts, ObjectStore, ObjectUrl
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from slipstream.video.pool import DecodePool
from slipstream.video.ranged_film import RangedFilm, media_of
from tests.support.cloud_servers import CloudServer, cloud_server, missing
from tests.support.films import make_noise_film, make_paced_clip

FRAMES_PER_S = 25
CACHE_BYTES, TIMEOUT_S = 128 * 1024**2, 60.0
SIZE = (160, 128)
CLIP_FRAMES = 256


class CountingStore(ObjectStore):
    """Counts what it is asked for."""

    fetched, requests = 0, 0

    async def read(self, facts: ObjectFacts, start: int = 0, end: int | None = None) -> bytes:
        """See there."""
        data = await super().read(facts, start, end)
        self.fetched, self.requests = self.fetched + len(data), self.requests + 1
        return data


async def read_film(url: ObjectUrl, path: Path, num_frames: int) -> dict[str, Any]:
    """One film, which also lies at `path`, by a gateway that has read nothing of it, and again."""
    store = CountingStore(url.root)
    reader = CachedReader(store, await store.facts(url), BlockCache(CACHE_BYTES), TIMEOUT_S)
    pool, rows = DecodePool(1, DecodeLimits()), []
    before_s = time.process_time()
    with path.open("rb") as file:
        expected = sample_video(file, num_frames, DecodeLimits())
    decode_cpu_s = time.process_time() - before_s
    try:
        for _ in range(2):
            before = store.fetched, store.requests
            num_bytes = reader.facts.num_bytes
            film = RangedFilm(num_bytes, reader.read, await media_of(num_bytes, reader.read), "")
            with await pool.sample(film, num_frames) as video:
                is_same = video.timestamps_s == expected.timestamps_s and np.array_equal(video.frames, expected.frames)
            fetched = store.fetched - before[0]
            rows.append((fetched, store.requests - before[1]))
    finally:
        pool.close()
    return {
        "film_bytes": num_bytes,
        "frames": num_frames,
        "fetched_bytes": rows[0][0],
        "share": round(rows[0][0] / num_bytes, 4),
        "requests": rows[0][1],
        "fetched_again": rows[1][0],
        "same_frames": is_same,
        "decode_cpu_s": round(decode_cpu_s, 3),
    }


async def promises_of(folder: ObjectUrl) -> dict[str, bool]:
    """What all of the archive rests on: an object is written once (a conditional PUT), and who reads a part of it is
    told when it has become another one."""
    store, url = ObjectStore(folder.root), folder.below("promises/an object+\u00e4.bin")
    await store.delete(url)
    written = [await store.put_new(url, content) for content in (b"0123456789", b"another")]
    facts = await store.facts(url)
    is_first = await store.read(facts, 2, 5) == b"234"
    listed = [found.url async for found in store.listed(folder.below("promises"))]
    await store.delete(url)
    await store.put_new(url, b"9876543210")
    try:
        await store.read(facts, 2, 5)
        is_told = False
    except ObjectChanged:
        is_told = True
    await store.delete(url)
    try:
        await store.facts(url)
        is_gone = False
    except ObjectNotFound:
        is_gone = True
    once = written == [True, False] and is_first
    return {"written_once": once, "change_is_told": is_told, "listed": listed == [url], "gone": is_gone}


async def _measure(given: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, dict[str, bool]]]:
    """Films in each of the stores, and what these promise."""
    rows, promises = [], {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        for cloud in given.stores:
            async with _store(cloud, Path(folder)) as served:
                promises[cloud] = await promises_of(served.url("checks"))
                for length, data in _films(given):
                    path.write_bytes(data)
                    url = ObjectUrl.parse(await served.put("film.mp4", path.read_bytes()))
                    rows += [
                        {"store": cloud, "minutes": length, **await read_film(url, path, count)}
                        for count in given.frames
                    ]
    return rows, promises


def _films(given: argparse.Namespace) -> Iterator[tuple[float, bytes]]:
    """With their lengths in minutes."""
    if given.clip:
        yield round(CLIP_FRAMES / 24 / 60, 3), make_paced_clip(CLIP_FRAMES, tuple(given.clip))
        return
    for length in given.minutes:
        yield length, make_noise_film(length * 60 * FRAMES_PER_S, size=SIZE)


@asynccontextmanager
async def _store(cloud: str, folder: Path) -> AsyncIterator[CloudServer]:
    if cloud == "file":
        yield CloudServer(f"file://{folder / 'bucket'}", {})
        return
    if lacks := missing(cloud):
        raise SystemExit(lacks)
    async with cloud_server(cloud) as served:
        os.environ.update(served.environment)
        yield served


def main(argv: Sequence[str]) -> None:
    """Exits with 1 when a store breaks a promise, or a frame is another one."""
    parser = make_parser("objects", "How much of a film in a bucket is fetched for its frames?")
    parser.add_argument("--minutes", type=at_least(1), nargs="+", default=[1, 10], help="lengths of the films")
    parser.add_argument("--clip", type=at_least(1), nargs=2, help="width and height of one clip instead of films")
    parser.add_argument("--frames", type=at_least(1), nargs="+", default=[16, 32, 128], help="frames that are sampled")
    stores = parser.add_argument("--stores", nargs="+", default=["file"], choices=["file", "gs", "az"])
    stores.help = "file: obstore's local one; gs: fake-gcs-server; az: Azurite, both where they are installed"
    rows, promises = run_to_end(_measure(parser.parse_args(argv)))
    print_rows("films in groups of 12 frames that cannot be compressed, or one clip", rows)
    is_kept = all(all(of_one.values()) for of_one in promises.values()) and all(row["same_frames"] for row in rows)
    finish("objects", {"passed": is_kept, "promises": promises, "rows": rows, "machine": machine_facts()})
    sys.exit(0 if is_kept else 1)
