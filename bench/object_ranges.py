"""How much of a film in a store of objects is fetched for its frames: rendered, read through obstore's local store
by a confined decoder. Each film is read twice, and its frames are held against those of the file.

Not against moto's server, which copies the whole object for each range that it is asked for.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import machine_facts, make_parser, run_to_end
from bench.output import finish
from bench.tables import print_rows
from slipstream.objects.cached_reader import BlockCache, CachedReader
from slipstream.objects.store import ObjectFacts, ObjectStore, ObjectUrl
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from slipstream.video.pool import DecodePool
from slipstream.video.ranged_film import RangedFilm, media_of
from tests.support.films import make_noise_film

FRAMES_PER_S = 25
CACHE_BYTES, TIMEOUT_S = 128 * 1024**2, 60.0
SIZE = (160, 128)


class CountingStore(ObjectStore):
    """Counts what it is asked for."""

    fetched, requests = 0, 0

    async def read(self, facts: ObjectFacts, start: int = 0, end: int | None = None) -> bytes:
        """See there."""
        data = await super().read(facts, start, end)
        self.fetched, self.requests = self.fetched + len(data), self.requests + 1
        return data


async def _read(path: Path, num_frames: int) -> dict[str, Any]:
    """One film, by a gateway that has read nothing of it, and again."""
    url = ObjectUrl.parse(f"file://{path}")
    store = CountingStore(url.root)
    reader = CachedReader(store, await store.facts(url), BlockCache(CACHE_BYTES), TIMEOUT_S)
    pool, rows = DecodePool(1, DecodeLimits()), []
    with path.open("rb") as file:
        expected = sample_video(file, num_frames, DecodeLimits())
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
    }


async def _measure(minutes: Sequence[int], frames: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        for length in minutes:
            path.write_bytes(make_noise_film(length * 60 * FRAMES_PER_S, size=SIZE))
            rows += [{"minutes": length, **await _read(path, count)} for count in frames]
    return rows


def main(argv: Sequence[str]) -> None:
    parser = make_parser("objects", "How much of a film in a bucket is fetched for its frames?")
    parser.add_argument("--minutes", type=int, nargs="+", default=[1, 10], help="lengths of the films")
    parser.add_argument("--frames", type=int, nargs="+", default=[16, 32, 128], help="frames that are sampled")
    given = parser.parse_args(argv)
    rows = run_to_end(_measure(given.minutes, given.frames))
    print_rows("films in groups of 12 frames that cannot be compressed", rows)
    finish("objects", {"rows": rows, "machine": machine_facts()})
