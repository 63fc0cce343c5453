"""How much of a film in a bucket is fetched for its frames: rendered, put into moto's server, read through obstore by a
confined decoder. Each film is read twice, and its frames are held against those of the file.
"""

import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.common import machine_facts, make_parser, run_to_end
from bench.output import finish
from bench.tables import print_rows
from slipstream.objects.cached_reader import BlockCache, CachedReader
from slipstream.objects.store import ObjectStore, ObjectUrl
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from slipstream.video.pool import DecodePool
from slipstream.video.ranged_film import RangedFilm, media_of
from tests.support.films import make_noise_film
from tests.support.object_store import ObjectServer, object_server

FRAMES_PER_S = 25
CACHE_BYTES, TIMEOUT_S = 128 * 1024**2, 60.0
SIZE = (160, 128)


async def _read(served: ObjectServer, url: ObjectUrl, data: bytes, num_frames: int) -> dict[str, Any]:
    """One film, by a gateway that has read nothing of it, and again."""
    store = ObjectStore(url.root)
    reader = CachedReader(store, await store.facts(url), BlockCache(CACHE_BYTES), TIMEOUT_S)
    pool, fetched = DecodePool(1, DecodeLimits()), []
    expected = sample_video(io.BytesIO(data), num_frames, DecodeLimits())
    try:
        for _ in range(2):
            before = served.given
            film = RangedFilm(len(data), reader.read, await media_of(len(data), reader.read), "")
            with await pool.sample(film, num_frames) as video:
                is_same = video.timestamps_s == expected.timestamps_s and np.array_equal(video.frames, expected.frames)
            fetched.append(served.given - before)
    finally:
        pool.close()
    return {
        "film_bytes": len(data),
        "frames": num_frames,
        "fetched_bytes": fetched[0],
        "share": round(fetched[0] / len(data), 4),
        "fetched_again": fetched[1],
        "same_frames": is_same,
    }


async def _measure(minutes: Sequence[int], frames: Sequence[int]) -> list[dict[str, Any]]:
    rows = []
    async with object_server() as served:
        os.environ.update(served.environment)  # credentials come from nowhere else
        for length in minutes:
            data = make_noise_film(length * 60 * FRAMES_PER_S, size=SIZE)
            url = ObjectUrl.parse(served.put(f"{length}.mp4", data))
            rows += [{"minutes": length, **await _read(served, url, data, count)} for count in frames]
    return rows


def main(argv: Sequence[str]) -> None:
    parser = make_parser("objects", "How much of a film in a bucket is fetched for its frames?")
    parser.add_argument("--minutes", type=int, nargs="+", default=[1, 10], help="lengths of the films")
    parser.add_argument("--frames", type=int, nargs="+", default=[16, 32, 128], help="frames that are sampled")
    given = parser.parse_args(argv)
    rows = run_to_end(_measure(given.minutes, given.frames))
    print_rows("films in groups of 12 frames that cannot be compressed", rows)
    finish("objects", {"rows": rows, "machine": machine_facts()})
