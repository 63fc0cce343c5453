"""A worker as a process of its own, for tests that kill and freeze it. Its jobs sleep, or kill it."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable

from slipstream.archive.queue import JobState, Lease, Outcome, QueuePolicy
from slipstream.archive.redis_queue import RedisQueue
from slipstream.archive.worker import Worker
from slipstream.logs import configure_logs, log_all_output

POLICY = QueuePolicy(lease_s=4.0)


async def handle(lease: Lease, progress: Callable[[str], None]) -> Outcome:
    task = json.loads(lease.payload)
    if task.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(task["sleep_s"])
    return Outcome(JobState.DONE, result=json.dumps({"worker": lease.worker}))


async def main(url: str) -> None:
    queue = RedisQueue(url, policy=POLICY)
    worker = Worker(queue, handle, slots=4)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()
    await queue.close()


if __name__ == "__main__":
    configure_logs("worker")
    log_all_output()
    asyncio.run(main(sys.argv[1]))
