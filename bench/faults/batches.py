"""The archive as the fault runs use it: one call each, whatever gateway answers, and no patience beyond their own."""

import asyncio
import time
from collections.abc import Sequence

from slipstream import AsyncCaptioner
from slipstream.archive.messages import Batch, BatchItem, BatchOptions, Job
from slipstream.archive.queue import Priority
from slipstream.client.archive_client import ArchiveClient
from slipstream.errors import SlipstreamError

CALL_TIMEOUT_S = 10.0
POLL_S = 0.5


async def submit(
    captioner: AsyncCaptioner,
    key: str,
    items: Sequence[BatchItem],
    timeout_s: float = CALL_TIMEOUT_S,
    *,
    priority: Priority = Priority.NORMAL,
) -> str:
    """Hands the batch in by one call; its id. Raises `SlipstreamError`, and TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        return (await (await archive_of(captioner)).submit(BatchOptions(key, priority=priority), items)).batch_id


async def wait_ended(captioners: Sequence[AsyncCaptioner], batch: str, timeout_s: float) -> Batch:
    """Polls until the batch has ended, asking one gateway after the other. Raises TimeoutError."""
    last: Batch | None = None
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for captioner in captioners:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    last = await (await archive_of(captioner)).get(batch)
                break
            except (SlipstreamError, TimeoutError):
                continue
        if last is not None and last.is_ended:
            return last
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"the batch has not ended within {timeout_s:.0f} s: {last and last.counts}")


async def list_jobs(captioner: AsyncCaptioner, batch: str) -> list[Job]:
    return [job async for job in (await archive_of(captioner)).jobs(batch)]


async def archive_of(captioner: AsyncCaptioner) -> ArchiveClient:
    return ArchiveClient(await captioner.connection())
