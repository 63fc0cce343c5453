"""Hands a batch in, piece by piece, with patience for a full backlog. Knows no terminal."""

import asyncio
import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.cli.archive.client import PATIENCE_S, ArchiveClient
from slipstream.errors import Overloaded, ServiceUnavailable, ServiceUnreachable, SlipstreamError, VideoNotFound
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

PIECE_ITEMS = 500
"""Items in one call: an error costs the repetition of so many."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
KEY_DIGITS = 40

Tell = Callable[[int, str], None]
"""Takes how many items are handed in and what stands in the way now, "" for nothing."""


@dataclass
class Submitted:
    """What became of the items so far."""

    batch_id: str = ""
    added: int = 0
    known: int = 0
    num_conflicts: int = 0
    rejected: int = 0
    conflicts: list[str] = field(default_factory=list)
    """Custom ids, at most 100 a call."""

    @property
    def handed_in(self) -> int:
        """Items that the queue has."""
        return self.added + self.known

    def add(self, answer: pb.SubmitBatchResponse) -> None:
        """Counts one call's answer."""
        self.batch_id = answer.batch_id
        self.added += answer.num_added
        self.known += answer.num_known
        self.num_conflicts += answer.num_conflicts
        self.rejected += answer.num_rejected
        self.conflicts += answer.conflicts


def batch_key(options: CaptionOptions, output: Path | None, names: Sequence[str]) -> str:
    """Names the same batch for the same command: by where its results go (else what it reads) and what it asks."""
    what = ["output", str(output.resolve())] if output is not None else ["sources", *names]
    content = json.dumps([what, options.SerializeToString(deterministic=True).hex()])
    return f"cli-{hashlib.sha256(content.encode()).hexdigest()[:KEY_DIGITS]}"


async def submit(
    client: ArchiveClient,
    batch: pb.BatchOptions,
    items: Iterable[pb.BatchItem],
    submitted: Submitted,
    tell: Tell,
) -> None:
    """Hands in all items, counting into `submitted`, however long the backlog is full. Repeating it is safe.

    Raises `VideoNotFound` when there are none, and `ServiceUnavailable` when the gateway stays away.
    """
    remaining = iter(items)
    while piece := await asyncio.to_thread(_next_piece, remaining):
        submitted.add(await _submit_piece(client, batch, piece, submitted, tell))
        tell(submitted.handed_in, "")
    if not submitted.batch_id:
        raise VideoNotFound("there is no video to hand in")


def _next_piece(items: Iterator[pb.BatchItem]) -> list[pb.BatchItem]:
    return list(itertools.islice(items, PIECE_ITEMS))


async def _submit_piece(
    client: ArchiveClient,
    batch: pb.BatchOptions,
    piece: Sequence[pb.BatchItem],
    submitted: Submitted,
    tell: Tell,
) -> pb.SubmitBatchResponse:
    pause_s = FIRST_PAUSE_S
    away_since: float | None = None
    while True:
        try:
            return await client.submit(batch, piece)
        except Overloaded as error:
            away_since = None
            tell(submitted.handed_in, f"{error}; waiting for room, {submitted.handed_in:,} items are handed in")
            await asyncio.sleep(error.retry_after_s or pause_s * random.uniform(0.5, 1))
        except ServiceUnavailable as error:
            away_since = away_since or time.monotonic()
            never_there = isinstance(error, ServiceUnreachable) and not submitted.batch_id
            if never_there or time.monotonic() - away_since > PATIENCE_S:
                raise _with_progress(error, submitted) from error
            await asyncio.sleep(FIRST_PAUSE_S)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _with_progress(error: SlipstreamError, submitted: Submitted) -> SlipstreamError:
    if not submitted.batch_id:
        return error
    return ServiceUnavailable(f"{error}; {submitted.handed_in:,} items are handed in, the same command goes on")
