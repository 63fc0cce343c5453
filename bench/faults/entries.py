"""How jobs stand at the end: their texts as clients see them, and who committed them as the queue's store has it."""

from collections.abc import Sequence

from bench.faults.history import Entry
from slipstream.archive.queue import JobRecord
from slipstream.archive.redis_queue import RedisQueue
from slipstream.rpc.v1 import archive_pb2


async def read_entries(redis_url: str, batch_id: str, jobs: Sequence[archive_pb2.Job]) -> list[Entry]:
    """One entry a job of the store, joined to what the archive says of it."""
    texts = {job.job_id: job.summary.text for job in jobs}
    return [
        Entry(job.custom_id, job.job_id, job.state, job.worker, job.epoch, texts.get(job.job_id, ""), job.error)
        for job in await _read_records(redis_url, batch_id)
    ]


async def _read_records(redis_url: str, batch_id: str) -> list[JobRecord]:
    queue = RedisQueue(redis_url)
    records: list[JobRecord] = []
    try:
        page, position = await queue.list_jobs(batch_id)
        records += page
        while position:
            page, position = await queue.list_jobs(batch_id, after=position)
            records += page
    finally:
        await queue.close()
    return records
