"""Which draft fails when, and how the runs went. Pure: no clock, no process."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.samples import Spread

KINDS = ("none", "kill", "freeze", "restart")
FREEZE_S = (0.3, 3.0)
EARLY_SHARE, LATE_SHARE = 0.1, 0.8
"""A draft that must join again dies in the first tenth of the text; the others any time before its last fifth."""
POLICIES = ("self_clocked", "fixed")


@dataclass(frozen=True)
class Fault:
    """What happens to the draft in one run."""

    kind: str
    clip: int
    at_token: int
    freeze_s: float
    policy: str


@dataclass(frozen=True)
class Outcome:
    """How one run went."""

    fault: Fault
    identical: bool
    drafts_lost: int
    struck_at: int
    """Tokens that there were when the fault happened; 0 when it did not, as no draft had joined in time."""
    rejoined: bool
    """A draft became ready after the fault."""
    longest_gap_s: float
    tokens_per_s: float

    @property
    def passed(self) -> bool:
        """The fault happened, the text is the same, and a draft that had the time to come back did."""
        happened = self.struck_at > 0 or self.fault.kind == "none"
        return happened and self.identical and (self.rejoined or self.fault.kind != "restart")


def plan_faults(counts: Mapping[str, int], num_clips: int, num_tokens: int, seed: int) -> list[Fault]:
    """The runs of each kind, in random order."""
    rng = random.Random(seed)
    faults = [
        Fault(
            kind,
            clip=index % num_clips,
            at_token=rng.randint(1, max(1, int(num_tokens * (EARLY_SHARE if kind == "restart" else LATE_SHARE)))),
            freeze_s=rng.uniform(*FREEZE_S),
            policy=POLICIES[index // num_clips % len(POLICIES)],
        )
        for kind, count in counts.items()
        for index in range(count)
    ]
    rng.shuffle(faults)
    return faults


def kind_row(kind: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What the runs of one kind showed."""
    own = [outcome for outcome in outcomes if outcome.fault.kind == kind]
    gaps, rates = Spread.of(o.longest_gap_s for o in own), Spread.of(o.tokens_per_s for o in own)
    return {
        "kind": kind,
        "runs": len(own),
        "identical": sum(outcome.identical for outcome in own),
        "struck": sum(outcome.struck_at > 0 for outcome in own) if kind != "none" else None,
        "drafts_lost": sum(outcome.drafts_lost for outcome in own),
        "rejoined": sum(outcome.rejoined for outcome in own) if kind != "none" else None,
        "longest_gap_s": max((outcome.longest_gap_s for outcome in own), default=None),
        "median_longest_gap_s": None if gaps is None else gaps.median,
        "tokens_per_s": None if rates is None else rates.median,
    }
