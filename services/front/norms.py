"""What is usual in a batch, kept for a while: a page that is open asks for marks every two seconds."""

import time
from dataclasses import dataclass, field

from slipstream.archive.quality import UNKNOWN_BATCH, BatchNorms
from slipstream.client.archive_client import ArchiveClient

KEPT_S = 30.0
MOST_BATCHES = 256


@dataclass
class KnownNorms:
    """By owner and batch, those asked for last."""

    _known: dict[tuple[str, str], tuple[float, BatchNorms]] = field(default_factory=dict)

    async def of(self, archive: ArchiveClient, owner: str, batch: str) -> BatchNorms:
        """At most `KEPT_S` old. `archive` speaks for the owner. Raises what `ArchiveClient.jobs` does."""
        asked_at, norms = self._known.get((owner, batch), (-KEPT_S, UNKNOWN_BATCH))
        if time.monotonic() - asked_at < KEPT_S:
            return norms
        norms = await archive.norms(batch)
        self._known.pop((owner, batch), None)
        self._known[owner, batch] = time.monotonic(), norms
        if len(self._known) > MOST_BATCHES:
            del self._known[next(iter(self._known))]
        return norms
