"""A film's packets are listed once for all that is asked of it, in each decoder that is asked."""

import gc
import io
import weakref
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.media import Media
from slipstream.video import film_listing
from slipstream.video.container import Watch
from slipstream.video.files import FileThreads, VideoFile
from slipstream.video.film_cuts import Cut
from slipstream.video.film_listing import LastListing, Listing, list_film
from slipstream.video.film_windows import plan_segments, plan_shots, sample_windows
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.ranged_film import RangedFilm, media_of
from tests.support.films import frame_times, make_film, make_noise_film
from tests.support.written_clips import copied

LIMITS = DecodeLimits()
SCENES = [24] * 8
WINDOWS = [(3.0 * number, 3.0 * number + 3.0) for number in range(len(SCENES))]
GROUPS = [WINDOWS[:3], WINDOWS[3:6], WINDOWS[6:]]


@pytest.fixture(scope="module")
def film() -> bytes:
    return make_film(SCENES, frame_times(SCENES), key_every=12).data


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many packets each pass has listed."""
    counted: list[int] = []

    def count(*given: object) -> Listing:
        listing = list_film(*given)  # type: ignore[arg-type]
        counted.append(len(listing.packets))
        return listing

    monkeypatch.setattr(film_listing, "list_film", count)
    return counted


def frames_of(data: bytes, listed: film_listing.ListFilm) -> list[object]:
    """All that is asked of a film, in the order of a job."""
    found: list[object] = [plan_segments(io.BytesIO(data), 3.0, LIMITS, listed=listed)]
    found += [
        plan_shots(io.BytesIO(data), piece, piece[0], LIMITS, listed=listed) for piece in pairwise((0.0, 9.0, 24.0))
    ]
    for group in GROUPS:
        for video in sample_windows(io.BytesIO(data), 4, group, LIMITS, listed=listed):
            assert isinstance(video, SampledVideo)
            found += [video.timestamps_s, video.warnings, video.frames.tobytes()]
    return found


def test_all_that_is_asked_of_a_film_takes_one_listing(film: bytes, listings: list[int]) -> None:
    last = LastListing()
    assert frames_of(film, partial(last.of, "a")) == frames_of(film, list_film)
    assert listings == [sum(SCENES)]


def test_another_film_is_listed_and_the_one_before_is_not_kept(film: bytes, listings: list[int]) -> None:
    last, watch = LastListing(), Watch(60.0, None)
    listing = last.of("a", io.BytesIO(film), LIMITS, watch)
    assert last.of("a", io.BytesIO(film), LIMITS, watch) is listing
    of_first = weakref.ref(listing)
    del listing
    short = make_film([24], frame_times([24])).data
    last.of("b", io.BytesIO(short), LIMITS, watch)
    gc.collect()
    assert of_first() is None and listings == [192, 24]
    last.of("b", io.BytesIO(film), LIMITS, watch)
    assert listings == [192, 24, 192], "a name does not make another file the same"
    for _ in range(2):
        last.of("", io.BytesIO(film), LIMITS, watch)
    assert listings == [192, 24, 192, 192, 192], "a file without a name is nobody's"


class Store:
    """Counts what is asked of a film that is elsewhere."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, 0

    async def read(self, start: int, end: int) -> bytes:
        self.asked += end - start
        return self.data[start:end]

    async def source(self) -> VideoFile:
        """A new opening of it."""
        media = await media_of(len(self.data), self.read)
        self.asked = 0
        return VideoFile(RangedFilm(len(self.data), self.read, media, "object-1"), len(self.data), FileThreads())


@pytest.mark.parametrize("has_index", [True, False], ids=["mp4", "mkv"])
async def test_a_film_that_is_read_by_ranges_is_listed_once_by_a_confined_decoder(has_index: bool) -> None:
    """Of a film without an index that is all of its bytes."""
    film = make_noise_film(600)
    store = Store(film if has_index else copied(film, "matroska"))
    media = Media(GatewayConfig(listen="", target="t:1", decode_workers=1))
    try:
        source = await store.source()
        await media.plan_segments(source, Cut(3.0))
        asked, found = [store.asked], []
        for group in GROUPS:
            found += await media.sample_windows(source, 4, group)
            asked.append(store.asked)
        anew = []
        for group in GROUPS:
            anew += await media.sample_windows(await store.source(), 4, group)
        asked_anew = store.asked  # for the last group
    finally:
        media.close()
    for one, other in zip(found, anew, strict=True):
        assert isinstance(one, SampledVideo) and isinstance(other, SampledVideo)
        assert np.array_equal(one.frames, other.frames) and one.timestamps_s == other.timestamps_s
    assert asked[-1] - asked[-2] < asked_anew, "who has not listed the film must"
