"""An audit of the archive: all texts are held against their receipts, and a share of them is made again by plain
decoding, by an archive whose target may be another one."""

import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from slipstream.archive.audits import (
    AuditOutcome,
    Claim,
    Finding,
    check_digests,
    claim_of,
    compare,
    place_of,
    replay_item,
    why_not_replayed,
    without_receipt,
)
from slipstream.archive.messages import BatchItem, BatchOptions, Job, JobPart
from slipstream.archive.queue import Priority
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.trial_batch import Follow, run_trial, unwatched
from slipstream.errors import InvalidRequest

Record = Mapping[str, Any]
"""A line of an export."""
RecordOf = Callable[[Job, list[JobPart]], Record]


@dataclass
class Audit:
    """What was found."""

    num_results: int = 0
    """That were looked at: each one's texts were held against its receipt."""
    num_replayed: int = 0
    findings: list[Finding] = field(default_factory=list)
    """Of all that were replayed, and of those that are altered."""

    def count(self, verdict: AuditOutcome) -> int:
        """Texts of which that was found."""
        return sum(finding.verdict is verdict for finding in self.findings)

    @property
    def has_passed(self) -> bool:
        """Something was compared, and all that was is the same."""
        bad = (AuditOutcome.ALTERED, AuditOutcome.DIFFERS, AuditOutcome.FAILED)
        return self.count(AuditOutcome.SAME) > 0 and not any(self.count(verdict) for verdict in bad)


@dataclass
class _Sample:
    """The results to make again, and the one that would be if none is."""

    share: float
    seed: int
    chosen: dict[str, Claim] = field(default_factory=dict)
    first: tuple[float, Claim] | None = None

    def look_at(self, claim: Claim) -> None:
        place = place_of(claim.custom_id, self.seed)
        if place < self.share:
            self.chosen[claim.custom_id] = claim
        elif self.first is None or place < self.first[0]:
            self.first = place, claim

    @property
    def claims(self) -> dict[str, Claim]:
        """At least one, where there is any."""
        if self.chosen or self.first is None:
            return self.chosen
        return {self.first[1].custom_id: self.first[1]}


async def audit(
    records: AsyncIterator[Record],
    replayer: ArchiveClient,
    record_of: RecordOf,
    share: float,
    seed: int,
    follow: Follow = unwatched,
) -> Audit:
    """Looks at all `records`, and has `share` of them made again by the archive behind `replayer`; which ones says
    `seed`. The replay is a batch of low priority, which is cancelled when this is.

    Raises what `replayer` does, and `InvalidRequest` where no record has a result.
    """
    done = Audit()
    sample = _Sample(share, seed)
    async for record in records:
        if (claim := claim_of(record)) is None:
            if record.get("state") == "done":
                done.num_results += 1
                done.findings.append(without_receipt(record))
            continue
        done.num_results += 1
        done.findings += check_digests(claim)
        if reason := why_not_replayed(claim):
            done.findings.append(Finding(claim.custom_id, AuditOutcome.SKIPPED, reason))
        else:
            sample.look_at(claim)
    if not done.num_results:
        raise InvalidRequest("there is no result to audit: no job is done, or this is no export of an archive")
    items = [item for claim in sample.claims.values() if (item := _item(claim, done)) is not None]
    if items:
        options = BatchOptions(priority=Priority.LOW)
        async with aclosing(run_trial(replayer, "audit", options, items, follow)) as replayed:
            async for job, parts in replayed:
                done.num_replayed += 1
                done.findings += compare(sample.claims[job.custom_id], record_of(job, parts))
    return done


def _item(claim: Claim, done: Audit) -> BatchItem | None:
    try:
        return replay_item(claim, random.random())
    except InvalidRequest as error:
        reason = f"its options are not taken any more: {error}"
        done.findings.append(Finding(claim.custom_id, AuditOutcome.FAILED, reason))
        return None
