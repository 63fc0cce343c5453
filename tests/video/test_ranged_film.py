"""Films that a decoder is given by ranges: the frames of the file itself, few of its bytes, and readers that fail."""

import asyncio
import io
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import LimitExceeded, ObjectChanged, ObjectUnavailable, UnreadableVideo
from slipstream.video.boxes import HEADER_BYTES, IndexedBoxes
from slipstream.video.decode import sample_video
from slipstream.video.film_windows import plan_segments, plan_shots, sample_windows
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.pool import DecodePool
from slipstream.video.ranged_film import LEAST_CHARGED, LEAST_GIVEN, MOST_PASSES, RangedFilm, media_of, served
from slipstream.video.ranged_wire import ASKED, GIVEN, MOST_ASKED
from tests.support.clip_kinds import CLIPS, OLD_CLIPS
from tests.support.films import make_noise_film
from tests.support.media import make_clip
from tests.support.variants import one_in

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = DecodeLimits(formats="all")
ALL_CLIPS = {**CLIPS, **OLD_CLIPS["archive"]}
WINDOWS = ((2.0, 3.0), (11.0, 12.0))


@dataclass
class Bytes:
    """A store of one film."""

    data: bytes
    asked: list[tuple[int, int]] = field(default_factory=list)
    fail_after: int | None = None
    """Questions that are answered."""
    delay_s: float = 0.0
    on_asked: Callable[[int], None] = lambda number: None
    """Told which question has come, from 1."""

    async def read(self, start: int, end: int) -> bytes:
        self.asked.append((start, end))
        self.on_asked(len(self.asked))
        if self.fail_after is not None and len(self.asked) > self.fail_after:
            raise ObjectChanged("it changed")
        await asyncio.sleep(self.delay_s)
        return self.data[start:end]

    @property
    def share(self) -> float:
        return sum(end - start for start, end in self.asked) / len(self.data)

    async def film(self) -> RangedFilm:
        found = RangedFilm(len(self.data), self.read, await media_of(len(self.data), self.read), "object-1")
        self.asked.clear()
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    made = DecodePool(1, LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def large() -> bytes:
    """20 s in groups of 12 frames, of several MB."""
    return make_noise_film(500)


def same(found: SampledVideo, wanted: SampledVideo) -> bool:
    facts = [(video.timestamps_s, video.duration_s, video.codec, video.warnings) for video in (found, wanted)]
    return facts[0] == facts[1] and np.array_equal(found.frames, wanted.frames)


@pytest.mark.parametrize("name", ALL_CLIPS)
@one_in(3, "name")
async def test_the_frames_are_those_of_the_file(pool: DecodePool, name: str) -> None:
    data = make_clip(ALL_CLIPS[name])
    found = await pool.sample(await Bytes(data).film(), 8)
    assert same(found, sample_video(io.BytesIO(data), 8, LIMITS))


@pytest.mark.parametrize("num_frames", [1, 8])
async def test_of_a_film_with_an_index_few_bytes_are_asked_for(pool: DecodePool, large: bytes, num_frames: int) -> None:
    store = Bytes(large)
    found = await pool.sample(await store.film(), num_frames)
    assert same(found, sample_video(io.BytesIO(large), num_frames, LIMITS))
    assert store.share < 0.5


async def test_segments_and_shots_are_those_of_the_file(pool: DecodePool, large: bytes) -> None:
    store = Bytes(large)
    film = await store.film()
    assert await pool.plan_segments(film, 2.0) == plan_segments(io.BytesIO(large), 2.0, LIMITS)
    assert store.share < 0.3
    wanted = plan_shots(io.BytesIO(large), (0.0, 2.0), 0.0, LIMITS)
    assert await pool.plan_segments(film, 0.0, piece=(0.0, 2.0)) == wanted
    found = await pool.sample_windows(film, 2, WINDOWS)
    for one, other in zip(found, sample_windows(io.BytesIO(large), 2, WINDOWS, LIMITS), strict=True):
        assert isinstance(one, SampledVideo) and isinstance(other, SampledVideo) and same(one, other)


@pytest.mark.parametrize("fail_after", [0, 1, 5, 30])
async def test_a_film_that_fails_raises_why_and_costs_no_decoder(
    pool: DecodePool, large: bytes, fail_after: int
) -> None:
    await pool.sample(await Bytes(large).film(), 1)
    before = pool.pids
    film = await Bytes(large).film()
    broken = Bytes(large, fail_after=fail_after)
    with pytest.raises(ObjectChanged, match="it changed"):
        await pool.sample(RangedFilm(film.num_bytes, broken.read, film.media, ""), 64)
    assert pool.pids == before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
async def test_a_decoder_that_is_killed_at_a_question_is_replaced_and_the_frames_are_the_same(
    pool: DecodePool, large: bytes, share: float
) -> None:
    store = Bytes(large)
    film = await store.film()
    wanted = await pool.sample_windows(film, 8, WINDOWS)
    num_questions = len(store.asked)
    struck = 1 + int(share * num_questions)
    (pid,), asked_first = pool.pids, set(pool._decoders)
    strikes: list[int] = []

    def strike(number: int) -> None:
        if number == num_questions + struck:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # only then does its own child end, which decodes
            strikes.append(number)

    store.on_asked = strike
    found = await pool.sample_windows(film, 8, WINDOWS)
    assert strikes, "the question came"
    assert not asked_first & pool._decoders, "another decoder has answered"
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, SampledVideo) and isinstance(other, SampledVideo) and same(one, other)


async def test_a_store_that_is_too_slow_is_at_fault_and_not_the_film(large: bytes) -> None:
    hasty = DecodePool(1, DecodeLimits(formats="all", timeout_s=1.0))
    film = await Bytes(large).film()
    slow = Bytes(large, delay_s=0.6)
    try:
        with pytest.raises(ObjectUnavailable, match="too slow"):
            await hasty.sample(RangedFilm(film.num_bytes, slow.read, film.media, ""), 64)
    finally:
        hasty.close()


async def test_other_errors_are_those_of_the_file(pool: DecodePool) -> None:
    with pytest.raises(UnreadableVideo, match="not recognised"):
        await pool.sample(await Bytes(b"\1" * 5000).film(), 1)
    strict = DecodePool(1, DecodeLimits(max_ranged_bytes=10))
    try:
        with pytest.raises(LimitExceeded, match="bytes"):
            await strict.sample(await Bytes(b"\1" * 5000).film(), 1)
    finally:
        strict.close()


@pytest.mark.parametrize("question", [(0, 0), (9, 2), (0, 2 * MOST_ASKED), (2**63, 1)])
async def test_a_question_that_no_sound_decoder_asks_ends_the_talk(question: tuple[int, int]) -> None:
    film = await Bytes(b"\1" * 10).film()
    async with served(film, 60.0) as descriptor, talk(descriptor) as (reader, writer):
        writer.write(ASKED.pack(*question))
        assert await reader.read() == b""


async def test_small_questions_are_bounded_and_leave_the_loop_to_others() -> None:
    """What is at hand already is given without a wait, so a captured decoder could keep the loop for itself."""

    async def at_hand(start: int, end: int) -> bytes:
        return b"\1" * (end - start)

    film, turns = RangedFilm(10, at_hand, (), ""), 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with served(film, 60.0) as descriptor, talk(descriptor) as (reader, writer):
        counting = asyncio.create_task(others())
        writer.write(ASKED.pack(0, 1) * 10**5)
        answers = await reader.read()
        counting.cancel()
    num_answers = len(answers) // (GIVEN.size + 1)
    most = (MOST_PASSES * film.num_bytes + LEAST_GIVEN) // LEAST_CHARGED
    assert num_answers == most and turns >= num_answers


async def test_a_fault_of_this_process_is_no_fault_of_the_film(pool: DecodePool) -> None:
    async def broken(start: int, end: int) -> bytes:
        raise KeyError("nobody foresaw this")

    with pytest.raises(ObjectUnavailable, match="could not be read"):
        await pool.sample(RangedFilm(5000, broken, (), ""), 1)


@asynccontextmanager
async def talk(descriptor: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A decoder's end of the socket, behind the film's facts."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=os.dup(descriptor)))
    (num_bytes,) = GIVEN.unpack(await reader.readexactly(GIVEN.size))
    await reader.readexactly(num_bytes)
    yield reader, writer
    writer.close()


# -- boxes ------------------------------------------------------------------------------------------------------------

BOXES = st.lists(st.tuples(st.sampled_from(["moov", "mdat", "free", "moof"]), st.integers(0, 40)), max_size=6)


def written(kind: str, size: int) -> bytes:
    return (size + 16).to_bytes(4, "big") + kind.encode() + bytes(size + 8)


@given(BOXES, st.integers(0, 20))
async def test_media_are_found_in_whole_files_with_one_index_alone(boxes: list[tuple[str, int]], cut: int) -> None:
    parts = [("ftyp", 8), *boxes]
    whole = b"".join(written(*part) for part in parts)
    data = whole[: len(whole) - cut]
    found = IndexedBoxes(len(data))
    while not found.is_done:
        found.add(data[found.position : found.position + HEADER_BYTES])
    kinds = [kind for kind, _ in parts]
    starts = [0, *accumulate(len(written(*part)) for part in parts)]
    expected = tuple(
        (starts[place] + HEADER_BYTES, starts[place + 1]) for place, kind in enumerate(kinds) if kind == "mdat"
    )
    is_sound = not cut and "moov" in kinds and "moof" not in kinds
    assert found.media == (expected if is_sound else ())
