"""How many targets one draft should serve, and whether any should: measured costs in, captions an hour a device out.

A device that has a target decodes; one that has the draft decodes nothing by itself. So a draft for n targets must make
each of them more than (n + 1) / n times as fast, prefills included, before n + 1 plain targets are not the better use
of the same devices. Pure: no clock, no I/O.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slipstream.service_info import Placement
from slipstream.speculation.pacing import CostModel, DecayedMean, foreseen_speedup

TARGETS_A_DRAFT = (1, 2, 4)
"""What is looked at."""


@dataclass(frozen=True)
class MeasuredCaptions:
    """What captions of one kind have shown."""

    costs: CostModel
    """Of one target alone with its draft, or as near to that as was measured."""
    draft_pass_s: Mapping[int, float]
    """T_q, in seconds, by how many captions shared a pass."""
    first_token_s: float
    """From a video's frames to the first token. A draft does not shorten it."""
    num_tokens: float
    """Of a text."""


def placements(
    measured: MeasuredCaptions, max_window: int, targets: Iterable[int] = TARGETS_A_DRAFT
) -> tuple[Placement, ...]:
    """What each number of targets would give, by the expected cycle of `SelfClocked`."""
    return tuple(_placement(measured, max_window, number) for number in targets)


def _placement(measured: MeasuredCaptions, max_window: int, targets: int) -> Placement:
    shortest_s, longest_s = draft_pass_bounds(measured.draft_pass_s, targets)
    decoding = [_decoding(measured.costs, max_window, seconds) for seconds in (longest_s, shortest_s)]
    plain_s = measured.num_tokens * measured.costs.plain_token_s.value
    devices = [
        (measured.first_token_s + plain_s) / (measured.first_token_s + plain_s / faster) * targets / (targets + 1)
        for faster in decoding
    ]
    return Placement(targets, *decoding, *devices)


def draft_pass_bounds(draft_pass_s: Mapping[int, float], captions: int) -> tuple[float, float]:
    """T_q of so many captions at least and at most, in seconds. Where that was not measured, what was measured with
    fewer is the least, as where passes wait for memory; and a pass takes at most that for each, as where it multiplies.
    """
    if captions in draft_pass_s:
        return draft_pass_s[captions], draft_pass_s[captions]
    nearest = max((known for known in draft_pass_s if known < captions), default=min(draft_pass_s))
    seconds = draft_pass_s[nearest]
    return min(seconds, seconds * captions / nearest), max(seconds, seconds * captions / nearest)


def _decoding(costs: CostModel, max_window: int, draft_pass_s: float) -> float:
    shared = costs.fork()
    shared.draft_pass_s = DecayedMean(draft_pass_s)
    return foreseen_speedup(max_window, shared)
