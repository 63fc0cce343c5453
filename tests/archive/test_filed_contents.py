"""Results that left Redis are found again by their content: never another's, and no longer than their batch is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from slipstream.archive.queue import (
    BatchSpec,
    JobState,
    Outcome,
    sha256,
)
from tests.archive.spilled import NAMES, Spill, files_in
from tests.archive.worlds import DONE, specs


async def test_results_in_files_are_found_by_their_content(spill: Spill, tmp_path: Path) -> None:
    """From any gateway, as long as their batch is known and their file is there; never another's."""
    await spill.queue.open_batch(BatchSpec("batch", "me"))
    await spill.queue.submit("batch", specs(*NAMES[:40]))
    for lease in await spill.queue.take("w", 40):
        name = lease.custom_id
        await spill.queue.finish(lease, Outcome(JobState.DONE, f"result of {name}", content_key=f"content {name}"))
    await spill.work()
    fresh = Spill(spill.url, f"file://{tmp_path}", spill.name)
    found = [await fresh.queue.find_result(f"content {name}") for name in NAMES[:41]]
    assert found == [f"result of {name}" for name in NAMES[:40]] + [None]
    await _entries_say(spill, "content n1", "content n2")
    assert await fresh.queue.find_result("content n1") is None, "what lies there is of another content"
    for file in files_in(tmp_path, "part-*.jsonl.gz"):
        file.unlink()
    assert await fresh.queue.find_result("content n39") == "result of n39", "read before, and kept"
    gone = Spill(spill.url, f"file://{tmp_path}", spill.name)
    assert await gone.queue.find_result("content n39") is None
    await fresh.queue.close()
    await gone.queue.close()


async def _entries_say(spill: Spill, content: str, other: str) -> None:
    """Lets the entry of a content point where the other's does, as that of an equal beginning would."""
    async with Redis.from_url(spill.url) as redis:
        key, name, there = f"{{{spill.name}}}:contents", sha256(content), sha256(other)
        stored: Any = await redis.hget(key, there[:4])
        await redis.hset(key, name[:4], bytes.fromhex(name[4:16]) + stored[6:])


async def test_a_content_goes_with_the_last_batch_that_has_it(spill: Spill) -> None:
    await spill.queue.open_batch(BatchSpec("batch", "me"))
    await spill.queue.open_batch(BatchSpec("old", "me"))
    for batch, names in (("old", NAMES[:40]), ("batch", NAMES[:2])):
        await spill.queue.submit(batch, specs(*names))
        await spill.queue.seal_batch(batch)
        for lease in await spill.queue.take("w", 40):
            await spill.queue.finish(lease, Outcome(JobState.DONE, batch, content_key=lease.custom_id))
        await spill.work()
    assert [await spill.queue.find_result(name) for name in NAMES[:3]] == ["batch", "batch", "old"]
    for batch, left in (("old", ["batch", "batch", None]), ("batch", [None] * 3)):
        async with Redis.from_url(spill.url) as redis:
            await redis.zadd(f"{{{spill.name}}}:expiry", {batch: 1})
            while await spill.queue.sweep():
                pass
        assert [await spill.queue.find_result(name) for name in NAMES[:3]] == left
    assert not {"contents", "filed"} & await spill.keys()


async def test_a_bucket_of_entries_of_batches_that_are_gone_is_emptied(spill: Spill) -> None:
    key, field = f"{{{spill.name}}}:contents", sha256("content")[:4]
    gone = b"".join(bytes([number]) * 6 + (99).to_bytes(4, "big") + bytes(4) for number in range(16))
    async with Redis.from_url(spill.url) as redis:
        await redis.hset(key, field, gone)
        await spill.queue.open_batch(BatchSpec("batch", "me"))
        await spill.queue.submit("batch", specs("n0"))
        (lease,) = await spill.queue.take("w", 1)
        await spill.queue.finish(lease, replace(DONE, content_key="content"))
        await spill.work()
        stored: Any = await redis.hget(key, field)
    assert len(stored) == 14 and await spill.queue.find_result("content") == DONE.result
