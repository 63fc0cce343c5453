"""Films with several prompts a segment and a summary of the whole, through the real stack: texts are those of plain
transformers, whatever the method, and a gateway that is killed makes no answer twice."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pyarrow import parquet
from redis.asyncio import Redis

import slipstream
from slipstream.archive.film_results import segments_of, summary_of
from slipstream.archive.messages import BatchItem, BatchOptions, Job, JobPart
from slipstream.archive.queue import JobState
from slipstream.archive.redis_queue import RedisQueue
from slipstream.cli.archive.job_lines import job_record
from slipstream.cli.archive.output import Format, Output, export
from slipstream.errors import InvalidRequest, LimitExceeded
from slipstream.messages import SegmentCaption
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_gateways import END_S, ArchiveGateways
from tests.support.films import Film, frame_times, make_film
from tests.support.processes import START_S, STOP_S, eventually, logged
from tests.support.variants import some
from tests.support.world import World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCENES, START_PTS_S = [16] * 3, 1.5
PROMPTS = ("What moves?", "Which colours are there?")
CAPTION = {"num_frames": 4, "max_new_tokens": 24}
FILM = {"segments": "fixed:2s", "prompts": PROMPTS, "summary": True, "summary_prompt": "Sum up."}
TIMES = ("[00:00:02 - 00:00:04]", "[00:00:04 - 00:00:06]", "[00:00:06 - 00:00:08]")


@pytest.fixture(scope="module")
def film() -> Film:
    return make_film(SCENES, frame_times(SCENES, 0.125, START_PTS_S), codec="ffv1")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(stack: Stack, world: World, film: Film) -> tuple[list[list[str]], str]:
    """What plain decoding says of each segment, prompt by prompt; and what plain transformers say of those texts."""
    texts = [await texts_of(stack, film, prompt=prompt, segments="fixed:2s") for prompt in PROMPTS]
    by_segment = [list(answers) for answers in zip(*texts, strict=True)]
    return by_segment, summary_of_texts(world, by_segment)


async def texts_of(stack: Stack, film: Film, **options: Any) -> list[str]:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        parts = captioner.caption_segments(film.data, method="autoregressive", **options, **CAPTION)
        return [part.text async for part in parts]


def summary_of_texts(world: World, by_segment: list[list[str]]) -> str:
    said = [" ".join(" ".join(text.split()) for text in texts) for texts in by_segment]
    lines = [f"{times} {words}" for times, words in zip(TIMES, said, strict=True)]
    answer = world.reference.text_answer("\n".join(["Sum up.", "", *lines]), CAPTION["max_new_tokens"])
    return world.reference.text(answer)


# -- interactive ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    some(
        ["autoregressive", "slipstream", "slipstream_tree", "sd_tree", "specvlm", "std", "hints", "prompt_lookup"],
        keep=("autoregressive", "slipstream_tree", "hints"),
    ),
)
async def test_all_answers_and_the_summary_are_those_of_plain_decoding(
    stack: Stack, film: Film, expected: tuple[list[list[str]], str], method: str
) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        parts = [part async for part in captioner.caption_segments(film.data, method=method, **FILM, **CAPTION)]
    *segments, whole = parts
    assert [list(part.texts) for part in segments] == expected[0]
    assert all(part.text == part.texts[0] for part in segments)
    assert whole.text == expected[1] and len(whole.captions) == 1
    times = (whole.segment.number, whole.segment.start_s, whole.segment.end_s, whole.segment.is_summary)
    assert times == (3, START_PTS_S, START_PTS_S + 6, True)
    assert whole.caption is not None and whole.caption.video.num_frames == 0
    assert (whole.caption.video.video_tokens, whole.caption.speculation.kept_tokens) == (0, 0)


async def test_a_draft_takes_part_in_the_summary(stack: Stack, film: Film) -> None:
    async def judged() -> bool:
        async with slipstream.connect_async(stack.gateway_address) as captioner:
            options = FILM | {"segments": "fixed:6s", "prompts": (), "gate": False, "max_new_tokens": 96}
            parts = captioner.caption_segments(film.data, **options, num_frames=4)
            (whole,) = [part async for part in parts if part.segment.is_summary]
            assert whole.caption is not None and whole.caption.speculation.drafts_lost == 0
            return whole.caption.speculation.judged > 0

    for _ in range(5):  # on a busy machine one may be over before the draft is ready
        if await judged():
            return
    raise AssertionError("no draft took part in any summary")


async def test_the_second_prompt_finds_the_prefill_of_the_first(stack: Stack, film: Film) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        parts = captioner.caption_segments(
            film.data, segments="fixed:2s", prompts=("Name the shapes.", "Name the colours."), **CAPTION
        )
        async for part in parts:
            first, second = (caption.video for caption in part.captions)
            assert second.reused_tokens > second.video_tokens * 0.9, "all up to the text"
            assert second.video_tokens == first.video_tokens


async def test_captions_that_do_not_fit_the_context_are_summed_up_in_groups(stack: Stack, film: Film) -> None:
    """The context has 4,096 tokens."""
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        options: dict[str, Any] = {"segments": "fixed:1s", "summary": True, "num_frames": 1, "max_new_tokens": 16}
        (whole,) = await wholes(captioner, film, summary_prompt="?" * 3700, **options)
        assert whole.caption is not None and whole.text
        assert whole.caption.video.warnings[0].startswith("6 texts do not fit the model's context at once; they were")
        (refused,) = await wholes(captioner, film, summary_prompt="?" * 3780, **options)
        assert refused.caption is None and "no room for two captions and a summary" in refused.segment.error


async def wholes(captioner: Any, film: Film, **options: Any) -> list[SegmentCaption]:
    return [part async for part in captioner.caption_segments(film.data, **options) if part.segment.is_summary]


async def test_what_only_films_have(stack: Stack, film: Film) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        for asked in ({"summary": True}, {"prompts": PROMPTS}):
            with pytest.raises(InvalidRequest, match="is for a film's segments"):
                await captioner.caption(film.data, **asked)
        with pytest.raises(InvalidRequest, match="ask something"):
            captioner.caption_segments(film.data, segments="fixed:2s", prompts=["a", " "])
        with pytest.raises(LimitExceeded, match="at most 16"):
            captioner.caption_segments(film.data, segments="fixed:2s", prompts=["a"] * 17)
        with pytest.raises(InvalidRequest, match="prompt is empty"):
            await anext(captioner.caption_segments(film.data, segments="fixed:2s", summary=True, summary_prompt=" "))


# -- archive ----------------------------------------------------------------------------------------------------------


class Archive(ArchiveGateways):
    """Of one film."""

    async def submit(self, process: ServiceProcess, **options: Any) -> str:
        async with self.client(process) as client:
            batch = BatchOptions(caption=CAPTION | FILM | options)
            return (await client.submit(batch, [BatchItem("film", str(self.folder / "film.mkv"))])).batch_id

    def kept(self, process: ServiceProcess) -> list[int]:
        return [entry["part"] for entry in logged(process.log_path, "part.kept", answer="kept")]

    async def kill_at_note(self, gateway: ServiceProcess) -> None:
        """As soon as it says that it has kept a partial summary, or the whole."""
        notes = lambda: logged(gateway.log_path, "note.kept", answer="kept")  # noqa: E731
        await eventually(lambda: notes() or WHOLE in self.kept(gateway), END_S)
        await self.kill(gateway)

    def partial_summaries(self) -> list[list[str]]:
        """Level and number of each that the target was last asked for, up to the summary of the whole."""
        names = [entry["request_id"] or "" for entry in logged(self.target.log_path, "session.opened")]
        ends = [number for number, name in enumerate(names) if name.endswith("-whole")]
        last = [name.partition("-whole-")[2] for name in names[: ends[-1]] if name.startswith(names[ends[-1]] + "-")]
        return [name.split("-") for name in last]

    def runs_of(self, job_id: str) -> int:
        """How many there were, by what came to the target."""
        return max(int(name[0]) for name in self.names_of(job_id))

    async def jobs(self, process: ServiceProcess, batch_id: str) -> list[Job]:
        async with self.client(process) as client:
            return [job async for job in client.jobs(batch_id)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def archive(stack: Stack, film: Film, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Archive]:
    folder: Path = tmp_path_factory.mktemp("summaries")
    (folder / "film.mkv").write_bytes(film.data)
    async with EmbeddedServer(folder / "redis") as redis:
        made = Archive(folder, redis.url, stack.processes["target"])
        try:
            yield made
        finally:
            for process in made.processes:
                await process.stop(STOP_S)


def check_job(job: Job, parts: list[JobPart], expected: tuple[list[list[str]], str]) -> None:
    assert (job.state, job.error, job.parts_done, job.parts_total) == (JobState.DONE, "", 7, 7)
    assert [result.texts for result in segments_of(parts)] == expected[0]
    whole = summary_of(parts)
    assert whole is not None and whole.caption is not None and whole.receipt is not None
    assert whole.caption.text == expected[1]
    prompts = [[part.receipt and part.receipt.options["prompt"] for part in one.answers] for one in segments_of(parts)]
    assert prompts == [list(PROMPTS)] * 3


@pytest.mark.parametrize(
    "when", some(["behind a first answer", "before the summary", "in the summary"], keep=("before the summary",))
)
async def test_a_killed_gateway_makes_no_answer_twice(
    archive: Archive, expected: tuple[list[list[str]], str], when: str
) -> None:
    gateway = await archive.start_gateway("--archive-slots", "1")
    batch_id = await archive.submit(gateway)
    queue = RedisQueue(archive.redis_url)
    try:
        (job,), _ = await queue.list_jobs(batch_id)
        if when == "in the summary":
            await eventually(lambda: [name for name in archive.names_of(job.job_id) if "whole" in name], START_S)
        else:
            await eventually(lambda: len(archive.kept(gateway)) >= (6 if when == "before the summary" else 1), START_S)
        await archive.kill(gateway)
        done, _ = await queue.list_parts(batch_id, job.job_id)
    finally:
        await queue.close()
    other = await archive.start_gateway()
    ended, parts = await archive.ended(other, batch_id)
    check_job(ended, parts, expected)
    written, kept = Counter([*archive.kept(gateway), *archive.kept(other)]), {part.number for part in done}
    assert set(written.values()) == {1}, "no part was written twice"
    assert {*written, *kept} == set(range(7)), "one that was kept just before the kill has no line in the log"
    assert kept.isdisjoint(archive.kept(other))
    await archive.kill(other)


GROUPED: dict[str, Any] = {"segments": "fixed:0.75s", "num_frames": 1, "max_new_tokens": 16}
GROUPED |= {"summary_prompt": "?" * 3740}
"""Two captions or so fit one prompt: eight segments have partial summaries, and these have some."""
WHOLE, IN_TURN = 8, ("--archive-slots", "1", "--lease-s", "1")


@pytest.mark.long
async def test_a_gateway_killed_at_every_partial_summary_makes_none_twice(
    archive: Archive, stack: Stack, film: Film
) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        (undisturbed,) = await wholes(captioner, film, summary=True, **GROUPED)
    partial = archive.partial_summaries()
    assert len(partial) >= 4 and partial[-1][0] != "1", "of captions, and of their summaries"
    gateway = await archive.start_gateway(*IN_TURN)
    batch_id = await archive.submit(gateway, prompts=(), **GROUPED)
    (job_id,) = [job.job_id for job in await archive.jobs(gateway, batch_id)]
    known: list[tuple[int, int]] = []
    async with Redis.from_url(archive.redis_url) as redis:
        while not known or known[-1][1] not in (
            0,
            len(partial),
        ):  # 0: the summary of the whole was there before the kill
            await archive.kill_at_note(gateway)
            notes = sum(field.startswith(b"n:") for field in await redis.hkeys(f"{{slipstream}}:p:{job_id}"))
            known.append((archive.runs_of(job_id), notes))
            gateway = await archive.start_gateway(*IN_TURN)
    assert known[0][1], "at least one was killed in between"
    job, parts = await archive.ended(gateway, batch_id)
    whole = summary_of(parts)
    assert whole is not None and whole.caption is not None and undisturbed.caption is not None
    assert whole.caption.text == undisturbed.text
    assert whole.caption.video.warnings == undisturbed.caption.video.warnings
    for run, notes in known:
        later = [name[1:] for name in archive.names_of(job_id) if int(name[0]) > run]
        assert not [name for name in later if name[1:] in partial[:notes]], "none that was kept is begun again"
        assert not [name for name in later if "whole" not in name], "nor is any segment"
    assert (job.state, job.parts_done) == (JobState.DONE, WHOLE + 1)
    await archive.kill(gateway)


async def test_the_line_of_a_film_has_its_answers_and_its_summary(
    archive: Archive, expected: tuple[list[list[str]], str]
) -> None:
    gateway = await archive.start_gateway()
    batch_id = await archive.submit(gateway)
    job, parts = await archive.ended(gateway, batch_id)
    check_job(job, parts, expected)
    record = json.loads(json.dumps(job_record(job, parts)))
    assert record["summary"]["text"] == expected[1] and record["summary"]["receipt"]["options"]["prompt"]
    assert [[one["text"] for one in part["answers"]] for part in record["parts"]] == expected[0]
    assert [one["prompt"] for one in record["parts"][0]["answers"]] == list(PROMPTS)
    assert record["text"] == "\n\n".join(text for texts in expected[0] for text in texts)
    async with archive.client(gateway) as client:
        batch = await client.get(batch_id)
        table = archive.folder / "films.parquet"
        assert await export(client, batch_id, Output(str(table), Format.PARQUET)) == {"done": 1}
    rows = parquet.read_table(table).to_pylist()
    assert [(row["text"], row["start_s"]) for row in rows] == [
        (expected[1], START_PTS_S),
        *((text, START_PTS_S + 2 * number) for number, texts in enumerate(expected[0]) for text in texts),
    ]
    assert batch.totals.segments == 3
    assert batch.totals.video_s == pytest.approx(6, abs=0.2), "the film's seconds count once"
    single, (*some, whole) = await archive.ended(gateway, await archive.submit(gateway, prompts=[PROMPTS[0]]))
    assert (single.parts_total, len(some)) == (4, 3) and whole.segment is not None and whole.segment.is_summary
    await archive.kill(gateway)


async def test_a_summary_that_cannot_be_made_is_an_error_of_its_own(archive: Archive) -> None:
    gateway = await archive.start_gateway()
    long = "?" * 3990
    job, parts = await archive.ended(gateway, await archive.submit(gateway, summary_prompt=long))
    whole = summary_of(parts)
    assert job.state is JobState.DONE and whole is not None and whole.caption is None
    assert "no room for two captions" in whole.error and all(part.caption for part in parts[:-1])
    assert job_record(job, parts)["summary"] == {"error": whole.error}
    await archive.kill(gateway)
