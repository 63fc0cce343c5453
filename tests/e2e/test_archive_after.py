"""Before and after a batch, with real services and a real queue: an audit that finds what was altered, marks and their
counts, texts that are found, and what an estimate says."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import pytest_asyncio

from slipstream.archive.audits import AuditOutcome
from slipstream.archive.estimates import NO_WORK
from slipstream.archive.messages import Batch, BatchItem, BatchOptions, Job, JobPart
from slipstream.archive.quality import COUNTED_MARKS, words_of
from slipstream.archive.queue import BatchState, Priority
from slipstream.archive.text_index import parse_question
from slipstream.cli.archive.batch_view import describe, overall
from slipstream.cli.archive.job_lines import job_record
from slipstream.cli.archive.output import Format, Output, export
from slipstream.client.archive_audit import Audit, audit
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.archive_estimate import caption_sample
from slipstream.client.archive_search import open_batch
from slipstream.client.connection import Connection
from slipstream.errors import InvalidRequest, VideoNotFound
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.films import frame_times, make_film
from tests.support.forked_services import command
from tests.support.planted import forge, planted_text
from tests.support.processes import model_flags, running
from tests.support.world import PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": 4, "max_new_tokens": 16}
SEGMENTS = 3
Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Archived:
    """An archive with one batch that is done: three videos and a film."""

    client: ArchiveClient
    address: str
    redis_url: str
    folder: Path
    batch: Batch

    async def records(self) -> Records:
        """The batch as an export has it."""
        path = self.folder / "export.jsonl"
        await export(self.client, self.batch.batch_id, Output(str(path), Format.JSONL))
        return [json.loads(line) for line in path.read_text().splitlines()]

    async def audit(self, records: Records, share: float = 1.0, seed: int = 0) -> Audit:
        async def each() -> AsyncIterator[dict[str, Any]]:
            for record in records:
                yield record

        return await audit(each(), self.client, job_record, share, seed)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def archived(stack: Stack, world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Archived]:
    folder = tmp_path_factory.mktemp("archived")
    for number, clip in enumerate(world.clips):
        (folder / f"{number}.mp4").write_bytes(clip)
    scenes = [16] * SEGMENTS
    (folder / "film.mkv").write_bytes(make_film(scenes, frame_times(scenes, 0.125, 7.5), codec="ffv1").data)
    items = [BatchItem(f"{number}.mp4", str(folder / f"{number}.mp4"), SMALL) for number in range(len(world.clips))]
    items.append(BatchItem("film.mkv", str(folder / "film.mkv"), SMALL | {"segments": "fixed:2s"}))
    models = ("--target", stack.processes["target"].address, "--draft", stack.processes["draft"].address)
    async with EmbeddedServer(folder / "redis") as redis:
        flags = (*models, "--redis", redis.url, "--video-roots", str(folder), "--draft-timeout-s", "30")
        async with running("gateway", folder / "gateway", *flags) as process, open_channel(process.address) as channel:
            client = ArchiveClient(Connection(channel))
            batch_id = (await client.submit(BatchOptions("mine"), items)).batch_id
            yield Archived(client, process.address, redis.url, folder, await ended(client, batch_id))


def join(film: dict[str, Any]) -> None:
    """Its text anew, of those of its segments."""
    film["text"] = "\n\n".join(part["text"] for part in film["parts"])


async def ended(client: ArchiveClient, batch_id: str) -> Batch:
    async with aclosing(client.watch(batch_id)) as snapshots:
        return [snapshot async for snapshot in snapshots][-1]


# -- audit ------------------------------------------------------------------------------------------------------------


async def test_sound_results_are_confirmed(archived: Archived) -> None:
    done = await archived.audit(await archived.records())
    assert done.has_passed and (done.num_results, done.num_replayed) == (4, 4)
    assert done.count(AuditOutcome.SAME) == len(done.findings) == 3 + SEGMENTS


async def test_of_a_small_share_one_is_made_again(archived: Archived) -> None:
    done = await archived.audit(await archived.records(), share=1e-9, seed=5)
    assert done.has_passed and (done.num_results, done.num_replayed) == (4, 1)


async def test_an_altered_text_is_found_by_its_receipt_without_being_replayed(archived: Archived) -> None:
    records = await archived.records()
    for record in records:
        changed = record["parts"][1] if "parts" in record else record
        changed["text"] += "!"
    done = await archived.audit(records, share=1e-9)
    assert not done.has_passed and done.count(AuditOutcome.ALTERED) == 4
    assert {one.where for one in done.findings if one.verdict is AuditOutcome.ALTERED} == {"", "segment 1"}


async def test_a_whole_that_was_altered_and_a_receipt_that_was_taken_out_are_found(archived: Archived) -> None:
    records = await archived.records()
    records[3]["text"] += "!"
    del records[0]["receipt"]
    done = await archived.audit(records, share=1e-9)
    altered = {one.custom_id: one.reason for one in done.findings if one.verdict is AuditOutcome.ALTERED}
    assert set(altered) == {"0.mp4", "film.mkv"} and "no receipt" in altered["0.mp4"] and done.num_results == 4


async def test_a_text_that_was_altered_with_its_receipt_is_found_by_its_replay(archived: Archived) -> None:
    records = await archived.records()
    forge(records[0], "another text")
    forge(records[3]["parts"][2], "another segment")
    join(records[3])
    done = await archived.audit(records)
    assert not done.has_passed and (done.count(AuditOutcome.ALTERED), done.count(AuditOutcome.DIFFERS)) == (0, 2)
    differing = {(one.custom_id, one.where): one for one in done.findings if one.verdict is AuditOutcome.DIFFERS}
    assert set(differing) == {("0.mp4", ""), ("film.mkv", "segment 2")}
    assert differing["0.mp4", ""].text == "another text" and differing["0.mp4", ""].plain


async def test_a_result_that_was_altered_in_the_queue_is_found(archived: Archived) -> None:
    """With all its digests, as somebody could who may write to the store."""
    (job, *_) = [job async for job in archived.client.jobs("mine")]
    async with planted_text(archived.redis_url, job.job_id, "planted"):
        done = await archived.audit(await archived.records())
    (found,) = [one for one in done.findings if one.verdict is not AuditOutcome.SAME]
    assert (found.custom_id, found.verdict, found.text) == (job.custom_id, AuditOutcome.DIFFERS, "planted")


async def test_what_cannot_be_made_again_is_told_and_does_not_pass(archived: Archived) -> None:
    records = await archived.records()
    gone, changed, lossy, another = records
    gone["source"] = str(archived.folder / "none.mp4")
    changed["receipt"]["video_sha256"] = "ab" * 32
    lossy["receipt"]["options"]["lossy"] = "uniform"
    another["receipt"]["target"]["revision"] = "cd" * 32
    done = await archived.audit(records)
    verdicts = {one.custom_id: (one.verdict, one.reason) for one in done.findings}
    assert not done.has_passed
    found = [verdicts[record["custom_id"]][0] for record in records]
    assert found == [AuditOutcome.FAILED] * 2 + [AuditOutcome.SKIPPED] * 2
    assert "changes the text" in verdicts[lossy["custom_id"]][1] and "cdcd" in verdicts[another["custom_id"]][1]
    with pytest.raises(InvalidRequest, match="no result to audit"):
        await archived.audit([{"custom_id": "failed", "text": None}])


@contextlib.asynccontextmanager
async def elsewhere(archived: Archived, checkpoint: Path, folder: Path) -> AsyncIterator[str]:
    """The address of another archive: a target of its own without a draft, and a queue of its own."""
    async with contextlib.AsyncExitStack() as exits:
        redis = await exits.enter_async_context(EmbeddedServer(folder / "redis"))
        target = await exits.enter_async_context(running("target", folder, *model_flags(checkpoint)))
        flags = ("--target", target.address, "--redis", redis.url, "--video-roots", str(archived.folder))
        yield (await exits.enter_async_context(running("gateway", folder, *flags))).address


async def test_another_target_of_the_same_model_confirms_and_finds_what_was_altered(
    archived: Archived, world: World, tmp_path: Path
) -> None:
    records = await archived.records()
    forge(records[2], "planted")
    forge(records[3]["parts"][0], "planted in a film")
    join(records[3])
    forged = tmp_path / "forged.jsonl"
    forged.write_text("".join(json.dumps(record) + "\n" for record in records))
    async with elsewhere(archived, world.pair.target, tmp_path) as address:
        there = ("--share", "100%", "--replay-gateway", address)
        status, said = await told(archived, "audit", "mine", *there)
        assert status == 0 and said == [said[-1]] and "4 of them made again" in said[-1], said
        status, said = await told(archived, "audit", str(forged), *there, "--json")
        async with open_channel(address) as channel:
            replays = await ArchiveClient(Connection(channel)).list_batches(10)
    *found, summary = map(json.loads, said)
    assert (status, summary["passed"], summary["same"], summary["differs"]) == (1, False, 2 + SEGMENTS - 1, 2)
    assert {(one["custom_id"], one["where"], one["verdict"], one["text"]) for one in found} == {
        ("2.mp4", "", "differs", "planted"),
        ("film.mkv", "segment 0", "differs", "planted in a film"),
    }
    assert [batch.metadata for batch in replays] == [{"purpose": "audit"}] * 2, "made there, not here"


async def test_a_target_of_another_model_confirms_nothing(archived: Archived, world: World, tmp_path: Path) -> None:
    async with elsewhere(archived, world.pair.draft, tmp_path) as address:
        asked = ("mine", "--share", "100%", "--replay-gateway", address, "--json")
        status, said = await told(archived, "audit", *asked)
    *found, summary = map(json.loads, said)
    assert (status, summary["passed"], summary["replayed"], summary["same"]) == (1, False, 4, 0)
    assert [one["verdict"] for one in found] == ["skipped"] * 4
    made_by = (await archived.records())[0]["receipt"]["target"]["revision"][:12]
    assert all(one["reason"].startswith(f"made by the target {made_by}") for one in found)


# -- marks and texts --------------------------------------------------------------------------------------------------


async def test_marks_are_counted_and_told(archived: Archived) -> None:
    records = await archived.records()
    texts = [part for record in records for part in record.get("parts", [record])]
    counts = {mark: sum(mark in text["quality"] for text in texts) for mark in COUNTED_MARKS}
    assert counts == {mark: getattr(archived.batch.totals, mark) for mark in COUNTED_MARKS}
    assert counts["cut"] > 0, "16 tokens are few"
    assert f"{counts['cut']} cut" in describe(archived.batch, overall(archived.batch))


def a_word_of(film: dict[str, Any]) -> tuple[str, int]:
    """And the last segment that has it: of random weights a text may have no word."""
    words = [(word, part["segment"]) for part in film["parts"] for word in words_of(part["text"])]
    assert words, film
    return max(words, key=lambda found: (len(found[0]), found[1]))


async def test_a_batch_is_searched_to_the_second(archived: Archived, tmp_path: Path) -> None:
    film = (await archived.records())[3]
    word, segment = a_word_of(film)
    with await open_batch(archived.client, "mine", tmp_path) as index:
        found = index.search(parse_question(word), 50).passages
    assert {one.start_s for one in found if one.custom_id == "film.mkv"} >= {7.5 + 2 * segment}
    assert [part["start_s"] for part in film["parts"]] == [7.5, 9.5, 11.5]


async def test_what_was_found_is_cut_out_of_its_film(archived: Archived, tmp_path: Path) -> None:
    records = await archived.records()
    word, segment = a_word_of(records[3])
    path = archived.folder / "export.jsonl"
    asked = ("search", word, "--in", str(path), "--clip", str(tmp_path / "clips"), "--json")
    status, lines = await told(archived, *asked)
    found = [json.loads(line) for line in lines]
    start_s = 7.5 + 2 * segment
    (one,) = [one for one in found if one["custom_id"] == "film.mkv" and one["start_s"] == start_s]
    assert status == 0 and Path(one["clip"]).name.startswith(f"film.mkv@{start_s:.3f}")
    with av.open(one["clip"]) as clip, av.open(str(archived.folder / "film.mkv")) as film:
        pictures = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        cut = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
    assert len(cut) >= 16 and np.array_equal(cut[-16:], pictures[16 * segment : 16 * (segment + 1)])
    assert not any("clip" in one for one in found if one["custom_id"] != "film.mkv"), "only segments have times"


# -- estimate ---------------------------------------------------------------------------------------------------------


def num_bytes(job: Job, parts: Sequence[JobPart]) -> int:
    return len(json.dumps(job_record(job, parts)))


async def test_an_estimate_of_all_items_is_what_they_took(archived: Archived) -> None:
    """All of a small archive are the sample, so nothing is left open but the time."""
    names = [*(f"{number}.mp4" for number in range(3)), "none.mp4"]
    items = [BatchItem(name, str(archived.folder / name)) for name in names]
    batch = BatchOptions(caption=SMALL, priority=Priority.LOW)
    sampled = [await caption_sample(archived.client, items, batch, 20, 0, num_bytes) for _ in range(2)]
    for one in sampled:
        assert one.chosen == (0, 1, 2, 3) and len(one.failures) == 1 and "none.mp4" in one.failures[0]
        assert one.totals.tokens == sum(each.tokens for each in one.sample)
        done = [each for each in one.sample if each.span != NO_WORK]
        assert len(done) == 3 and all(each.span.seconds > 0 and each.result_bytes > 500 for each in done)
    again = {each.tokens for each in sampled[1].sample}
    assert again == {each.tokens for each in sampled[0].sample}, "made anew, and the same"
    found = sampled[0].estimate()
    assert found.num_items == 4 and found.seconds.low <= found.seconds.value <= found.seconds.high
    assert sampled[0].estimate(only_unsampled=True).num_items == 0


async def test_films_are_estimated_whole_and_who_leaves_cancels_the_sample(archived: Archived) -> None:
    items = [BatchItem(str(number), str(archived.folder / "film.mkv")) for number in range(2)]
    film = BatchOptions(caption=SMALL | {"segments": "fixed:2s"})
    sampled = await caption_sample(archived.client, items, film, 20, 0, num_bytes)
    assert [round(each.video_s) for each in sampled.sample] == [6, 6]
    assert all(each.tokens >= SEGMENTS for each in sampled.sample)
    long = BatchOptions(caption=SMALL | {"max_new_tokens": 2000})
    estimating = asyncio.create_task(
        caption_sample(archived.client, items, long, 20, 0, num_bytes, lambda batch: estimating.cancel() and None)
    )
    with pytest.raises(asyncio.CancelledError):
        await estimating
    left = (await archived.client.list_batches(1))[0]
    assert left.metadata == {"purpose": "estimate"} and left.state in (BatchState.CANCELLING, BatchState.CANCELLED)


async def test_an_estimate_of_nothing_or_of_no_video_says_so(archived: Archived) -> None:
    with pytest.raises(VideoNotFound, match="nothing to estimate"):
        await caption_sample(archived.client, [], BatchOptions(), 20, 0, num_bytes)
    gone = BatchItem("gone", str(archived.folder / "gone.mp4"))
    with pytest.raises(InvalidRequest, match="no item of the sample could be captioned"):
        await caption_sample(archived.client, [gone], BatchOptions(), 20, 0, num_bytes)


async def told(archived: Archived, *words: str) -> tuple[int, list[str]]:
    """Exit status and stdout of one command of `slipstream archive`."""
    ended = await command("archive", *words, "--gateway", archived.address)
    return ended.status, ended.output.splitlines()


async def test_the_command_tells_hours_and_cost_of_a_folder(archived: Archived) -> None:
    folder, options = str(archived.folder / "*.mp4"), ("--prompt", PROMPT, "--frames", "4", "--max-new-tokens", "16")
    status, (line,) = await told(archived, "estimate", folder, *options, "--price-per-device-hour", "2.5", "--json")
    facts = json.loads(line)
    assert status == 0 and (facts["items"], facts["sampled"], facts["failed"], facts["devices"]) == (3, 3, 0, 2)
    assert facts["cost"]["value"] == pytest.approx(facts["hours"]["value"] * 2 * 2.5)
    records = await archived.records()
    assert facts["tokens"]["value"] == sum(record["receipt"]["num_tokens"] for record in records[:3])
    other = facts["without_draft"]
    assert other["targets"] == 2 and other["recommended"] in ("draft", "plain", "either")
    assert other["hours"]["value"] == pytest.approx(facts["hours"]["value"] * other["times"])
    assert other["cost"]["value"] == pytest.approx(other["hours"]["value"] * 2 * 2.5)


async def test_bad_rows_of_a_manifest_are_left_out_of_an_estimate(archived: Archived, tmp_path: Path) -> None:
    manifest = tmp_path / "list.csv"
    rows = [b"path", *(str(archived.folder / f"{number}.mp4").encode() for number in range(3)), b"\xff", b"a,b"]
    manifest.write_bytes(b"\n".join(rows))
    asked = ("estimate", str(manifest), "--prompt", PROMPT, "--frames", "4", "--max-new-tokens", "16", "--json")
    assert await told(archived, *asked) == (2, [])
    status, (line,) = await told(archived, *asked, "--skip-bad")
    facts = json.loads(line)
    assert (status, facts["items"], facts["sampled"], facts["bad_rows"]) == (2, 3, 3, 2)


async def test_the_command_prints_what_differs_and_says_so_by_its_exit_status(
    archived: Archived, tmp_path: Path
) -> None:
    status, said = await told(archived, "audit", "mine", "--share", "100%")
    assert status == 0 and said[-1].startswith("passed: 4 results"), said
    records = await archived.records()
    forge(records[1], "another\x1b text")
    export_file = tmp_path / "forged.jsonl"
    export_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    status, said = await told(archived, "audit", str(export_file), "--share", "1.0")
    assert status == 1 and said[0] == "differs 1.mp4: plain decoding says another text"
    assert said[-1].startswith("NOT confirmed") and "\x1b" not in "".join(said)
