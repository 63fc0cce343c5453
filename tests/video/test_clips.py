"""Clips that are cut out of films by a confined process: their pictures, and what happens to bad films."""

import asyncio
import io
import math
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.errors import InvalidConfig, LimitExceeded, ObjectChanged, ServiceUnavailable, UnreadableVideo
from slipstream.video.clip_process import MOST_BYTES, Clip, ClipCutter, read_cut
from slipstream.video.decoder_process import Decoder, DecoderSpec
from slipstream.video.messages import BadAnswer
from slipstream.video.ranged_film import RangedFilm, media_of
from tests.support.clip_kinds import CLIPS
from tests.support.films import Film, frame_times, make_film, make_noise_film
from tests.support.media import make_clip

STEP_S, START_S, SCENES = 0.125, 7.5, [16, 16, 16]


@pytest_asyncio.fixture
async def cutter() -> AsyncIterator[ClipCutter]:
    async with ClipCutter() as running:
        yield running


def film_of(codec: str, container: str = "matroska") -> Film:
    begins_s = 0.0 if container == "avi" else START_S  # AVI counts pictures from 0
    times_s = frame_times(SCENES, STEP_S, begins_s)
    options = {"bf": "2"} if codec == "mpeg4" else None  # whose groups are open: some pictures need the group before
    return make_film(SCENES, times_s, codec=codec, container=container, key_every=4, codec_options=options)


def shown(data: bytes) -> list[tuple[float, NDArray[np.uint8]]]:
    """Seconds and pictures of a file."""
    with av.open(io.BytesIO(data)) as container:
        return [(float(frame.time or 0), frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


async def cut(cutter: ClipCutter, data: bytes, start_s: float, end_s: float, folder: Path) -> Clip:
    path = folder / "film"
    path.write_bytes(data)
    with path.open("rb") as film:
        return await cutter.cut(film, start_s, end_s, folder / "deep" / "clip.mkv")


KINDS = [("libx264", "matroska"), ("libx264", "mp4"), ("mpeg4", "avi"), ("mpeg4", "mp4"), ("ffv1", "matroska")]


@dataclass
class Bytes:
    """A store of one film that counts what it gives."""

    data: bytes
    given: int = 0
    fails: bool = False

    async def read(self, start: int, end: int) -> bytes:
        if self.fails:
            raise ObjectChanged("it changed")
        self.given += end - start
        return self.data[start:end]

    async def film(self) -> RangedFilm:
        return RangedFilm(len(self.data), self.read, await media_of(len(self.data), self.read), "")


@pytest.mark.asyncio
@pytest.mark.parametrize(("codec", "container"), KINDS)
async def test_a_clip_of_a_film_that_is_elsewhere_is_that_of_the_file(
    cutter: ClipCutter, codec: str, container: str, tmp_path: Path
) -> None:
    film = film_of(codec, container)
    start_s = shown(film.data)[0][0] + 2.125
    here = (await cut(cutter, film.data, start_s, start_s + 1.375, tmp_path)).path.read_bytes()
    there = await cutter.cut(await Bytes(film.data).film(), start_s, start_s + 1.375, tmp_path / "there.mkv")
    found, wanted = shown(there.path.read_bytes()), shown(here)
    assert [at_s for at_s, _ in found] == [at_s for at_s, _ in wanted] and len(found) >= 11
    assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(found, wanted, strict=True))


@pytest.mark.asyncio
async def test_of_a_film_that_is_elsewhere_only_the_clip_is_read(cutter: ClipCutter, tmp_path: Path) -> None:
    film = make_noise_film(750)
    store = Bytes(film)
    clip = await cutter.cut(await store.film(), 10.0, 12.0, tmp_path / "clip.mkv")
    assert len(shown(clip.path.read_bytes())) >= 50 and store.given < 0.3 * len(film)
    broken = Bytes(film)
    failing = await broken.film()
    broken.fails = True
    with pytest.raises(ObjectChanged, match="it changed"):
        await cutter.cut(failing, 10.0, 12.0, tmp_path / "none.mkv")
    assert (await cutter.cut(await store.film(), 10.0, 12.0, tmp_path / "clip.mkv")).num_bytes == clip.num_bytes
    assert not (tmp_path / "none.mkv").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize(("codec", "container"), KINDS)
async def test_a_clip_has_the_films_pictures(cutter: ClipCutter, codec: str, container: str, tmp_path: Path) -> None:
    film = film_of(codec, container)
    whole = shown(film.data)
    start_s, end_s = whole[0][0] + 2.125, whole[0][0] + 3.5
    clip = await cut(cutter, film.data, start_s, end_s, tmp_path)
    assert clip.num_bytes == clip.path.stat().st_size
    wanted = [picture for at_s, picture in whole if clip.begins_s - 1e-3 <= at_s < end_s - 1e-3]
    found = [picture for _, picture in shown(clip.path.read_bytes())]
    assert start_s - 4 * STEP_S - 1e-3 <= clip.begins_s <= start_s + 1e-3, "a key picture every four"
    assert len(wanted) + 2 >= len(found) >= len(wanted) >= 11, "those at the end need others behind it"
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=False))


@pytest.mark.asyncio
async def test_a_clip_is_copied_of_a_codec_that_is_encoded_under_another_name(
    cutter: ClipCutter, tmp_path: Path
) -> None:
    film = make_clip(CLIPS["av1 mp4"])
    clip = await cut(cutter, film, 0.6, 1.0, tmp_path)
    wanted = [picture for at_s, picture in shown(film) if clip.begins_s - 1e-3 <= at_s < 1.0 - 1e-3]
    found = [picture for _, picture in shown(clip.path.read_bytes())]
    assert clip.begins_s <= 0.6 and len(found) >= len(wanted) >= 10
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=False))


@pytest.mark.asyncio
async def test_bad_films_are_refused_and_the_next_is_cut(cutter: ClipCutter, tmp_path: Path) -> None:
    film = film_of("ffv1")
    for data, said in (
        (b"no film at all", "not recognised"),
        (b"", "empty"),
        (film.data[:300], "."),
    ):
        with pytest.raises(UnreadableVideo, match=said):
            await cut(cutter, data, 8.0, 9.0, tmp_path)
    assert not (tmp_path / "deep").exists()
    assert (await cut(cutter, film.data, 8.0, 9.0, tmp_path)).num_bytes > 0
    (tmp_path / "deep" / "clip.mkv").unlink()
    (tmp_path / "deep").rmdir()
    (tmp_path / "deep").write_text("no folder")
    with pytest.raises(InvalidConfig, match="cannot write"):
        await cut(cutter, film.data, 8.0, 9.0, tmp_path)


@pytest.mark.asyncio
async def test_damaged_films_are_cut_or_refused_and_nothing_hangs(cutter: ClipCutter, tmp_path: Path) -> None:
    sound, chance = film_of("libx264"), random.Random(4)
    for number in range(24):
        damaged = bytearray(sound.data)
        for _ in range(chance.choice([1, 8, 64])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        del damaged[chance.randrange(1, len(damaged)) if number % 4 == 0 else len(damaged) :]
        with suppress(UnreadableVideo):
            assert (await cut(cutter, bytes(damaged), 8.0, 10.0, tmp_path)).num_bytes > 0
    assert cutter.is_alive and (await cut(cutter, sound.data, 8.0, 10.0, tmp_path)).num_bytes > 0


ANSWERS = st.dictionaries(
    st.sampled_from(["num_bytes", "begins_s", "error", "message", "other"]),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["LimitExceeded", "UnreadableVideo", "SystemExit"])
    | st.lists(st.integers(), max_size=2),
)


@given(ANSWERS)
def test_what_a_captured_cutter_says_is_checked(answer: dict[str, Any]) -> None:
    try:
        num_bytes, begins_s = read_cut(answer)
    except (BadAnswer, UnreadableVideo, LimitExceeded) as error:
        assert str(error).isprintable()  # noqa: PT017
        return
    assert 0 < num_bytes <= MOST_BYTES and math.isfinite(begins_s)


@pytest.mark.asyncio
async def test_a_cutter_that_dies_is_told_and_leaves_nothing(cutter: ClipCutter, tmp_path: Path) -> None:
    await cutter.wait_ready()
    os.kill(cutter.process.pid, signal.SIGKILL)
    await asyncio.to_thread(cutter.process.wait)
    with pytest.raises((UnreadableVideo, ServiceUnavailable)):
        await cut(cutter, film_of("ffv1").data, 8.0, 9.0, tmp_path)
    assert not (tmp_path / "deep").exists()


@pytest.mark.asyncio
async def test_a_cutter_is_confined_as_decoders_are() -> None:
    found: list[tuple[str, ...]] = []
    decoder = Decoder(DecoderSpec(memory_bytes=10**9, cpu_s=60), found.append)
    try:
        async with ClipCutter(on_ready=found.append) as cutter:
            await cutter.wait_ready()
            await decoder.wait_ready()
    finally:
        decoder.kill()
        decoder.reap()
    assert found[0] == found[1] and {"memory", "cpu", "files", "privileges"} <= set(found[0])
