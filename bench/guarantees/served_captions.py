"""What a draft costs or saves over many short captions of the real stack, whose gateway remembers from one to the next.

`bench gate` asks the same in simulated time. Here every draft gets a stack of its own, whose gateway knows nothing at
first. Each speculative caption has a plain one of the same clip behind it, prefills at hand, so that a busy time falls
on both; what counts is the sum of the seconds of decoding. Exit status 1 when a bound did not hold;
`broken` names it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from bench.common import Captioned, held_out_clips, is_whole, machine_facts, make_parser, run_caption, run_to_end, say
from bench.guarantees.gate import with_draft
from bench.guarantees.many_captions import BAD_LIMIT, FIRST_LIMIT
from bench.output import finish
from bench.tables import print_rows
from slipstream import CaptionOptions, connect_async
from slipstream.stack.local import Stack, StackOptions

BAD: dict[str, tuple[str, ...]] = {
    "nonsense": (),
    "slow": (),
    "turns bad": ("--turns-at", "9"),
    "weak": (),
    "weak and slow": ("--slow-pass-ms", "10"),
}
"""Vices, and what they need to be told."""
GOOD: dict[str, dict[str, str]] = {
    "slipstream": {},
    "slipstream, uv": {"pruner": "uv"},
    "slipstream, none": {"pruner": "none"},
    "slipstream_siblings": {"method": "slipstream_siblings"},
    "slipstream_tree": {"method": "slipstream_tree"},
}
"""What a good draft is asked for."""
GOOD_LIMIT = 1.03
"""Of its time without a gate: what a good draft may take with one; single runs scatter by more than the 1% of the
simulation."""
WARM_UP_TOKENS = 16
CLIPS = 4


@dataclass
class Series:
    """Captions of one draft, in a row."""

    drafted: list[Captioned] = field(default_factory=list)
    plain: list[Captioned] = field(default_factory=list)
    """Each right behind the drafted one of the same clip."""

    @property
    def ratios(self) -> list[float]:
        """Seconds of decoding over plain decoding's, caption by caption."""
        return [_seconds(own) / _seconds(plain) for own, plain in zip(self.drafted, self.plain, strict=True)]

    @property
    def over_plain(self) -> float:
        """The same of all of them together."""
        return sum(map(_seconds, self.drafted)) / sum(map(_seconds, self.plain))

    @property
    def judged(self) -> int:
        """Draft tokens: without any, nothing was measured."""
        return sum(one.caption.speculation.judged for one in self.drafted)

    @property
    def identical(self) -> str:
        same = sum(own.token_ids == plain.token_ids for own, plain in zip(self.drafted, self.plain, strict=True))
        return f"{same}/{len(self.drafted)}"


async def measure(num_captions: int, num_tokens: int, num_frames: int, drafts: Sequence[str]) -> dict[str, Any]:
    """A row a draft, and which bounds did not hold."""
    template = CaptionOptions(num_frames=num_frames, max_new_tokens=num_tokens)
    rows = []
    for name in drafts:
        say(f"draft: {name}")
        row_of = _bad_row if name in BAD else _good_row
        rows.append({"draft": name, **await row_of(name, template, num_captions)})
        say(f"  {rows[-1]}")
    broken = [row["draft"] for row in rows if not row["holds"] or not is_whole(row["identical"])]
    shape = {"captions": num_captions, "tokens": num_tokens, "frames": num_frames}
    return {**shape, "drafts": rows, "broken": broken}


async def _bad_row(name: str, template: CaptionOptions, num_captions: int) -> dict[str, Any]:
    asked = CaptionOptions(method="slipstream").over(template)
    (series,) = await _captions(with_draft(name, {}, *BAD[name]), [asked], num_captions)
    first, over_plain = series.ratios[0], series.over_plain
    return {
        "first": round(first, 4),
        "all": round(over_plain, 4),
        "judged": series.judged,
        "identical": series.identical,
        "holds": series.judged > 0 and first <= FIRST_LIMIT and over_plain <= BAD_LIMIT,
    }


async def _good_row(name: str, template: CaptionOptions, num_captions: int) -> dict[str, Any]:
    asked = CaptionOptions.from_mapping(GOOD[name]).over(template)
    ways = [asked, CaptionOptions(gate=False).over(asked)]
    gated, ungated = await _captions(with_draft("none", {}), ways, num_captions)
    return {
        "first": round(gated.ratios[0], 4),
        "all": round(gated.over_plain, 4),
        "ungated": round(ungated.over_plain, 4),
        "judged": ungated.judged,
        "identical": gated.identical,
        "identical_ungated": ungated.identical,
        "holds": ungated.judged > 0
        and is_whole(ungated.identical)
        and gated.over_plain <= GOOD_LIMIT * ungated.over_plain,
    }


async def _captions(options: StackOptions, ways: Sequence[CaptionOptions], num_captions: int) -> list[Series]:
    """A series by way, which take turns. Before them every clip has had a plain caption of a few tokens, so that
    prefills are at hand; of drafts the gateway knows nothing."""
    clips, series = held_out_clips(CLIPS), [Series() for _ in ways]
    async with Stack(options, report=say) as stack, connect_async(stack.gateway_address) as captioner:
        plain = CaptionOptions(method="autoregressive").over(ways[0])
        for clip in clips:
            await run_caption(captioner, clip, CaptionOptions(max_new_tokens=WARM_UP_TOKENS).over(plain))
        for clip in islice(cycle(clips), num_captions):
            for own, asked in zip(series, ways, strict=True):
                own.drafted.append(await run_caption(captioner, clip, asked))
                own.plain.append(await run_caption(captioner, clip, plain))
    return series


def _seconds(captioned: Captioned) -> float:
    return captioned.caption.timings.generate_s


def main(argv: Sequence[str]) -> None:
    known = [*BAD, *GOOD]
    flags: dict[str, Any] = {"captions": (100, "of each draft"), "tokens": 70, "frames": 8}
    flags["drafts"] = (known, "of them")
    parser = make_parser("served-gate", "Drafts that do not help, and that do, over many captions.", **flags)
    given = parser.parse_args(argv)
    if unknown := sorted(set(given.drafts) - set(known)):
        parser.error(f"--drafts {unknown[0]!r} is unknown; known are {', '.join(known)}")
    document = run_to_end(measure(given.captions, given.tokens, given.frames, given.drafts))
    print_rows("Seconds of decoding over plain decoding's", document["drafts"])
    finish("served-gate", document | {"machine": machine_facts()})
    sys.exit(1 if document["broken"] else 0)
