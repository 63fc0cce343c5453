"""Who watches a batch in the archive is told of changes only, however many watch it, and of what ends the watch."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.archive.messages import BatchItem, BatchOptions
from slipstream.archive.queue import JobState, Outcome, QueueUnavailable
from slipstream.cli.archive.batch_view import why_waiting
from slipstream.client import archive_client
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.connection import Connection
from slipstream.rpc.v1 import archive_pb2
from slipstream.services.gateway import archive_servicer as servicer_module
from tests.services.served_archive import CONFIG, ITEMS, Served, refused, serving
from tests.support.archive_client import archive_at
from tests.support.processes import eventually


@pytest_asyncio.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(servicer_module, "WATCH_S", 0.02)
    async with serving(tmp_path) as served:
        yield served


TOLD = "the gateway that was asked takes no jobs: the target does not answer"
THERE = SimpleNamespace(reason="", since_s=7.0)
AWAY = SimpleNamespace(reason="the target does not answer", since_s=5.0)
"""As a gateway knows what it needs."""


async def test_a_watch_tells_changes_only_and_ends(served: Served) -> None:
    await served.archive.submit(ITEMS, key="k")
    call = served.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch="k"), timeout=120)
    seen = [await call.read()]
    await asyncio.sleep(0.2)  # nothing changes, so nothing is said
    leases = await served.queue.take("tester", 2)
    seen.append(await call.read())
    await asyncio.sleep(0.2)
    for lease in leases:
        await served.queue.finish(lease, Outcome(JobState.FAILED, error="no"))
    await served.end_all()
    while (change := await call.read()) is not grpc.aio.EOF:
        seen.append(change)
    assert len({change.SerializeToString(deterministic=True) for change in seen}) == len(seen) <= 5
    assert seen[0].counts.queued == 5 and seen[1].counts.running == 2
    last = seen[-1]
    assert last.state == archive_pb2.BATCH_STATE_COMPLETED
    assert (last.counts.done, last.counts.failed, last.totals.tokens, last.totals.video_s) == (3, 2, 9, 4.5)


async def test_who_watches_is_told_why_jobs_wait(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last reason in the queue; where all wait, the trouble of the gateway that is asked."""
    await served.archive.submit(ITEMS[:2], key="k")
    call = served.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch="k"), timeout=120)
    assert (await call.read()).obstacle == ""
    first, second = await served.queue.take("tester", 2)
    await served.queue.retry(first, "no draft here", 60.0, counted=False)
    await eventually_told(call, "no draft here")
    monkeypatch.setattr(served.servicer, "_needed", (THERE, AWAY))
    assert (await served.archive.get("k")).obstacle == "no draft here", "one of them runs"
    await served.queue.crash(second, "the target died")
    told = await eventually_told(call, TOLD)
    assert told.obstacle_s == 5.0
    monkeypatch.undo()
    assert (await served.archive.get("k")).obstacle == "the target died"


async def test_why_jobs_wait_is_told_while_it_is_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the queue has heard is news for a while; this gateway's trouble is told for as long as it lasts."""
    await served.archive.submit(ITEMS[:1], key="k")
    (lease,) = await served.queue.take("tester", 1)
    await served.queue.retry(lease, "no draft here", 60.0, counted=False)
    assert (await served.archive.get("k")).obstacle == "no draft here"
    monkeypatch.setattr(servicer_module, "RECENT_S", 0.0)
    told = await served.archive.get("k")
    assert (told.obstacle, told.obstacle_s) == ("", 0.0)
    monkeypatch.setattr(served.servicer, "_needed", (THERE, AWAY))
    told = await served.archive.get("k")
    assert (told.obstacle, told.obstacle_s) == (TOLD, 5.0)
    (batch,) = await archive_at(served.channel).batches()
    assert why_waiting(batch).endswith(" ago)") and TOLD in why_waiting(batch)


async def eventually_told(call: Any, obstacle: str) -> archive_pb2.Batch:
    """The next state of a batch with that obstacle."""
    while (told := await call.read()).obstacle != obstacle:
        pass
    return told


async def test_a_batch_that_is_being_handed_in_is_not_completed_by_what_is_done_so_far(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs may be done faster than they are handed in, as those of a bucket that is being listed."""
    monkeypatch.setattr(archive_client, "PIECE_ITEMS", 2)
    may_go_on = threading.Event()

    def items() -> Iterator[BatchItem]:
        for custom_id, source in ITEMS:
            if custom_id == "3":
                assert may_go_on.wait(60)
            yield BatchItem(custom_id, source)

    client = ArchiveClient(Connection(served.channel))
    handing_in = asyncio.create_task(client.submit_all(BatchOptions("k"), items()))
    await eventually(served.end_all)
    call = served.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch="k"), timeout=120)
    told = await call.read()
    assert told.state == archive_pb2.BATCH_STATE_OPEN and told.counts.done == 2
    may_go_on.set()
    assert (await handing_in).num_added == len(ITEMS)
    assert await served.end_all() == len(ITEMS) - 2
    while (change := await call.read()) is not grpc.aio.EOF:
        told = change
    assert told.state == archive_pb2.BATCH_STATE_COMPLETED and told.counts.done == len(ITEMS)


async def test_a_watch_of_a_batch_that_was_left_open_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submit that breaks off leaves its batch open; when all of it is done nothing will ever end it."""
    monkeypatch.setattr(servicer_module, "ABANDONED_S", 0.3)
    monkeypatch.setattr(served.queue, "seal_batch", lambda batch_id: asyncio.sleep(0))
    await served.archive.submit(ITEMS, key="k")
    watching = asyncio.create_task(served.archive.watch("k"))
    await asyncio.sleep(0.6)
    assert not watching.done(), "it has jobs that wait"
    await served.end_all()
    code, message = await refused(watching)
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "submit it again" in message


async def test_a_gateway_that_ends_lets_its_watchers_go(served: Served) -> None:
    await served.archive.submit(ITEMS, key="k")
    watching = asyncio.create_task(served.archive.watch("k"))
    await asyncio.sleep(0.1)
    served.servicer._stopping.set()
    code, message = await refused(watching)
    assert code == grpc.StatusCode.UNAVAILABLE and "watch the batch at another" in message


async def test_a_batch_is_looked_at_once_for_all_who_watch_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine hundred watchers: as many looks as one of them would cause, and others are answered meanwhile."""
    monkeypatch.setattr(servicer_module, "WATCH_S", 0.2)
    await served.archive.submit(ITEMS, key="k")
    get_batch, looks = served.queue.get_batch, 0

    async def look(batch_id: str, owner: str | None = None) -> Any:
        nonlocal looks
        looks += 1
        return await get_batch(batch_id, owner)

    calls = [served.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch="k"), timeout=120) for _ in range(900)]
    await asyncio.gather(*(call.read() for call in calls))
    monkeypatch.setattr(served.queue, "get_batch", look)
    for _ in range(10):
        await served.archive.get("k")
        await served.stub.ListBatches(archive_pb2.ListBatchesRequest())
        await asyncio.sleep(0.05)
    own = looks - 10 - 10  # a list looks at its one batch
    assert own <= 100, "900 watchers would have looked thousands of times"
    await served.end_all()
    for call in calls:
        while (change := await call.read()) is not grpc.aio.EOF:
            last = change
        assert last.state == archive_pb2.BATCH_STATE_COMPLETED
    assert not served.servicer._watches and not +served.servicer._num_watchers


async def test_who_watches_too_often_is_refused_and_others_are_not(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.archive.submit(ITEMS, key="k")
    monkeypatch.setattr(served.servicer, "_config", replace(CONFIG, owner_max_watches=3))
    calls = [served.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch="k"), timeout=120) for _ in range(3)]
    await asyncio.gather(*(call.read() for call in calls))
    code, message = await refused(served.archive.watch("k"))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "you watch 3 times already" in message
    monkeypatch.setattr(servicer_module, "current_owner", lambda: "bob")
    await served.archive.submit(ITEMS, key="b")
    other = served.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch="b"), timeout=120)
    assert (await other.read()).counts.queued == 5
    for call in (*calls, other):
        call.cancel()
    await eventually(lambda: not served.servicer._watches and not +served.servicer._num_watchers)


async def test_a_watch_hears_of_a_store_that_goes_away(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await served.archive.submit(ITEMS, key="k")
    calls = [served.stub.WatchBatch(archive_pb2.WatchBatchRequest(batch="k"), timeout=120) for _ in range(2)]
    await asyncio.gather(*(call.read() for call in calls))

    async def away(*args: object) -> None:
        raise QueueUnavailable("the queue's Redis is not reachable")

    monkeypatch.setattr(served.queue, "get_batch", away)
    for call in calls:
        assert (await refused(call.read()))[0] == grpc.StatusCode.UNAVAILABLE
