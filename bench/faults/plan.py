"""Which process is struck when and how. Pure: the same seed gives the same plan."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

FREEZE_S = 20.0
KINDS = ("kill", "freeze")
SERVICES = ("gateway", "target", "draft", "redis")


@dataclass(frozen=True)
class Strike:
    """One thing that the nemesis does."""

    kind: str
    """"kill" (SIGKILL), "freeze" (SIGSTOP for `freeze_s`) or "zombie": a gateway that has work to commit while the
    queue is down is frozen until others have done the work again."""
    victim: str
    at_share: float
    """Share of the jobs that are done when it happens."""
    delay_s: float
    """And so long after that."""
    freeze_s: float = FREEZE_S


def plan_strikes(seed: int, gateways: Sequence[str], freeze_s: float = FREEZE_S) -> list[Strike]:
    """Every service killed and frozen once, and one zombie, in random order, spread over the run."""
    rng = random.Random(seed)
    wanted = [(kind, service) for service in SERVICES for kind in KINDS] + [("zombie", "gateway")]
    rng.shuffle(wanted)
    width = 1 / (len(wanted) + 1)
    return [
        Strike(
            kind,
            rng.choice(list(gateways)) if service == "gateway" else service,
            at_share=(index + rng.uniform(0.1, 0.9)) * width,
            delay_s=rng.uniform(0, 1.5),
            freeze_s=freeze_s,
        )
        for index, (kind, service) in enumerate(wanted)
    ]
