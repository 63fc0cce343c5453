"""What the archive's calls promise, on a queue in memory: names, limits, idempotence, owners, pages."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.archive.messages import ModelReceipt, Receipt
from slipstream.archive.queue import BatchState, JobState, QueueUnavailable
from slipstream.archive.records import read_batch, write_result
from slipstream.messages import Caption
from slipstream.rpc.security import OwnerRights
from slipstream.rpc.v1 import archive_pb2, gateway_pb2
from slipstream.services.gateway import archive_servicer as servicer_module
from tests.services.served_archive import CONFIG, ITEMS, Served, refused, serving
from tests.support.archive_client import batch_message, item_message

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest_asyncio.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(servicer_module, "WATCH_S", 0.02)
    async with serving(tmp_path) as served:
        yield served


def batch(**options: Any) -> archive_pb2.SubmitBatchRequest:
    return batch_message(archive_pb2.BatchOptions(**options))


def item(**fields: Any) -> archive_pb2.SubmitBatchRequest:
    return item_message(archive_pb2.BatchItem(**({"custom_id": "a", "source": "/a.mp4"} | fields)))


# -- submitting -------------------------------------------------------------------------------------------------------


async def test_a_key_names_one_batch_and_no_work_is_added_twice(served: Served) -> None:
    first = await served.archive.submit(ITEMS[:3], key="k", prompt="What?")
    again = await served.archive.submit(ITEMS, key="k", prompt="What?")
    assert again.batch_id == first.batch_id
    assert (first.num_added, again.num_added, again.num_known) == (3, 2, 3)
    found = await served.archive.get("k")
    assert found == await served.archive.get(first.batch_id)
    assert (found.key, found.counts.total, found.counts.queued) == ("k", 5, 5)
    assert found.state == archive_pb2.BATCH_STATE_IN_PROGRESS
    assert list(await served.archive.jobs("k")) == [name for name, _ in ITEMS]


async def test_without_a_key_every_submit_is_a_batch(served: Served) -> None:
    ids = {(await served.archive.submit(ITEMS)).batch_id for _ in range(2)}
    assert len(ids) == 2
    listed = await served.stub.ListBatches(archive_pb2.ListBatchesRequest())
    assert {found.batch_id for found in listed.batches} == ids


async def test_another_item_of_a_known_name_is_a_conflict(served: Served) -> None:
    await served.archive.submit(ITEMS, key="k")
    answer = await served.archive.submit(
        [*ITEMS[:2], ("2", "/other.mp4"), ("3", ITEMS[3][1]), ("2", "/third")], key="k"
    )
    assert (answer.num_known, answer.num_conflicts, list(answer.conflicts)) == (3, 2, ["2", "2"])
    assert (await served.archive.jobs("k"))["2"].source == ITEMS[2][1]


async def test_other_options_for_a_key_are_refused(served: Served) -> None:
    await served.archive.submit(ITEMS, key="k", num_frames=8)
    code, message = await refused(served.archive.submit(ITEMS, key="k", num_frames=9))
    assert code == INVALID and "other options" in message


async def test_items_at_fault_are_failed_jobs_and_hinder_nobody(served: Served) -> None:
    bad = [
        archive_pb2.BatchItem(custom_id="frames", source="/a", caption=gateway_pb2.CaptionOptions(num_frames=10_000)),
        archive_pb2.BatchItem(custom_id="path", source="/a", caption=gateway_pb2.CaptionOptions(path="/b")),
        archive_pb2.BatchItem(custom_id="sha", source="/a", sha256="abc"),
        archive_pb2.BatchItem(custom_id="none", source=""),
        archive_pb2.BatchItem(custom_id="long", source="x" * 5000),
    ]
    answer = await served.archive.submit([*ITEMS, *bad], key="k")
    assert (answer.num_added, answer.num_rejected) == (10, 5)
    jobs = await served.archive.jobs("k", states=[archive_pb2.JOB_STATE_FAILED])
    reasons = {name: job.error for name, job in jobs.items()}
    assert "limit of 256" in reasons["frames"] and "path and request_id" in reasons["path"]
    assert "64 hexadecimal" in reasons["sha"] and "source must have" in reasons["none"] == reasons["long"]
    again = await served.archive.submit([*ITEMS, *bad], key="k")
    assert (again.num_known, again.num_rejected) == (10, 5)


async def test_what_no_result_tells_is_not_asked_for(served: Served) -> None:
    """Of an item and of a whole batch: the archive keeps no tokens that logprobs could be of."""
    asked = archive_pb2.BatchItem(custom_id="sure", source="/a", caption=gateway_pb2.CaptionOptions(logprobs=True))
    answer = await served.archive.submit([*ITEMS, asked], key="k")
    assert answer.num_rejected == 1
    assert "logprobs must be left out" in (await served.archive.jobs("k"))["sure"].error
    code, message = await refused(served.archive.submit(ITEMS, key="other", logprobs=True, top_logprobs=2))
    assert code == INVALID and "logprobs must be left out" in message


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "begins with `batch`"),
        ([item()], "begins with `batch`"),
        ([batch(), batch()], "takes `item`s only"),
        ([batch()], "at least one item"),
        ([batch(key="x" * 257), item()], "256 printable"),
        ([batch(key="a\nb"), item()], "256 printable"),
        ([batch(key="batch-" + "0" * 32), item()], "look like a batch id"),
        ([batch(metadata={str(index): "" for index in range(17)}), item()], "at most 16"),
        ([batch(metadata={"a": "x" * 513}), item()], "512 characters"),
        ([batch(priority=9), item()], "priority 9 is unknown"),
        ([batch(caption=gateway_pb2.CaptionOptions(path="/a")), item()], "must be empty"),
        ([batch(caption=gateway_pb2.CaptionOptions(request_id="a")), item()], "must be empty"),
        ([batch(caption=gateway_pb2.CaptionOptions(method="magic")), item()], "method 'magic' is unknown"),
        ([batch(), item(), item(custom_id="")], "item 2: custom_id"),
        ([batch(), item(custom_id="\0")], "item 1: custom_id"),
    ],
)
async def test_what_no_batch_begins_with(
    served: Served, messages: Sequence[archive_pb2.SubmitBatchRequest], complaint: str
) -> None:
    code, message = await served.refusal(*messages)
    assert code == INVALID and complaint in message
    listed = await served.stub.ListBatches(archive_pb2.ListBatchesRequest())
    assert not listed.batches


async def test_a_full_backlog_says_how_to_go_on(served: Served) -> None:
    items = [item(custom_id=str(number)) for number in range(650)]
    code, message = await served.refusal(batch(key="k"), *items)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "600 items of this call were accepted" in message and "same call again" in message
    assert (await served.archive.get("k")).state == archive_pb2.BATCH_STATE_OPEN
    await served.end_all()
    answer = await served.archive.send([batch(key="k"), *items])
    assert (answer.num_added, answer.num_known) == (50, 600)


async def test_an_owner_has_a_quota(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "current_owner", lambda: "ann")
    items = [item(custom_id=str(number)) for number in range(400)]
    code, message = await served.refusal(batch(key="k"), *items)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "350 of your jobs may wait, and do: 350 items of this call were accepted" in message
    monkeypatch.setattr(servicer_module, "current_owner", lambda: "bob")
    monkeypatch.setattr(servicer_module, "current_rights", lambda: OwnerRights(max_waiting=2))
    code, message = await served.refusal(batch(key="k"), *items)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED and "2 of your jobs may wait" in message


async def test_a_retry_keeps_to_the_quota(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "current_owner", lambda: "ann")
    await served.archive.submit(ITEMS, key="k")
    await served.end_all(JobState.FAILED)
    monkeypatch.setattr(servicer_module, "current_rights", lambda: OwnerRights(max_waiting=2))
    again = archive_pb2.RetryDeadRequest(batch="k", include_failed=True)
    for num_queued in (2, 2):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await served.stub.RetryDead(again)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"{num_queued} jobs of the batch are queued again" in str(refused.value.details())
        await served.end_all()
    assert (await served.stub.RetryDead(again)).num_retried == 1
    monkeypatch.setattr(servicer_module, "current_rights", lambda: OwnerRights(max_waiting=0))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await served.stub.RetryDead(again)
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


async def test_the_priority_high_is_a_right(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    first = batch(priority=archive_pb2.JOB_PRIORITY_HIGH)
    assert (await served.archive.send([first, item()])).num_added == 1, "without owners there are no rights"
    monkeypatch.setattr(servicer_module, "current_owner", lambda: "ann")
    code, message = await served.refusal(first, item())
    assert code == grpc.StatusCode.PERMISSION_DENIED and "high=yes" in message and "submit with normal" in message
    monkeypatch.setattr(servicer_module, "current_rights", lambda: OwnerRights(may_use_high=True))
    assert (await served.archive.send([first, item()])).num_added == 1


async def test_what_asks_for_more_costs_more_turns(served: Served) -> None:
    await served.archive.submit(ITEMS[:1], key="plain")
    await served.archive.submit(ITEMS[:1], key="frames", num_frames=4 * CONFIG.default_frames)
    await served.archive.submit(ITEMS[:1], key="tokens", max_new_tokens=CONFIG.default_new_tokens + 1)
    costs = {
        read_batch(served.queue._batches[job.record.batch_id].spec.options).key: job.cost
        for job in served.queue._jobs.values()
    }
    assert costs == {"plain": 1, "frames": 4, "tokens": 2}


async def test_too_many_items(served: Served) -> None:
    code, message = await served.refusal(batch(), *[item()] * 701)
    assert code == grpc.StatusCode.OUT_OF_RANGE and "one call may hand in 700 items" in message


async def test_a_store_that_is_away_is_said_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*args: object) -> None:
        raise QueueUnavailable("the queue's Redis is not reachable")

    monkeypatch.setattr(served.queue, "open_batch", away)
    monkeypatch.setattr(served.queue, "get_batch", away)
    for call in (served.archive.submit(ITEMS), served.archive.get("k"), served.archive.watch("k")):
        assert await refused(call) == (grpc.StatusCode.UNAVAILABLE, "the queue's Redis is not reachable")


# -- looking ----------------------------------------------------------------------------------------------------------


async def test_pages(served: Served) -> None:
    await served.archive.submit([(str(number), "/a") for number in range(70)], key="k")
    for page_size in (1, 30, 70, 100_000):
        assert list(await served.archive.jobs("k", page_size)) == [str(number) for number in range(70)]
    for token in ("-1", "x", "9" * 20, "\u0661"):
        request = archive_pb2.ListJobsRequest(batch="k", page_token=token)
        assert (await refused(served.stub.ListJobs(request)))[0] == INVALID
    request = archive_pb2.ListJobsRequest(batch="k", states=[archive_pb2.JOB_STATE_UNSPECIFIED])
    assert (await refused(served.stub.ListJobs(request)))[0] == INVALID


async def test_a_page_of_long_results_fits_a_message(served: Served) -> None:
    await served.archive.submit([(str(number), "/a") for number in range(200)], key="k")
    text = "x" * 100_000
    receipt = Receipt("", ModelReceipt("", "", ""), None, {}, "", 0, "", runs=1)
    await served.end_all(result=write_result(Caption(text, 1, None), receipt))
    page = await served.stub.ListJobs(archive_pb2.ListJobsRequest(batch="k", page_size=1000))
    assert 0 < len(page.jobs) < 200 and page.next_page_token
    jobs = await served.archive.jobs("k", page_size=1000)
    assert len(jobs) == 200 and all(job.summary.text == text and job.receipt.runs == 1 for job in jobs.values())


async def test_a_result_of_another_release_hides_no_job(served: Served) -> None:
    await served.archive.submit(ITEMS[:1], key="k")
    await served.end_all(result='{"v":99}')
    (job,) = (await served.archive.jobs("k")).values()
    assert job.state == archive_pb2.JOB_STATE_DONE and not job.HasField("summary") and "another" in job.error


# -- ending -----------------------------------------------------------------------------------------------------------


async def test_cancelling_and_retrying(served: Served) -> None:
    await served.archive.submit(ITEMS[:2], key="k")
    await served.end_all(JobState.FAILED)
    await served.archive.submit(ITEMS, key="k")
    cancelled = await served.stub.CancelBatch(archive_pb2.CancelBatchRequest(batch="k"))
    assert (cancelled.counts.failed, cancelled.counts.cancelled) == (2, 3)
    assert cancelled.state == archive_pb2.BATCH_STATE_CANCELLED
    await served.archive.submit(ITEMS[:2], key="other")
    await served.end_all(JobState.FAILED)
    for include_failed, expected in ((False, 0), (True, 2)):
        request = archive_pb2.RetryDeadRequest(batch="other", include_failed=include_failed)
        assert (await served.stub.RetryDead(request)).num_retried == expected


async def test_a_batch_is_its_owners_alone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer_module, "current_owner", lambda: "ann")
    mine = await served.archive.submit(ITEMS, key="k")
    monkeypatch.setattr(servicer_module, "current_owner", lambda: "bob")
    theirs = await served.archive.submit(ITEMS, key="k")
    assert theirs.batch_id != mine.batch_id and theirs.num_added == 5
    for name in (mine.batch_id, "unknown"):
        calls: list[Any] = [
            served.archive.get(name),
            served.archive.watch(name),
            served.archive.jobs(name),
            served.stub.CancelBatch(archive_pb2.CancelBatchRequest(batch=name)),
            served.stub.RetryDead(archive_pb2.RetryDeadRequest(batch=name)),
        ]
        for call in calls:
            code, details = await refused(call)
            assert code == NOT_FOUND and f"no batch {name} here" in details
    listed = await served.stub.ListBatches(archive_pb2.ListBatchesRequest())
    assert [found.batch_id for found in listed.batches] == [theirs.batch_id]
    record = await served.queue.get_batch(mine.batch_id)
    assert record.owner == "ann" and record.state is BatchState.IN_PROGRESS and read_batch(record.options).key == "k"
