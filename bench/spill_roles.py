"""Who works on the queue of the part `spill` and its like, each a process of its own, and what they make up.

The captioner answers at once. Results are as large as those of a video, and some of them differ.
"""

import asyncio
import gc
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.archive.compactor import Compactor
from slipstream.archive.feeder import Feeder
from slipstream.archive.messages import ModelReceipt, Receipt
from slipstream.archive.queue import JobSpec, JobState, Lease, Outcome, QueuePolicy
from slipstream.archive.records import JobPayload, write_job, write_result
from slipstream.archive.results_folder import ResultsFolder
from slipstream.archive.spill_queue import SpillQueue
from slipstream.archive.worker import Worker
from slipstream.logs import configure_logs
from slipstream.messages import Caption, VideoFacts

FRAMES, TEXT_CHARS = 32, 700
RESULTS = 997
SLOTS = 64
"""Of a worker: its jobs take no time, only round trips."""


@dataclass(frozen=True)
class Given:
    """What a role is told, on its command line."""

    redis: str
    folder: str
    queue_bytes: int
    file_bytes: int

    def queue(self) -> SpillQueue:
        """Opens it."""
        policy = QueuePolicy(lease_s=5.0, max_backlog=100_000_000, queue_bytes=self.queue_bytes)
        return SpillQueue(self.redis, ResultsFolder(self.folder), policy=policy)


def made_up_result(seed: int) -> str:
    """As large as that of a video of 32 frames."""
    words = random.Random(seed)
    times = tuple(float(time_s) for time_s in np.linspace(0.0, words.uniform(50, 60), FRAMES))
    text = "".join(words.choice("abcdefghij klmnop qrstu ") for _ in range(TEXT_CHARS))
    video = VideoFacts(duration_s=60.0, num_frames=FRAMES, timestamps_s=times)
    caption = Caption(text, 160, None, video=video)
    model = ModelReceipt("target", "0" * 64, "bfloat16")
    receipt = Receipt("0", model, model, {"prompt": "What happens?"}, f"{seed:064x}", 1_000_000, f"{seed + 1:064x}")
    return write_result(caption, receipt)


def made_up_results() -> list[str]:
    """Some that differ."""
    return [made_up_result(seed) for seed in range(RESULTS)]


def outcome_of(lease: Lease, results: Sequence[str]) -> Outcome:
    """With one of these results."""
    result, content_key = results[result_of(int(lease.custom_id))], content_of(lease.custom_id)
    return Outcome(JobState.DONE, result, tallies={"tokens": 160.0}, content_key=content_key)


def made_up_jobs(numbers: Iterable[int]) -> list[JobSpec]:
    """Those of these numbers."""
    return [JobSpec(f"{number:08d}", write_job(JobPayload(_path(number), {}, ""))) for number in numbers]


def _path(number: int) -> str:
    return f"/archive/{number // 1000:05d}/recording-{number:08d}.mp4"


def result_of(job: int) -> int:
    """Which of the made-up results a job has, by its number."""
    return job * 37 % RESULTS


def content_of(custom_id: str) -> str:
    """The content key of a job's video."""
    return f"content of {custom_id}"


async def work(given: Given) -> None:
    """Captions that are there at once."""
    results = made_up_results()

    async def handle(lease: Lease, progress: Callable[[str], None]) -> Outcome:
        return outcome_of(lease, results)

    worker = Worker(given.queue(), handle, slots=SLOTS)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
    await worker.run()


async def compact(given: Given) -> None:
    """Until killed."""
    queue = given.queue()
    await Compactor(queue, queue.folder, given.file_bytes, 20.0).run()


async def feed(given: Given) -> None:
    """Until killed."""
    queue = given.queue()
    await Feeder(queue, queue.folder).run()


ROLES = {"work": work, "compact": compact, "feed": feed}


if __name__ == "__main__":
    configure_logs(sys.argv[1], "warning")
    gc.collect()
    gc.freeze()  # as services do once they are set up
    asyncio.run(ROLES[sys.argv[1]](Given(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
