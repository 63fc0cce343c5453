"""What is usual in a batch, asked of the archive: enough to mark the results that are not."""

from contextlib import aclosing

from slipstream.archive.messages import Job
from slipstream.archive.quality import Norms
from slipstream.archive.queue import JobState
from slipstream.client.archive_client import ArchiveClient
from slipstream.messages import Caption

LOOKED_AT = 500
"""Results of a batch that say what is usual in it: the first ones, so that the same batch says the same again."""


async def batch_norms(client: ArchiveClient, batch: str) -> Norms:
    """Of the first `LOOKED_AT` texts that there are: of videos, pages and segments. Raises what `client.jobs` does."""
    said: list[Caption] = []
    async with aclosing(client.jobs(batch, {JobState.DONE})) as jobs:
        async for job in jobs:
            said += await _captions(client, batch, job)
            if len(said) >= LOOKED_AT:
                break
    return Norms.of(said[:LOOKED_AT])


async def _captions(client: ArchiveClient, batch: str, job: Job) -> list[Caption]:
    if job.caption is not None:
        return [job.caption]
    async with aclosing(client.parts(batch, job)) as parts:
        return [part.caption async for part in parts if part.caption is not None]
