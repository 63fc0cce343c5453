"""Films in segments through the real stack: their times, their texts, and gateways that are killed in the middle."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

import slipstream
from slipstream.archive.messages import BatchItem, BatchOptions, Job, JobKind, JobPart
from slipstream.archive.queue import JobState
from slipstream.archive.redis_queue import RedisQueue
from slipstream.errors import InvalidRequest
from slipstream.messages import FilmFacts
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from slipstream.stack.redis_server import EmbeddedServer
from slipstream.video.film_windows import NO_FRAME
from tests.support.archive_gateways import ArchiveGateways
from tests.support.films import Film, frame_times, make_film, scene, torn, write_film
from tests.support.processes import START_S, STOP_S, eventually, logged
from tests.support.variants import some

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCENES, STEP_S, START_PTS_S = [16] * 6, 0.125, 7.5
CAPTION = {"num_frames": 4, "max_new_tokens": 24}
SEGMENTS = {"segments": "fixed:2s"}


@pytest.fixture(scope="module")
def film() -> Film:
    """Six scenes of two seconds; the container's clock does not begin at 0."""
    return make_film(SCENES, frame_times(SCENES, STEP_S, START_PTS_S), codec="ffv1")


@pytest.fixture(scope="module")
def returning() -> bytes:
    """The film's first two scenes, and both again."""
    pictures = [picture for number in (0, 1) for picture in scene(number, SCENES[number])]
    return write_film(pictures * 2, frame_times([len(pictures)] * 2, STEP_S), codec="ffv1")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def texts(stack: Stack, film: Film) -> list[str]:
    """What plain decoding says of clips of the same frames."""
    said = []
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        for number, num_frames in enumerate(SCENES):
            clip = write_film(scene(number, num_frames), frame_times([num_frames], STEP_S), codec="ffv1")
            said.append((await captioner.caption(clip, method="autoregressive", **CAPTION)).text)
    assert len(set(said)) > 1, "not all scenes look alike"
    return said


# -- interactive ------------------------------------------------------------------------------------------------------


async def test_segments_have_true_times_and_the_texts_of_plain_captions(
    stack: Stack, film: Film, texts: list[str]
) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        fixed = [part async for part in captioner.caption_segments(film.data, **SEGMENTS, **CAPTION)]
        shots = [part async for part in captioner.caption_segments(film.data, segments="shots", **CAPTION)]
    for parts in (fixed, shots):
        assert [part.segment.start_s for part in parts] == pytest.approx(film.scenes_s)
        assert [part.segment.end_s for part in parts] == pytest.approx([*film.scenes_s[1:], START_PTS_S + 12])
        assert [part.segment.number for part in parts] == list(range(6))
        assert [part.text for part in parts] == texts
    assert all(part.caption and part.caption.video.timestamps_s[0] == 0 for part in fixed)
    assert [token.piece for token in fixed[0].caption.tokens] if fixed[0].caption else False


async def test_frames_of_each_second_are_counted_by_the_length_of_the_clip_or_segment(
    stack: Stack, film: Film, texts: list[str]
) -> None:
    clip = write_film(scene(0, SCENES[0]), frame_times([SCENES[0]], STEP_S), codec="ffv1")
    many = {**CAPTION, "num_frames": 16, "fps": 2.0}
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        whole = await captioner.caption(clip, **many)
        parts = [part async for part in captioner.caption_segments(film.data, **SEGMENTS, **many)]
    assert (whole.video.num_frames, whole.text) == (CAPTION["num_frames"], texts[0])
    assert [part.text for part in parts] == texts and not whole.video.warnings


@pytest.mark.parametrize("method", ["hsd", "hints", "hints_draft"])
async def test_later_segments_draft_from_the_texts_of_earlier_ones(
    stack: Stack, returning: bytes, texts: list[str], method: str
) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        parts = [part async for part in captioner.caption_segments(returning, method=method, **SEGMENTS, **CAPTION)]
    assert [part.text for part in parts] == texts[:2] * 2
    taken = [part.caption.speculation.accepted_prediction_tokens for part in parts if part.caption]
    assert taken[0] == 0, "the first segment has no hints"
    if method == "hsd":  # which asks no clock whether a row pays
        assert sum(taken[2:]) > 0, "the last two have been seen before"


async def test_a_film_that_is_shorter_than_a_segment_is_one(stack: Stack, film: Film) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        events = [event async for event in captioner.film_events(film.data, segments="fixed:1000s", **CAPTION)]
    facts = events[0]
    assert isinstance(facts, FilmFacts) and facts.num_segments == 1 and facts.start_s == START_PTS_S
    assert facts.warnings == ("the film lasts 12.000 s, less than a segment of 1000 s: it is one",)


async def test_bad_films_and_bad_segments_end_in_clear_errors(stack: Stack, film: Film) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        for segments, said in (
            ("fixed:0s", "at least 0.001 s"),
            ("fixed:-1s", "unknown"),
            ("scenes", "shots, or none"),
        ):
            with pytest.raises(InvalidRequest, match=said):
                captioner.caption_segments(film.data, segments=segments)
        with pytest.raises(InvalidRequest, match="say how the film is to be cut"):
            captioner.caption_segments(film.data)
        with pytest.raises(InvalidRequest, match="segments must be left out of one caption: CaptionSegments"):
            await captioner.caption(film.data, **SEGMENTS)
        with pytest.raises(InvalidRequest, match="a page has no segments"):
            captioner.read_document(b"%PDF", **SEGMENTS)
        with pytest.raises(InvalidRequest, match="not recognised"):
            await anext(captioner.caption_segments(b"no film", **SEGMENTS))


@pytest.fixture(scope="module")
def sound() -> bytes:
    """The film in a codec that notices damage, each of its pictures by itself."""
    return make_film(SCENES, frame_times(SCENES, STEP_S, START_PTS_S), key_every=1).data


@pytest.fixture(scope="module")
def torn_film(sound: bytes) -> bytes:
    """The same without the pictures of the third scene."""
    return torn(sound, range(2 * SCENES[0], 3 * SCENES[0]))


async def test_a_segment_that_cannot_be_decoded_says_so_and_the_others_go_on(
    stack: Stack, sound: bytes, torn_film: bytes
) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        whole = [part.text async for part in captioner.caption_segments(sound, **SEGMENTS, **CAPTION)]
        parts = [part async for part in captioner.caption_segments(torn_film, **SEGMENTS, **CAPTION)]
    assert [part.text for part in parts] == [*whole[:2], "", *whole[3:]]
    assert parts[2].segment.error == NO_FRAME and parts[2].caption is None
    assert parts[2].segment.start_s == START_PTS_S + 4 and all(whole)


# -- archive ----------------------------------------------------------------------------------------------------------


class Archive(ArchiveGateways):
    """The same for films."""

    async def submit(self, process: ServiceProcess, name: str, segments: str = "fixed:2s") -> str:
        async with self.client(process) as client:
            options = BatchOptions(caption=CAPTION | {"segments": segments})
            return (await client.submit(options, [BatchItem(name, str(self.folder / name))])).batch_id

    def kept(self, process: ServiceProcess) -> list[int]:
        """Segments that this gateway says it has written."""
        return [entry["segment"] for entry in logged(process.log_path, "part.kept", answer="kept")]

    def opened(self, job_id: str) -> list[tuple[int, int]]:
        """Run and segment of every caption that the target has begun for the job."""
        return [(int(run), int(segment.removeprefix("s"))) for run, segment in self.names_of(job_id)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def archive(stack: Stack, film: Film, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Archive]:
    folder = tmp_path_factory.mktemp("films")
    (folder / "film.mkv").write_bytes(film.data)
    async with EmbeddedServer(folder / "redis") as redis:
        made = Archive(folder, redis.url, stack.processes["target"])
        try:
            yield made
        finally:
            for process in made.processes:
                await process.stop(STOP_S)


def check_film(job: Job, parts: Sequence[JobPart], film: Film, texts: Sequence[str]) -> None:
    assert (job.state, job.kind, job.error) == (JobState.DONE, JobKind.FILM, "")
    assert (job.parts_done, job.parts_total) == (len(texts), len(texts))
    assert [part.number for part in parts] == list(range(len(texts)))
    assert [part.segment.start_s for part in parts if part.segment] == pytest.approx(film.scenes_s)
    assert [part.caption and part.caption.text for part in parts] == list(texts)
    for part in parts:
        assert part.receipt is not None and part.receipt.target.revision and part.receipt.text_sha256
        assert part.receipt.options["segments"] == "fixed:2s"


@pytest.mark.parametrize(
    "is_whole", some([True, False], keep=(False,)), ids=["behind a part", "in the middle of a segment"]
)
async def test_a_killed_gateway_captions_no_segment_twice(
    archive: Archive, film: Film, texts: list[str], is_whole: bool
) -> None:
    gateway = await archive.start_gateway("--archive-slots", "1" if is_whole else "2")
    batch_id = await archive.submit(gateway, "film.mkv")
    queue = RedisQueue(archive.redis_url)
    try:
        (job,), _ = await queue.list_jobs(batch_id)
        await eventually(lambda: archive.kept(gateway), START_S)
        before = len(archive.opened(job.job_id))
        if not is_whole:
            await eventually(lambda: len(archive.opened(job.job_id)) > min(before, len(SCENES) - 1), START_S)
        await archive.kill(gateway)
        done, _ = await queue.list_parts(batch_id, job.job_id)
    finally:
        await queue.close()
    kept = {part.number for part in done}
    assert kept, "some were done before the death; all of them only where this process was kept from killing in time"
    other = await archive.start_gateway()
    ended, parts = await archive.ended(other, batch_id)
    check_film(ended, parts, film, texts)
    assert not [segment for run, segment in archive.opened(job.job_id) if run > 1 and segment in kept]
    written = Counter([*archive.kept(gateway), *archive.kept(other)])
    assert set(written.values()) == {1}, "no part was written twice"
    await archive.kill(other)


async def test_the_archive_marks_what_cannot_be_decoded_and_refuses_what_cannot_be_cut(
    archive: Archive, film: Film, torn_film: bytes
) -> None:
    (archive.folder / "torn.mkv").write_bytes(torn_film)
    gateway = await archive.start_gateway()
    job, parts = await archive.ended(gateway, await archive.submit(gateway, "torn.mkv"))
    assert job.state is JobState.DONE and job.parts_done == len(SCENES)
    assert [part.error for part in parts] == ["", "", NO_FRAME, "", "", ""]
    assert [bool(part.caption and part.caption.text) for part in parts] == [True, True, False, True, True, True]
    whole, (part,) = await archive.ended(gateway, await archive.submit(gateway, "film.mkv", "fixed:60s"))
    assert whole.state is JobState.DONE and part.caption is not None
    assert "less than a segment" in part.caption.video.warnings[0]
    with pytest.raises(InvalidRequest, match=r"at least 0\.001 s"):
        await archive.submit(gateway, "film.mkv", "fixed:0s")
    await archive.kill(gateway)
