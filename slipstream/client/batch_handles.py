"""The archive for programs: videos are handed in, and a handle on their batch gives the captions as they are made.

batch = captioner.archive.submit(["a.mp4", "b.mp4"], "What happens?")
for job in batch.results():
    print(job.source, job.caption or job.error)
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from slipstream.archive.messages import Batch, BatchItem, BatchOptions, Job, JobPart, Submitted
from slipstream.archive.queue import JobState, Priority
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.caption_client import RemotePath
from slipstream.client.connection import Connection
from slipstream.config import check_text, is_sendable
from slipstream.errors import InvalidRequest
from slipstream.objects.store import check_scheme, is_object_url, scheme_of
from slipstream.options import CallOptions, keywords_of

# -- what is handed in ------------------------------------------------------------------------------------------------

LONGEST_NAME = 256
"""Characters of a custom id; they are printable."""
DIGEST_CHARS = 12

BatchVideo = str | os.PathLike[str] | RemotePath | BatchItem
"""A file by its path, an address, or an item with a name and options of its own."""


@dataclass(frozen=True)
class SubmitKeywords(CallOptions):
    """What `submit` takes besides the videos: options of all captions, and of the batch itself."""

    key: str = field(default="", kw_only=True)
    """Names the batch: the same key is the same batch, to which only new videos are added. Empty: a new batch."""
    metadata: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """At most 16 texts of the caller's own, kept with the batch."""
    priority: Priority | Literal["high", "normal", "low"] = field(default=Priority.NORMAL, kw_only=True)
    """Against other batches: "high", "normal" or "low"."""

    def batch(self) -> BatchOptions:
        """The batch to open. Raises `InvalidRequest` for a priority that there is not, and for what must be text."""
        if self.priority not in list(Priority):
            raise InvalidRequest(f"priority {self.priority!r} is unknown; choose one of {', '.join(Priority)}")
        if not isinstance(metadata := self.metadata or {}, Mapping):
            raise InvalidRequest(f"metadata must be texts by their names, as in a dict, not {metadata!r}")
        for name, text in (("key", self.key), *(("metadata", text) for both in metadata.items() for text in both)):
            check_text(name, text)
        return BatchOptions(self.key, self.asked().given(), self.metadata, Priority(self.priority))


def make_item(video: BatchVideo) -> BatchItem:
    """The item of a video, named by its path or address as it was given. A path becomes absolute: the gateway opens it
    itself, below one of its roots, so whether it exists is not looked at here.

    Raises:
        InvalidRequest: what is none of these, or a path that cannot be sent because it is no valid Unicode.
    """
    if isinstance(video, BatchItem):
        return video
    if not isinstance(video, str | os.PathLike | RemotePath):
        raise InvalidRequest(f"a video of a batch is a path, an address or a BatchItem, not {type(video).__name__}")
    path = video.path if isinstance(video, RemotePath) else os.fspath(video)
    if not isinstance(path, str):
        raise InvalidRequest(f"the path of a video must be text, not {path!r}")
    if not is_sendable(path):
        raise InvalidRequest(f"the path {path!r} is not valid UTF-8")
    is_here = not isinstance(video, RemotePath) and not is_url(path)
    if is_here:
        check_scheme(path)
    return BatchItem(item_name(path), os.path.abspath(path) if is_here else path)


def item_name(path: str) -> str:
    """The path as a custom id: as it is, where the gateway takes it, else shortened and with a digest."""
    if len(path) <= LONGEST_NAME and path.isprintable():
        return path
    shown = "".join(char if char.isprintable() else "_" for char in path)[-LONGEST_NAME // 2 :]
    return f"{shown}~{hashlib.sha256(path.encode()).hexdigest()[:DIGEST_CHARS]}"


def is_url(source: str) -> bool:
    """Whether it names something to fetch instead of a file."""
    return scheme_of(source) == "https" or is_object_url(source)


Videos = Iterable[BatchVideo]
_with_keywords = keywords_of(
    SubmitKeywords,
    {
        "key": "names the batch: the same key is the same batch, to which new videos are added. Default: a new one.",
        "metadata": "at most 16 texts of the caller's own, kept with the batch.",
        "priority": "against other batches: high, normal or low. Default: normal.",
    },
)

# -- asynchronous -----------------------------------------------------------------------------------------------------

Connect = Callable[[], Awaitable[Connection]]
"""Gives the open connection to the gateway, such as a captioner's, which opens it when it is first used."""


class AsyncBatchHandle:
    """A batch of the archive. It goes on whether or not somebody holds a handle on it.

    Its methods raise `UnknownBatch` (a `SlipstreamError`) when there is no such batch, and `ServiceUnavailable` when
    the gateway is away; those that wait or list sit out absences of up to 60 s.
    """

    def __init__(self, connect: Connect, name: str, submitted: Submitted | None = None) -> None:
        check_text("the name of a batch", name)
        self._connect = connect
        self.name = name
        """The id of the batch, or the key that it was asked for by."""
        self.submitted = submitted
        """Of a handle that `submit` gave: how many videos were new, known, refused or in conflict."""

    async def status(self) -> Batch:
        """How the batch stands: its state, jobs by state, and sums over those that are done."""
        return await (await self._client()).get(self.name)

    async def watch(self) -> AsyncGenerator[Batch, None]:
        """The batch now and after every change until it has ended."""
        async with aclosing((await self._client()).watch(self.name)) as snapshots:
            async for snapshot in snapshots:
                yield snapshot

    async def wait(self) -> Batch:
        """How the batch stands when it has ended: every job is done, failed, dead or cancelled."""
        async with aclosing(self.watch()) as snapshots:
            async for snapshot in snapshots:
                last = snapshot
        return last

    async def results(self) -> AsyncGenerator[Job, None]:
        """Waits, and gives every job once when it has ended, until the batch has ended.

        They come about as they end, those that ended together in the order in which they were handed in. A job that is
        done has a `caption` and a `receipt`, any other an `error`.
        """
        ended = _EndedJobs(await self._client(), self.name)
        async with aclosing(self.watch()) as snapshots:
            async for snapshot in snapshots:
                async with aclosing(ended.until(snapshot)) as jobs:
                    async for job in jobs:
                        yield job

    async def jobs(self, states: Collection[JobState] = ()) -> AsyncGenerator[Job, None]:
        """The jobs as they are now, without waiting, in the order in which they were handed in; no `states`: all."""
        async with aclosing((await self._client()).jobs(self.name, states)) as jobs:
            async for job in jobs:
                yield job

    async def parts(self, job: Job) -> AsyncGenerator[JobPart, None]:
        """The pages of a document that are read, in order, also where it goes on or has failed; none of a video."""
        async with aclosing((await self._client()).parts(self.name, job)) as parts:
            async for part in parts:
                yield part

    async def cancel(self) -> Batch:
        """Stops what waits and what runs; captions that are done stay. How the batch stands then."""
        return await (await self._client()).cancel(self.name)

    async def retry(self, *, include_failed: bool = False) -> int:
        """Queues dead jobs again, and where asked those that failed, such as for a file that was missing. How many."""
        return await (await self._client()).retry(self.name, include_failed)

    async def _client(self) -> ArchiveClient:
        return ArchiveClient(await self._connect())


class _EndedJobs:
    """The ended jobs of a batch, each given once. Only pages that may hold a new one are fetched: those from the first
    with a job that goes on, until as many have ended as the batch says."""

    def __init__(self, client: ArchiveClient, name: str) -> None:
        self._client = client
        self._name = name
        self._page_token = ""
        """Of the first page that was not ended as a whole; `_given` are ids on that page and later ones."""
        self._given: set[str] = set()
        self._num_given = 0

    async def until(self, batch: Batch) -> AsyncGenerator[Job, None]:
        """Those that had ended when the batch stood so."""
        page_token, is_ended = self._page_token, True
        while batch.is_ended or self._num_given < batch.counts.num_ended:
            page = await self._client.job_page(self._name, page_token=page_token)
            ended = [job for job in page.jobs if job.state.is_terminal]
            for job in ended:
                if job.job_id not in self._given:
                    self._given.add(job.job_id)
                    self._num_given += 1
                    yield job
            page_token = page.next_page_token
            if not page_token:
                return
            is_ended = is_ended and len(ended) == len(page.jobs)
            if is_ended:
                self._page_token = page_token
                self._given -= {job.job_id for job in ended}


class AsyncArchive:
    """The archive of a gateway: videos are captioned in the background, each once, whatever fails meanwhile."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    @_with_keywords
    async def submit(self, videos: Videos, keywords: SubmitKeywords) -> AsyncBatchHandle:
        """Hands in videos to be captioned, and returns as soon as all of them are durably queued.

        Paths are the gateway's: it opens them itself, below one of its `--video-roots`. A job's `custom_id` is its
        path as it was given, or that of its `BatchItem`. While the backlog is full this waits.

        Raises:
            InvalidRequest: an option or a path that cannot be right, or the key of a batch with other options.
            InvalidConfig: the gateway has no archive.
            VideoNotFound: there is no video.
            ServiceUnavailable: the gateway is away. With a `key` the same call may be repeated, and goes on.
        """
        return await self.submit_with(videos, keywords)

    async def submit_with(self, videos: Videos, keywords: SubmitKeywords) -> AsyncBatchHandle:
        """`submit`, of keywords that are gathered already."""
        if isinstance(videos, str | os.PathLike | RemotePath | BatchItem):
            raise InvalidRequest(f"several videos are handed in at once: give a list, such as [{videos!r}]")
        if not isinstance(videos, Iterable):
            raise InvalidRequest(f"several videos are handed in at once, in a list or the like, not {videos!r}")
        client = ArchiveClient(await self._connect())
        submitted = await client.submit_all(keywords.batch(), map(make_item, videos))
        return AsyncBatchHandle(self._connect, submitted.batch_id, submitted)

    def batch(self, name: str) -> AsyncBatchHandle:
        """A handle on the batch of this id or key. The gateway is not asked whether there is one."""
        return AsyncBatchHandle(self._connect, name)

    async def batches(self, limit: int = 100) -> list[Batch]:
        """How this caller's batches stand, the latest first; at most `limit`, which may be up to 1000."""
        return await ArchiveClient(await self._connect()).list_batches(limit)


# -- synchronous ------------------------------------------------------------------------------------------------------

ItemT = TypeVar("ItemT")
ItemT_co = TypeVar("ItemT_co", covariant=True)


class Run(Protocol):
    """Runs asynchronous work on the loop that owns the connection, from any other thread. A bound method of the owner
    keeps the connection open for as long as a handle is held."""

    def __call__(self, work: Coroutine[Any, Any, ItemT], /) -> ItemT:
        """Its result. An interrupted caller cancels it."""


class Items(Protocol[ItemT_co]):
    """What is read item by item: an asynchronous generator, or the like."""

    def __anext__(self) -> Awaitable[ItemT_co]:
        """The next item."""

    async def aclose(self) -> None:
        """Asks for no more. Fails while an item is waited for."""


class BlockingItems(Generic[ItemT]):
    """An iterator that waits for each item. `close`, or dropping it as by `break`, ends the asking."""

    def __init__(self, run: Run, items: Items[ItemT]) -> None:
        self._run = run
        self._items = items  # dropped with this object, it is closed by the loop that it belongs to
        self._reading: asyncio.Task[Any] | None = None
        self._is_closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ItemT:
        item = self._run(self._next_or_none())
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Asks for no more, also where another thread waits for the next item, which is then told that there is
        none."""
        self._run(self._end())

    async def _next_or_none(self) -> ItemT | None:
        self._reading = asyncio.current_task()
        try:
            return await anext(self._items, None)
        except asyncio.CancelledError:
            if self._is_closed:
                return None
            raise
        finally:
            self._reading = None

    async def _end(self) -> None:
        self._is_closed = True
        if self._reading is not None:  # a generator that runs cannot be closed
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._items.aclose()


class BatchHandle:
    """A batch of the archive, like `AsyncBatchHandle`. It goes on whether or not somebody holds a handle on it."""

    def __init__(self, run: Run, batch: AsyncBatchHandle) -> None:
        self._run = run
        self._batch = batch

    @property
    def name(self) -> str:
        """The id of the batch, or the key that it was asked for by."""
        return self._batch.name

    @property
    def submitted(self) -> Submitted | None:
        """Of a handle that `submit` gave: how many videos were new, known, refused or in conflict."""
        return self._batch.submitted

    def status(self) -> Batch:
        """How the batch stands: its state, jobs by state, and sums over those that are done."""
        return self._run(self._batch.status())

    def watch(self) -> BlockingItems[Batch]:
        """The batch now and after every change until it has ended."""
        return BlockingItems(self._run, self._batch.watch())

    def wait(self) -> Batch:
        """How the batch stands when it has ended: every job is done, failed, dead or cancelled."""
        return self._run(self._batch.wait())

    def results(self) -> BlockingItems[Job]:
        """Waits, and gives every job once when it has ended, until the batch has ended.

        They come about as they end, those that ended together in the order in which they were handed in. A job that is
        done has a `caption` and a `receipt`, any other an `error`.
        """
        return BlockingItems(self._run, self._batch.results())

    def jobs(self, states: Collection[JobState] = ()) -> BlockingItems[Job]:
        """The jobs as they are now, without waiting, in the order in which they were handed in; no `states`: all."""
        return BlockingItems(self._run, self._batch.jobs(states))

    def parts(self, job: Job) -> BlockingItems[JobPart]:
        """The pages of a document that are read, in order, also where it goes on or has failed; none of a video."""
        return BlockingItems(self._run, self._batch.parts(job))

    def cancel(self) -> Batch:
        """Stops what waits and what runs; captions that are done stay. How the batch stands then."""
        return self._run(self._batch.cancel())

    def retry(self, *, include_failed: bool = False) -> int:
        """Queues dead jobs again, and where asked those that failed, such as for a file that was missing. How many."""
        return self._run(self._batch.retry(include_failed=include_failed))


class Archive:
    """The archive of a gateway, like `AsyncArchive`: captions in the background, whatever fails meanwhile."""

    def __init__(self, run: Run, archive: AsyncArchive) -> None:
        self._run = run
        self._archive = archive

    @_with_keywords
    def submit(self, videos: Videos, keywords: SubmitKeywords) -> BatchHandle:
        """Hands in videos to be captioned, and returns as soon as all of them are durably queued.

        Paths are the gateway's: it opens them itself, below one of its `--video-roots`. A job's `custom_id` is its
        path as it was given, or that of its `BatchItem`. While the backlog is full this waits.

        Raises:
            InvalidRequest: an option or a path that cannot be right, or the key of a batch with other options.
            InvalidConfig: the gateway has no archive.
            VideoNotFound: there is no video.
            ServiceUnavailable: the gateway is away. With a `key` the same call may be repeated, and goes on.
        """
        return BatchHandle(self._run, self._run(self._archive.submit_with(videos, keywords)))

    def batch(self, name: str) -> BatchHandle:
        """A handle on the batch of this id or key. The gateway is not asked whether there is one."""
        return BatchHandle(self._run, self._archive.batch(name))

    def batches(self, limit: int = 100) -> list[Batch]:
        """How this caller's batches stand, the latest first; at most `limit`, which may be up to 1000."""
        return self._run(self._archive.batches(limit))
