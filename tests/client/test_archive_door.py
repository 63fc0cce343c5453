"""The archive as programs use it: handles on batches, asynchronous and synchronous, at a gateway with a real queue."""

import asyncio
import inspect
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slipstream
from slipstream.archive.messages import Batch, BatchItem, BatchTotals, Job, JobCounts, JobPage
from slipstream.archive.queue import BatchState, JobState, Priority, UnknownBatch
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.async_captioner import connect_async
from slipstream.client.batch_handles import SubmitKeywords, make_item
from slipstream.client.sync_captioner import Captioner, connect
from slipstream.errors import InvalidConfig, InvalidRequest, VideoNotFound
from slipstream.stack.local import Stack
from tests.cli.fake_gateway import FakeGateway
from tests.support.world import PROMPT, World

OPTIONS: dict[str, Any] = {"num_frames": 6, "max_new_tokens": 24}

# -- a real archive ---------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def folder(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for index, clip in enumerate(world.clips):
        (folder / f"{index}.mp4").write_bytes(clip)
    (folder / "bad.mp4").write_bytes(b"no video at all")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(world: World, folder: Path) -> AsyncIterator[Stack]:
    options = replace(world.stack_options(), draft_model=None, archive=True, video_roots=(folder,))
    async with Stack(options) as running:
        yield running


@pytest.mark.asyncio(loop_scope="session")
async def test_videos_become_captions_and_a_key_finds_them_again(stack: Stack, folder: Path) -> None:
    async with connect_async(stack.gateway_address) as captioner:
        archive = captioner.archive
        videos: list[Any] = [str(folder / "0.mp4"), folder / "1.mp4", folder / "bad.mp4"]
        videos.append(BatchItem("why", str(folder / "2.mp4"), {"prompt": "Why?"}))
        batch = await archive.submit(videos, PROMPT, **OPTIONS, key="k", metadata={"a": "b"}, priority=Priority.HIGH)
        assert batch.submitted is not None and batch.submitted.num_added == 4
        jobs = {job.custom_id: job async for job in batch.results()}
        assert set(jobs) == {*map(str, videos[:3]), "why"}
        for name, video, prompt in ((str(videos[0]), videos[0], PROMPT), ("why", folder / "2.mp4", "Why?")):
            made = jobs[name].caption
            assert made and made.text == (await captioner.caption(video, prompt, **OPTIONS)).text
        bad = jobs[str(videos[2])]
        assert bad.state is JobState.FAILED and bad.caption is None and bad.error_code == "INVALID_ARGUMENT"

        status = await batch.status()
        assert status == await batch.wait() == await archive.batch("k").status() == (await archive.batches())[0]
        assert (status.state, status.counts.done, status.counts.failed) == (BatchState.COMPLETED, 3, 1)
        assert status.metadata == {"a": "b"} and status.totals.tokens
        again = await archive.submit(videos, PROMPT, **OPTIONS, key="k")
        assert again.submitted is not None and (again.submitted.num_added, again.submitted.num_known) == (0, 4)
        assert [job.custom_id async for job in again.jobs([JobState.FAILED])] == [str(videos[2])]
        assert await again.retry() == 0 and await again.retry(include_failed=True) == 1
        assert len([job async for job in again.results()]) == 4
        with pytest.raises(InvalidRequest, match="other options"):
            await archive.submit(videos, "Why?", **OPTIONS, key="k")
        with pytest.raises(UnknownBatch):
            await archive.batch("unknown").status()
        with pytest.raises(VideoNotFound, match="nothing to hand in"):
            await archive.submit([])


@pytest.mark.asyncio(loop_scope="session")
async def test_a_batch_is_cancelled_while_its_results_are_read(stack: Stack, folder: Path) -> None:
    async with connect_async(stack.gateway_address) as captioner:
        items = [
            BatchItem(str(number), str(folder / "0.mp4"), {"prompt": f"What is {number}?"}) for number in range(200)
        ]
        batch = await captioner.archive.submit(items, num_frames=6, max_new_tokens=400)
        jobs = []
        async with aclosing(batch.results()) as results:
            async for job in results:
                jobs.append(job)
                if len(jobs) == 1:
                    await batch.cancel()
        assert sorted(job.custom_id for job in jobs) == sorted(str(number) for number in range(200))
        assert jobs[0].state is JobState.DONE, "those that run may end after those that are cancelled"
        assert {job.state for job in jobs} == {JobState.DONE, JobState.CANCELLED}
        assert (await batch.wait()).state is BatchState.CANCELLED


def _use_synchronously(address: str, folder: Path) -> None:
    archive = connect(address).archive  # a handle alone keeps its captioner open
    batch = archive.submit([folder / "0.mp4", folder / "1.mp4"], PROMPT, **OPTIONS)
    assert batch.submitted is not None and batch.submitted.num_added == 2
    assert {Path(job.source).name for job in batch.results() if job.caption} == {"0.mp4", "1.mp4"}
    assert batch.wait() == batch.status() == list(batch.watch())[-1] == archive.batch(batch.name).status()
    assert batch.name in [found.batch_id for found in archive.batches()]
    assert [job.caption.text for job in batch.jobs() if job.caption]
    with closing(batch.results()) as results:
        next(results)
    for _ in batch.jobs([JobState.DONE]):
        break
    assert batch.retry() == 0
    assert batch.cancel().state in (BatchState.COMPLETED, BatchState.CANCELLED)
    with pytest.raises(UnknownBatch):
        archive.batch("unknown").wait()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_synchronous_twin(stack: Stack, folder: Path) -> None:
    await asyncio.to_thread(_use_synchronously, stack.gateway_address, folder)


# -- without one ------------------------------------------------------------------------------------------------------


def test_a_gateway_without_an_archive(captioner: Captioner) -> None:
    with pytest.raises(InvalidConfig, match="no archive"):
        captioner.archive.submit(["a.mp4"])
    with pytest.raises(InvalidConfig, match="no archive"):
        captioner.archive.batches()


def test_what_is_wrong_with_a_call_is_said_before_the_gateway_is_asked(gateway: FakeGateway) -> None:
    submit = connect(gateway.address).archive.submit
    with pytest.raises(InvalidRequest, match="num_frames must be at least 1"):
        submit(["a.mp4"], num_frames=0)
    with pytest.raises(InvalidRequest, match="give a list"):
        submit("a.mp4")
    with pytest.raises(InvalidRequest, match="give a list"):
        submit(Path("a.mp4"))
    with pytest.raises(InvalidRequest, match="not valid UTF-8"):
        submit(["\udcff.mp4"])
    with pytest.raises(InvalidRequest, match="choose one of high, normal, low"):
        submit(["a.mp4"], priority="urgent")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="key must be text, not 7"):
        submit(["a.mp4"], key=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="metadata must be text, not 1998"):
        submit(["a.mp4"], metadata={"year": 1998})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="framse"):
        submit(["a.mp4"], framse=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda archive: archive.batches(0), "limit must be a whole number from 1 to 1000, not 0"),
        (lambda archive: archive.batches(-1), "limit must be a whole number from 1 to 1000, not -1"),
        (lambda archive: archive.batches("9"), "limit must be a whole number from 1 to 1000, not '9'"),
        (lambda archive: list(archive.batch("k").jobs("done")), r"give a list, such as \['done'\]"),
        (lambda archive: list(archive.batch("k").jobs(JobState.DONE)), r"give a list, such as \['done'\]"),
        (lambda archive: list(archive.batch("k").jobs(["done", "lost"])), "job state 'lost' is unknown; choose among"),
        (lambda archive: archive.batch(None).status(), "the name of a batch must be text, not None"),
        (lambda archive: archive.batch("\ud800").status(), "the name of a batch has a text that is no valid Unicode"),
        (lambda archive: archive.submit([BatchItem("\ud800", "/a.mp4")]), r"item '\\ud800' cannot be sent"),
        (lambda archive: archive.submit([BatchItem(7, "/a.mp4")]), "item 7 cannot be sent"),
        (
            lambda archive: archive.submit([BatchItem("a", "/a.mp4", {"stop": "end"})]),
            "stop must be texts, in a list or a tuple, not 'end'",
        ),
        (
            lambda archive: archive.submit([BatchItem("a", "/a.mp4", slipstream.CaptionOptions(seed=1))]),
            "options must be values by their names, as in a dict, not CaptionOptions",
        ),
        (lambda archive: archive.submit([BatchItem("a", "/a.mp4", {"temperature": 10**400})]), "cannot be sent"),
        (lambda archive: archive.submit([BatchItem("a", "/a.mp4", kind="picture")]), "item 'a' cannot be sent"),
    ],
)
def test_what_cannot_be_asked_for_is_named(gateway: FakeGateway, use: Callable[[Any], object], reason: str) -> None:
    """Each was an error of Python's or protobuf's, or asked for something else."""
    with pytest.raises(InvalidRequest, match=reason):
        use(connect(gateway.address).archive)


def test_keywords_are_those_of_the_table_and_of_the_batch() -> None:
    for archive in (slipstream.Archive, slipstream.AsyncArchive):
        shown = inspect.signature(archive.submit).parameters
        assert list(shown)[:3] == ["self", "videos", "prompt"]
        assert {"temperature", "stop", "key", "metadata", "priority"} <= set(shown)
        assert "num_frames: Frames to sample" in (archive.submit.__doc__ or "")
    options = slipstream.CaptionOptions("Why?", seed=7)
    batch = SubmitKeywords(seed=8, options=options, key="k", priority="low").batch()
    assert (batch.caption, batch.key, batch.priority) == ({"prompt": "Why?", "seed": 8}, "k", Priority.LOW)


def test_type_checkers_know_the_words_of_priorities() -> None:
    words, *_ = (kind for kind in get_args(get_type_hints(SubmitKeywords)["priority"]) if get_args(kind))
    assert set(get_args(words)) == set(Priority)


def test_items_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_item("a/b.mp4") == BatchItem("a/b.mp4", str(tmp_path / "a/b.mp4"))
    assert make_item(tmp_path / "c.mp4") == BatchItem(str(tmp_path / "c.mp4"), str(tmp_path / "c.mp4"))
    assert make_item("https://x.example/d") == BatchItem("https://x.example/d", "https://x.example/d")
    assert make_item(slipstream.RemotePath("/v/e.mp4")) == BatchItem("/v/e.mp4", "/v/e.mp4")
    for other in (b"\0\0\0 ftyp", io.BytesIO(), None):
        with pytest.raises(InvalidRequest, match=f"a path, an address or a BatchItem, not {type(other).__name__}"):
            make_item(other)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="the path of a video must be text, not PosixPath"):
        make_item(slipstream.RemotePath(tmp_path))  # type: ignore[arg-type]


def test_what_cannot_be_handed_in() -> None:
    with slipstream.connect("127.0.0.1:1") as captioner:
        for videos in (None, 3):
            with pytest.raises(InvalidRequest, match="in a list or the like, not"):
                captioner.archive.submit(videos)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="metadata must be texts by their names, as in a dict"):
            captioner.archive.submit(["/a.mp4"], metadata=["a"])  # type: ignore[arg-type]


# -- results as they come ---------------------------------------------------------------------------------------------

JOB = Job("", "", "", JobState.QUEUED, "", "", "", 0, 0, "", 0.0, 0.0, 0.0)
BATCH = Batch("b", "", BatchState.IN_PROGRESS, {}, JobCounts(), 0.0, 0.0, BatchTotals())
PAGE = 3


class SlowBatch:
    """Jobs that end in a given order, some at once; stands in for the archive's calls."""

    def __init__(self, ends: list[list[int]], retried: Collection[int]) -> None:
        self.jobs = [replace(JOB, job_id=f"j{number}") for number in range(sum(map(len, ends)))]
        self._ends = ends
        self._retried = retried
        self.pages_read: list[str] = []

    async def watch(self, client: ArchiveClient, batch: str) -> AsyncGenerator[Batch, None]:
        for ending in self._ends:
            yield self._snapshot()
            for number in ending:
                self._set(number, JobState.DEAD if number in self._retried else JobState.DONE)
        yield self._snapshot()
        for number in self._retried:
            self._set(number, JobState.RUNNING)
        yield self._snapshot()
        for number in self._retried:
            self._set(number, JobState.DONE)
        yield replace(self._snapshot(), state=BatchState.COMPLETED)

    async def job_page(self, client: ArchiveClient, batch: str, states: object = (), page_token: str = "") -> JobPage:
        self.pages_read.append(page_token)
        start = int(page_token or 0)
        more = start + PAGE < len(self.jobs)
        return JobPage(self.jobs[start : start + PAGE], str(start + PAGE) if more else "")

    def _set(self, number: int, state: JobState) -> None:
        self.jobs[number] = replace(self.jobs[number], state=state)

    def _snapshot(self) -> Batch:
        ended = sum(job.state.is_terminal for job in self.jobs)
        return replace(BATCH, counts=JobCounts(total=len(self.jobs), done=ended))


@st.composite
def endings(draw: st.DrawFn) -> list[list[int]]:
    """Numbers of jobs in the order in which they end, in groups."""
    order = draw(st.permutations(range(draw(st.integers(0, 14)))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=6)))
    return [list(order[start:end]) for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@given(endings(), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_every_job_comes_once_whatever_the_order_of_their_ends(
    monkeypatch: pytest.MonkeyPatch, ends: list[list[int]], data: st.DataObject
) -> None:
    numbers = [number for ending in ends for number in ending]
    batch = SlowBatch(ends, data.draw(st.sets(st.sampled_from(numbers))) if numbers else ())
    assert sorted(_results(monkeypatch, batch)) == sorted(job.job_id for job in batch.jobs)


def test_pages_that_have_ended_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = SlowBatch([[number] for number in range(30)], ())
    assert _results(monkeypatch, batch) == [f"j{number}" for number in range(30)]
    assert len(batch.pages_read) <= 30 + 30 // PAGE + 2


def _results(monkeypatch: pytest.MonkeyPatch, batch: SlowBatch) -> list[str]:
    async def read() -> list[str]:
        async with connect_async("unix:/nowhere") as captioner:
            return [job.job_id async for job in captioner.archive.batch("b").results()]

    monkeypatch.setattr(ArchiveClient, "watch", _method(batch.watch))
    monkeypatch.setattr(ArchiveClient, "job_page", _method(batch.job_page))
    return asyncio.run(read())


def _method(function: Any) -> Any:
    """As a method of another class: that one's `self` comes first."""
    return lambda client, *args, **kwargs: function(client, *args, **kwargs)
