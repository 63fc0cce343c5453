"""Captions that need not be made, through the real stack: of near-duplicates, and of segments that show nothing."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

import slipstream
from slipstream.archive.messages import BatchItem, Job
from slipstream.archive.queue import JobState
from slipstream.captioning.duplicates import SHARE, WITHIN
from slipstream.cli.archive.job_lines import job_record, job_row
from slipstream.errors import InvalidRequest
from slipstream.messages import SegmentCaption, SharedFrom
from slipstream.rpc.calls import open_channel
from slipstream.stack.local import Stack
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_client import archive_at, jobs_of
from tests.support.films import frame_times, scene, write_film
from tests.support.processes import running

pytestmark = pytest.mark.asyncio(loop_scope="session")

FRAMES, STEP_S = 16, 0.125
CAPTION: dict[str, Any] = {"num_frames": 4, "max_new_tokens": 24, "segments": "fixed:2s"}
FIRST, OTHER, BLACK, COPY, STILL = range(5)
"""The film's segments."""


def copy_of(pictures: list[NDArray[np.uint8]], seed: int = 7) -> list[NDArray[np.uint8]]:
    """The same, as another encoder might have it: no pixel need be as it was."""
    chance = np.random.default_rng(seed)
    noisy = (picture + chance.normal(0, 4, picture.shape) + 2 for picture in pictures)
    return [picture.clip(0, 255).astype(np.uint8) for picture in noisy]


def written(pictures: list[NDArray[np.uint8]]) -> bytes:
    return write_film(pictures, frame_times([len(pictures)], STEP_S), codec="ffv1")


@pytest.fixture(scope="module")
def film() -> bytes:
    first, other = scene(0, FRAMES), scene(1, FRAMES)
    black = [np.zeros_like(picture) for picture in first]
    return written([*first, *other, *black, *copy_of(first), *[scene(2, 1)[0]] * FRAMES])


Ask = Callable[..., Any]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ask(stack: Stack, film: bytes) -> AsyncIterator[Ask]:
    """Captions the film's segments with more options."""
    async with slipstream.connect_async(stack.gateway_address) as captioner:

        async def captions(**options: Any) -> list[SegmentCaption]:
            return [part async for part in captioner.caption_segments(film, **CAPTION, **options)]

        yield captions


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def texts(ask: Ask) -> list[str]:
    """What plain decoding says of every segment."""
    plain = await ask(method="autoregressive")
    marks = [part.caption.video.marks for part in plain]
    assert marks == [(), (), ("black",), (), ("frozen",)], "marked, whatever is asked"
    assert not any(part.caption.shared or part.caption.skipped for part in plain)
    said = [part.text for part in plain]
    assert all(said) and len({said[FIRST], said[OTHER], said[BLACK], said[STILL]}) == 4
    return said


async def test_a_near_duplicate_in_a_film_shares_the_caption_and_says_so(ask: Ask, texts: list[str]) -> None:
    parts = await ask(duplicates="share")
    assert [part.text for part in parts] == [*texts[:COPY], texts[FIRST], texts[STILL]]
    shared = parts[COPY].caption.shared
    assert (shared.job_id, shared.segment) == ("", FIRST) and 0 < shared.distance <= WITHIN[SHARE]
    assert parts[COPY].caption.num_tokens == parts[FIRST].caption.num_tokens and not parts[COPY].caption.tokens
    assert [part.caption.shared for part in parts if part is not parts[COPY]] == [None] * 4
    assert parts[COPY].caption.video.num_frames == 4 and not parts[COPY].caption.timings.total_s


@pytest.mark.parametrize("method", [{}, {"method": "hsd"}], ids=["the default", "hsd"])
async def test_drafted_from_a_near_duplicate_the_text_is_the_targets_own(
    ask: Ask, texts: list[str], method: dict[str, str]
) -> None:
    parts = await ask(duplicates="hint", **method)
    assert [part.text for part in parts] == texts
    assert not any(part.caption.shared for part in parts)
    assert parts[0].caption.options["method"] == method.get("method", "hints_draft")


@pytest.mark.parametrize(("weakest", "skipped"), [("black", {BLACK}), ("frozen", {BLACK, STILL})])
async def test_marked_segments_are_left_out_where_that_is_asked(
    ask: Ask, texts: list[str], weakest: str, skipped: set[int]
) -> None:
    parts = await ask(skip_marked=weakest)
    assert [part.text for part in parts] == ["" if n in skipped else text for n, text in enumerate(texts)]
    reasons = {n: part.caption.skipped for n, part in enumerate(parts) if part.caption.skipped}
    assert reasons == {n: {BLACK: "black", STILL: "frozen"}[n] for n in skipped}
    assert not any(parts[n].caption.num_tokens for n in skipped)


async def test_what_cannot_be_spared_is_refused(stack: Stack, film: bytes, ask: Ask) -> None:
    async with slipstream.connect_async(stack.gateway_address) as captioner:
        for option in ({"duplicates": "share"}, {"skip_marked": "black"}):
            with pytest.raises(InvalidRequest, match=f"^{next(iter(option))} is for segments and the archive"):
                await captioner.caption(film, num_frames=4, **option)
            with pytest.raises(InvalidRequest, match="pages are all read"):
                captioner.read_document(b"%PDF", **option)
    with pytest.raises(InvalidRequest, match="drafts from no hints; ask for duplicates 'share'"):
        await ask(duplicates="hint", method="slipstream")
    with pytest.raises(InvalidRequest, match="duplicates 'all' is unknown"):
        await ask(duplicates="all")


# -- archive ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gateways:
    """They share a queue, and the models of the tests. One captions at a time, so each caption can know the last."""

    folder: Path
    flags: Sequence[str]

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[grpc.aio.Channel]:
        """A new one, as long as this lasts."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        async with running("gateway", folder, *self.flags) as process, open_channel(process.address) as channel:
            yield channel


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateways(stack: Stack, film: bytes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateways]:
    folder = tmp_path_factory.mktemp("spared")
    (folder / "film.mkv").write_bytes(film)
    (folder / "a.mkv").write_bytes(written(scene(0, FRAMES)))
    (folder / "b.mkv").write_bytes(written(copy_of(scene(0, FRAMES))))
    (folder / "c.mkv").write_bytes(written(copy_of(scene(0, FRAMES), seed=8)))
    (folder / "other.mkv").write_bytes(written(scene(1, FRAMES)))
    (folder / "black.mkv").write_bytes(written([np.zeros_like(picture) for picture in scene(0, FRAMES)]))
    target = stack.processes["target"].address
    async with EmbeddedServer(folder / "redis") as redis:
        flags = ("--target", target, "--redis", redis.url, "--video-roots", str(folder))
        yield Gateways(folder, (*flags, "--archive-slots", "1", "--archive-ahead", "0"))


async def ended(channel: grpc.aio.Channel, folder: Path, names: list[str], **options: Any) -> dict[str, Job]:
    asked = {"num_frames": 4, "max_new_tokens": 24} | options
    items = [BatchItem(name, str(folder / f"{name}.mkv")) for name in names]
    batch = await archive_at(channel).submit(items, **asked)
    assert (await batch.wait()).counts.done == len(names)
    return await jobs_of(batch)


async def test_videos_of_the_archive_share_across_gateways_and_restarts(gateways: Gateways) -> None:
    folder = gateways.folder
    async with gateways.one() as channel:
        plain = await ended(channel, folder, ["a", "b", "other", "black"])
        jobs = await ended(channel, folder, ["a", "b", "other", "black"], duplicates="share", skip_marked="black")
    async with gateways.one() as channel:
        later = await ended(channel, folder, ["c"], duplicates="share", skip_marked="black")
        unlike = await ended(channel, folder, ["c"], duplicates="share", skip_marked="black", seed=1)
    said = {name: job.caption.text for name, job in jobs.items() if job.caption}
    before = {name: job.caption.text for name, job in plain.items() if job.caption}
    assert said == before | {"b": before["a"], "black": ""}
    source = jobs["a"].job_id
    for job in (jobs["b"], later["c"]):
        assert job.caption and job.receipt and job.caption.shared == job.receipt.shared
        assert job.caption.shared and (job.caption.shared.job_id, job.caption.shared.segment) == (source, 0)
        assert job.caption.text == before["a"] and 0 < job.caption.shared.distance <= WITHIN[SHARE]
    record, row = job_record(jobs["b"]), job_row(jobs["b"])
    assert record["shared"]["job_id"] == record["receipt"]["shared"]["job_id"] == row["shared_job"] == source
    record = job_record(jobs["black"])
    assert (record["text"], record["marks"], record["skipped"]) == ("", ["black"], "black")
    assert record["receipt"]["skipped"] == "black" and "shared" not in record
    for job in (jobs["a"], jobs["other"], unlike["c"]):
        assert job.receipt and job.receipt.shared is None and not job.receipt.skipped, "made of its own frames"


async def test_segments_of_films_in_the_archive_share_and_are_counted(gateways: Gateways, texts: list[str]) -> None:
    folder = gateways.folder
    async with gateways.one() as channel:
        archive = archive_at(channel)
        film = BatchItem("film", str(folder / "film.mkv"), CAPTION | {"duplicates": "share", "skip_marked": "frozen"})
        batch = await archive.submit([film])
        totals = (await batch.wait()).totals
        (job,) = (await jobs_of(batch)).values()
        parts = [part async for part in batch.parts(job)]
    assert job.state is JobState.DONE and (totals.shared, totals.skipped, totals.segments) == (1, 2, 5)
    captions = [part.caption for part in parts if part.caption]
    assert [caption.text for caption in captions] == [*texts[:BLACK], "", texts[FIRST], ""]
    shared = parts[COPY].receipt.shared if parts[COPY].receipt else None
    assert isinstance(shared, SharedFrom) and (shared.job_id, shared.segment) == (job.job_id, FIRST)
    lines = job_record(job, parts)["parts"]
    assert [line.get("marks") for line in lines] == [None, None, ["black"], None, ["frozen"]]
    assert [line.get("skipped") for line in lines] == [None, None, "black", None, "frozen"]
    assert [bool(line.get("shared")) for line in lines] == [False, False, False, True, False]
