"""What a gateway can be told about the archive at start."""

from dataclasses import dataclass

from slipstream.config import between, option
from slipstream.jobs.base import QueuePolicy


@dataclass(frozen=True, kw_only=True)
class ArchiveOptions:
    """Options of the archive. Those of the queue must be the same at every gateway that shares it."""

    redis: str = option("URL of the Redis that holds the archive's queue; empty: no archive", default="")
    redis_queue: str = option("name of the queue within that Redis", default="slipstream")
    archive_slots: int = option("archive captions at once; 0 only takes batches in", default=2, check=between(0, 256))
    archive_ahead: int = option("archive videos decoded ahead of the models", default=2, check=between(0, 256))
    archive_drain_s: float = option(
        "how long running archive captions may go on after SIGTERM; what remains is run elsewhere",
        default=5.0,
        check=between(0, 3600),
    )
    max_batch_items: int = option("most jobs of one batch", default=1_000_000, check=between(1, 100_000_000))
    lease_s: float = option(
        "a gateway that is silent for so long has lost its jobs", default=15.0, check=between(1, 3600)
    )
    max_attempts: int = option("counted failures after which a job is dead", default=4, check=between(1, 100))
    max_crashes: int = option("deaths of whatever ran it after which a job is dead", default=3, check=between(1, 100))
    max_backlog: int = option("jobs that may wait", default=1_000_000, check=between(1, 100_000_000))
    retention_s: float = option(
        "how long a batch is kept after its last job ended", default=30 * 86_400.0, check=between(1, 10 * 365 * 86_400)
    )

    @property
    def queue_policy(self) -> QueuePolicy:
        """The part that the queue is told."""
        return QueuePolicy(
            lease_s=self.lease_s,
            max_attempts=self.max_attempts,
            max_crashes=self.max_crashes,
            max_backlog=self.max_backlog,
            retention_s=self.retention_s,
        )
