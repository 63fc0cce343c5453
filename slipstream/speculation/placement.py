"""Placement: which of several targets and drafts takes the next caption, how many targets a draft should serve, and
whether the draft's device should rather have a target.

Pure: no clock, no I/O; randomness is handed in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from slipstream.service_info import Placement, ServiceLoad
from slipstream.speculation.pacing import CostModel, DecayedMean, foreseen_speedup

# -- which one takes the next caption ---------------------------------------------------------------------------------

# Figures are asked for just before the choice, of two that are drawn at random (Mitzenmacher, "The power of two choices
# in randomized load balancing", 2001): gateways that see the same figures at the same moment draw different pairs, and
# so do not all send to the one that was best. What a gateway has itself sent since counts in addition.


@dataclass(frozen=True)
class Candidate:
    """A service that answers, as one gateway sees it."""

    load: ServiceLoad
    placed: int = 0
    """Captions that this gateway has just sent there, which `load` may not have yet."""
    holds_prefill: bool = False
    """It has captioned this video before."""


def with_room(candidates: Sequence[Candidate]) -> list[int]:
    """Indices of those where a caption need not wait, as far as is known."""
    caption_bytes = _bytes_of_a_caption(candidates)
    return [index for index, one in enumerate(candidates) if _has_room(one, caption_bytes)]


def choose_target(candidates: Sequence[Candidate], random: Random) -> int:
    """Index of the one with the most free memory, counted in captions that still fit; chance decides between equals.

    One that holds the video's prefill comes first while it has room: most of a caption's time is the prefill, which is
    then not run, and a session more makes packed passes little slower. Where nobody has room, the shortest queue wins.
    """
    caption_bytes = _bytes_of_a_caption(candidates)

    def rank(one: Candidate) -> tuple[int, ...]:
        has_room = _has_room(one, caption_bytes)
        waiting = 0 if has_room else one.load.queued + one.placed
        return has_room, has_room and one.holds_prefill, -waiting, _free_bytes(one, caption_bytes) // caption_bytes

    return _best([rank(one) for one in candidates], random)


def choose_draft(candidates: Sequence[Candidate], random: Random) -> int:
    """Index of the one with the least work, of those that have room: all lines of a draft take turns in its passes."""
    caption_bytes = _bytes_of_a_caption(candidates)

    def rank(one: Candidate) -> tuple[int, ...]:
        return _has_room(one, caption_bytes), -(one.load.sessions + one.load.queued + one.placed)

    return _best([rank(one) for one in candidates], random)


def _bytes_of_a_caption(candidates: Sequence[Candidate]) -> int:
    """What one takes, by those that are served now; before there are any, a place's share of the least budget."""
    loads = [one.load for one in candidates if one.load.max_sessions]
    if sessions := sum(load.sessions for load in loads):
        return max(1, sum(load.kv_bytes for load in loads) // sessions)
    return max(1, min((load.kv_budget_bytes // load.max_sessions for load in loads), default=1))


def _free_bytes(one: Candidate, caption_bytes: int) -> int:
    return one.load.kv_budget_bytes - one.load.kv_bytes - (one.load.queued + one.placed) * caption_bytes


def _has_room(one: Candidate, caption_bytes: int) -> bool:
    """Of one that does not say, it is supposed; but as its memory counts as none, the others come first."""
    load = one.load
    if not load.max_sessions:
        return True
    has_place = not load.queued and load.sessions + one.placed < load.max_sessions
    return has_place and _free_bytes(one, caption_bytes) >= caption_bytes


def _best(ranks: Sequence[tuple[int, ...]], random: Random) -> int:
    best = max(ranks)
    return random.choice([index for index, rank in enumerate(ranks) if rank == best])


# -- how many targets a draft should have -----------------------------------------------------------------------------

# Measured costs in, captions an hour a device out. A device that has a target decodes; one that has the draft decodes
# nothing by itself. So a draft for n targets must make each of them more than (n + 1) / n times as fast, prefills
# included, before n + 1 plain targets are not the better use of the same devices.

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
    slower, faster = (_decoding(measured.costs, max_window, seconds) for seconds in (longest_s, shortest_s))
    plain_s = measured.num_tokens * measured.costs.plain_token_s.value

    def devices(decoding: float) -> float:
        gain = (measured.first_token_s + plain_s) / (measured.first_token_s + plain_s / decoding)
        return gain * targets / (targets + 1)

    return Placement(
        targets,
        decoding_at_least=slower,
        decoding_at_most=faster,
        devices_at_least=devices(slower),
        devices_at_most=devices(faster),
    )


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


# -- whether the draft's device should have a target ------------------------------------------------------------------

# Measured times of captions with the draft, and of a few that the same target made plainly, in; seconds of both
# placements out. A target is busy for a caption's prefill and for its share of the passes that write its text; several
# targets share captions out, but those beyond the captions at once have nothing to do.

ABOUT = 1.1
"""Times within this factor are about the same: no sample says them more exactly."""


class Advice(StrEnum):
    """Where a draft's device is worth most."""

    DRAFT = "draft"
    PLAIN = "plain"
    EITHER = "either"
    """Both take about as long."""


@dataclass(frozen=True)
class DraftedTime:
    """Captions with a draft, while more waited."""

    wall_s: float
    """Of all together."""
    at_once: float
    """How many were worked at at a time."""
    prefill_s: float
    """Of them all together, vision towers included."""
    num_tokens: int


@dataclass(frozen=True)
class PlainTime:
    """Captions that one target made plainly, as many at a time as each of several targets would have."""

    rest_s: float
    """Beside prefills, from the first video's decoding to the last token; of passes that several shared once."""
    num_tokens: int


@dataclass(frozen=True)
class Compared:
    """Captions with a draft, beside plain targets on the same devices."""

    times: float
    """As long as with the draft the plain targets take."""
    plain_targets: float
    at_once: float
    faster: float
    """How many times as fast a target is with the draft in all but prefills."""
    prefill_share: float
    """Of a plain target's time that is prefills."""

    @property
    def advice(self) -> Advice:
        """Which is the better use of the devices."""
        if self.times > ABOUT:
            return Advice.DRAFT
        return Advice.PLAIN if self.times < 1 / ABOUT else Advice.EITHER


def plain_targets(targets: int, drafts: int, devices: int) -> float:
    """How many targets the devices would hold without drafts. One that shares its target's device takes none."""
    return targets * devices / (devices - drafts) if devices > drafts else float(targets)


def captions_of_each(at_once: float, targets: float) -> int:
    """That each of several targets has at a time."""
    return max(round(at_once / targets), 1)


def compare(drafted: DraftedTime, plain: PlainTime, targets: int, plain_targets: float) -> Compared:
    """What `targets` with drafts took, `drafted`, beside what `plain_targets` would have: one of those took `plain`."""
    at_once = max(drafted.at_once, 1.0)
    drafted_busy_s = drafted.wall_s * min(targets, at_once)
    prefill_s = min(drafted.prefill_s, drafted_busy_s)
    rest_s = plain.rest_s * drafted.num_tokens / plain.num_tokens
    plain_s = (prefill_s + rest_s) / min(plain_targets, at_once)
    return Compared(
        times=plain_s / drafted.wall_s,
        plain_targets=plain_targets,
        at_once=at_once,
        faster=rest_s / max(drafted_busy_s - prefill_s, 1e-9),
        prefill_share=prefill_s / max(prefill_s + rest_s, 1e-9),
    )
