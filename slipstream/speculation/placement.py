"""How many targets one draft should serve, and whether any should: measured costs in, tokens a device out.

A device that has a target decodes; one that has the draft decodes nothing by itself. So a draft for n targets must make
each of them more than (n + 1) / n times as fast before n + 1 plain targets are not the better use of the same devices.
Pure: no clock, no I/O.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slipstream.speculation.pacing import CostModel, DecayedMean, foreseen_speedup

TARGETS_A_DRAFT = (1, 2, 4)
"""What is looked at."""


@dataclass(frozen=True)
class Workload:
    """One caption, as it was measured."""

    prefill_s: float
    """From a session's opening to its first token, at the target; a draft does not shorten it."""
    num_tokens: float
    """Of its text."""


@dataclass(frozen=True)
class Placement:
    """One draft beside so many targets, each of which has as many captions at once as the costs were measured at."""

    targets: int
    decoding: float
    """Tokens a second of one target, over its own plain decoding."""
    devices: float
    """Captions an hour of all devices, over as many devices with plain targets; prefills are included."""


def placements(
    costs: CostModel,
    workload: Workload,
    max_window: int,
    draft_pass_s: Callable[[int], float],
    targets: Iterable[int] = TARGETS_A_DRAFT,
) -> list[Placement]:
    """What each number of targets a draft would give, by `SelfClocked`'s expected cycle.

    Args:
        costs: T_p(k), tau and what a plain token takes, of one target alone with its draft.
        draft_pass_s: T_q in seconds, by the targets whose sessions share a pass of the draft.
    """
    return [_placement(costs, workload, max_window, number, draft_pass_s(number)) for number in targets]


def _placement(
    costs: CostModel, workload: Workload, max_window: int, targets: int, draft_pass_s: float
) -> Placement:
    shared = costs.fork()
    shared.draft_pass_s = DecayedMean(draft_pass_s)
    decoding = foreseen_speedup(max_window, shared)
    plain_s = workload.num_tokens * costs.plain_token_s.value
    drafted_s = plain_s / decoding
    gained = (workload.prefill_s + plain_s) / (workload.prefill_s + drafted_s)
    return Placement(targets, decoding, gained * targets / (targets + 1))


def linear_pass_s(alone_s: float, row_share: float) -> Callable[[int], float]:
    """T_q by sessions, where each beyond the first adds `row_share` of a pass: about 0 where passes wait for memory, as
    on a GPU, 1 where they multiply, as on a CPU."""
    return lambda sessions: alone_s * (1 + row_share * (sessions - 1))
