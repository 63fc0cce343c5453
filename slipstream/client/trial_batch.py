"""A small batch that somebody waits for and wants no more of than its results: it is cancelled when they leave."""

import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

from slipstream.archive.messages import Batch, BatchItem, BatchOptions, Job, JobPart
from slipstream.archive.queue import UnknownBatch
from slipstream.client.archive_client import ArchiveClient

Follow = Callable[[Batch], None]


def unwatched(batch: Batch) -> None:
    """For those who do not want to see how it goes."""


async def run_trial(
    client: ArchiveClient, purpose: str, options: BatchOptions, items: Sequence[BatchItem], follow: Follow = unwatched
) -> AsyncGenerator[tuple[Job, list[JobPart]], None]:
    """Hands in `items` under a key of their own, waits, and gives each job at its end, with its pages or segments.
    `purpose` says in the list of batches what it is. Raises what `client` does."""
    named = replace(options, key=f"{purpose}-{secrets.token_hex(16)}", metadata={"purpose": purpose})
    has_ended = False
    try:
        batch_id = (await client.submit_all(named, items)).batch_id
        async with aclosing(client.follow(batch_id)) as snapshots:
            async for snapshot in snapshots:
                follow(snapshot)
                has_ended = snapshot.is_ended
    finally:
        if not has_ended:
            with suppress(UnknownBatch):  # nothing of it came there
                await client.cancel(named.key)
    async with aclosing(client.jobs(batch_id)) as jobs:
        async for job in jobs:
            yield job, [part async for part in client.parts(batch_id, job)]
