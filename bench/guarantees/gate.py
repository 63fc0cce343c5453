"""Is a caption with a bad draft ever slower than plain decoding?

Each kind of draft gets a stack of its own. On it every clip is captioned plainly before and after each speculative
caption, so a ratio compares neighbours in time; the figure of a kind is the median over its captions.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import Captioned, held_out_clips, run_caption, say
from bench.simulate import bad_drafts
from bench.simulator import simulate
from slipstream import CaptionOptions, connect_async
from slipstream.stack.local import FRESH, Stack, StackOptions

BAD = ("nonsense", "slow", "turns bad")
LIMIT = 1.05
"""Decoding may take this much of plain decoding's time with a bad draft."""
ROUNDS = 3
"""Times that every clip is captioned with a bad draft: single captions scatter by 10% and more."""
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class GateSample:
    """One speculative caption between two plain ones."""

    ratio: float
    """Its seconds of decoding over the mean of theirs."""
    identical: bool
    num_tokens: int
    closings: int
    gated_tokens: int


async def measure_gate(num_clips: int = 3, num_frames: int = 128, max_new_tokens: int = 320) -> dict[str, Any]:
    """`time_ratio` by bad draft, `speedup` of the good one with the gate on and off, and each caption's figures.

    `simulated_time_ratio` is the same without the noise of a machine: 200 tokens at the simulator's CPU point.
    """
    clips, shared = held_out_clips(num_clips), {"num_frames": num_frames, "max_new_tokens": max_new_tokens}
    samples: dict[str, list[GateSample]] = {}
    for vice in (*BAD, "none"):
        say(f"draft: {vice}")
        samples |= await _measure_draft(clips, vice, shared)
    ratios = {kind: statistics.median(sample.ratio for sample in of_kind) for kind, of_kind in samples.items()}
    return {
        "time_ratio": {vice: round(ratios[vice], 3) for vice in BAD},
        "within_limit": all(ratios[vice] <= LIMIT for vice in BAD),
        "speedup": {state: round(1 / ratios[f"good, gate {state}"], 2) for state in ("on", "off")},
        "simulated_time_ratio": {vice: round(1 / simulate(setup).speedup, 3) for vice, setup in bad_drafts().items()},
        "closings_of_good": sum(sample.closings for sample in samples["good, gate on"]),
        "identical": all(sample.identical for of_kind in samples.values() for sample in of_kind),
        "captions": {kind: [vars(sample) for sample in of_kind] for kind, of_kind in samples.items()},
        "frames": num_frames,
    }


def with_draft(vice: str, flags: Mapping[str, Sequence[str]], *more: str) -> StackOptions:
    """The pocket pair, a core each, whose draft has that vice; `flags` of services, and `more` of the draft."""
    options = StackOptions(threads=1, pin=True)
    return replace(
        options,
        modules={**options.modules, "draft": "bench.guarantees.bad_draft"},
        extra_flags={**flags, "draft": (*flags.get("draft", ()), "--vice", vice, *more)},
    )


async def _measure_draft(clips: Sequence[Path], vice: str, shared: Mapping[str, Any]) -> dict[str, list[GateSample]]:
    """Captions of all clips by the kinds that this draft makes."""
    options = with_draft(vice, FRESH)
    kinds = {vice: True} if vice in BAD else {"good, gate on": True, "good, gate off": False}
    samples: dict[str, list[GateSample]] = {kind: [] for kind in kinds}
    async with Stack(options, report=say) as stack, connect_async(stack.gateway_address) as captioner:

        async def caption(clip: Path, method: str, **given: Any) -> Captioned:
            asked = CaptionOptions.from_mapping({**shared, "method": method, **given})
            return await run_caption(captioner, clip, asked)

        await caption(clips[0], "autoregressive", max_new_tokens=WARM_UP_TOKENS)
        for clip in (*clips,) * (ROUNDS if vice in BAD else 1):
            before = await caption(clip, "autoregressive")
            for kind, gate in kinds.items():
                drafted = await caption(clip, "slipstream", gate=gate)
                after = await caption(clip, "autoregressive")
                samples[kind].append(_sample(drafted, before, after))
                say(f"  {kind}: {samples[kind][-1]}")
                before = after
    return samples


def _sample(drafted: Captioned, before: Captioned, after: Captioned) -> GateSample:
    plain_s = (before.caption.timings.generate_s + after.caption.timings.generate_s) / 2
    speculation = drafted.caption.speculation
    return GateSample(
        ratio=drafted.caption.timings.generate_s / plain_s,
        identical=drafted.token_ids == before.token_ids == after.token_ids,
        num_tokens=len(drafted.token_ids),
        closings=speculation.gate_closings,
        gated_tokens=speculation.gated_tokens,
    )
