"""What a draft costs or saves over many short captions of the real stack, whose gateway remembers from one to the next.

`bench gate` asks the same in simulated time. Here every draft gets stacks of its own, whose gateways know nothing at
first. Each speculative caption has a plain one of the same clip before it and one behind it, prefills at hand, so that
a busy time falls on both, and so does what wears off; what counts is the sum of the seconds of decoding. There is one
first caption a stack, which says little by itself: for what first captions cost, ask for many stacks of few captions.
Exit status 1 when a bound did not hold; `broken` names it.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from bench.common import Captioned, held_out_clips, is_whole, machine_facts, make_parser, run_caption, run_to_end, say
from bench.guarantees.gate import with_draft
from bench.guarantees.many_captions import BAD_LIMIT, FIRST_LIMIT
from bench.output import finish
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
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
    plain: list[tuple[Captioned, Captioned]] = field(default_factory=list)
    """Of the same clip right before each drafted one, and right behind it."""
    stacks: list[int] = field(default_factory=list)
    """How many there were when a stack was new."""

    @property
    def first(self) -> float:
        """Seconds of decoding over plain decoding's, of all first captions together."""
        return self._over_plain(self.stacks)

    @property
    def over_plain(self) -> float:
        """The same of all captions."""
        return self._over_plain(range(len(self.drafted)))

    def _over_plain(self, places: Iterable[int]) -> float:
        pairs = [(_seconds(self.drafted[place]), sum(map(_seconds, self.plain[place])) / 2) for place in places]
        drafted_s, plain_s = map(sum, zip(*pairs, strict=True))
        return drafted_s / plain_s

    @property
    def judged(self) -> int:
        """Draft tokens: without any, nothing was measured."""
        return sum(one.caption.speculation.judged for one in self.drafted)

    @property
    def identical(self) -> str:
        pairs = zip(self.drafted, self.plain, strict=True)
        same = sum(own.token_ids == before.token_ids == behind.token_ids for own, (before, behind) in pairs)
        return f"{same}/{len(self.drafted)}"


async def measure(
    num_captions: int, num_tokens: int, num_frames: int, num_stacks: int, drafts: Sequence[str]
) -> dict[str, Any]:
    """A row a draft, and which bounds did not hold. `num_captions` of each draft in each of `num_stacks`."""
    template = CaptionOptions(num_frames=num_frames, max_new_tokens=num_tokens)
    rows = []
    for name in drafts:
        say(f"draft: {name}")
        row_of = _bad_row if name in BAD else _good_row
        rows.append({"draft": name, **await row_of(name, template, num_captions, num_stacks)})
        say(f"  {rows[-1]}")
    broken = [row["draft"] for row in rows if not row["holds"] or not is_whole(row["identical"])]
    shape = {"captions": num_captions, "tokens": num_tokens, "frames": num_frames, "stacks": num_stacks}
    return {**shape, "drafts": rows, "broken": broken}


async def _bad_row(name: str, template: CaptionOptions, num_captions: int, num_stacks: int) -> dict[str, Any]:
    asked = CaptionOptions(method="slipstream").over(template)
    (series,) = await _captions(with_draft(name, {}, *BAD[name]), [asked], num_captions, num_stacks)
    first, over_plain = series.first, series.over_plain
    return {
        "first": round(first, 4),
        "all": round(over_plain, 4),
        "judged": series.judged,
        "identical": series.identical,
        "holds": series.judged > 0 and first <= FIRST_LIMIT and over_plain <= BAD_LIMIT,
    }


async def _good_row(name: str, template: CaptionOptions, num_captions: int, num_stacks: int) -> dict[str, Any]:
    asked = CaptionOptions.from_mapping(GOOD[name]).over(template)
    ways = [asked, CaptionOptions(gate=False).over(asked)]
    gated, ungated = await _captions(with_draft("none", {}), ways, num_captions, num_stacks)
    return {
        "first": round(gated.first, 4),
        "all": round(gated.over_plain, 4),
        "ungated": round(ungated.over_plain, 4),
        "judged": ungated.judged,
        "identical": gated.identical,
        "identical_ungated": ungated.identical,
        "holds": ungated.judged > 0
        and is_whole(ungated.identical)
        and gated.over_plain <= GOOD_LIMIT * ungated.over_plain,
    }


async def _captions(
    options: StackOptions, ways: Sequence[CaptionOptions], num_captions: int, num_stacks: int
) -> list[Series]:
    """A series by way, which take turns, in one stack after the other."""
    series = [Series() for _ in ways]
    for _ in range(num_stacks):
        for one in series:
            one.stacks.append(len(one.drafted))
        async with Stack(options, report=say) as stack, connect_async(stack.gateway_address) as captioner:
            await _caption_all(captioner, ways, series, num_captions)
    return series


async def _caption_all(
    captioner: AsyncCaptioner, ways: Sequence[CaptionOptions], series: Sequence[Series], num_captions: int
) -> None:
    """Before them every clip has a plain caption of a few tokens, so that prefills are at hand; of drafts the gateway
    knows nothing."""
    clips, plain = held_out_clips(CLIPS), CaptionOptions(method="autoregressive").over(ways[0])
    for clip in clips:
        await run_caption(captioner, clip, CaptionOptions(max_new_tokens=WARM_UP_TOKENS).over(plain))
    for clip in islice(cycle(clips), num_captions):
        for own, asked in zip(series, ways, strict=True):
            before, drafted, behind = [await run_caption(captioner, clip, each) for each in (plain, asked, plain)]
            own.drafted.append(drafted)
            own.plain.append((before, behind))


def _seconds(captioned: Captioned) -> float:
    return captioned.caption.timings.generate_s


def main(argv: Sequence[str]) -> None:
    known = [*BAD, *GOOD]
    flags: dict[str, Any] = {"captions": (100, "of each draft and stack"), "tokens": 70, "frames": 8}
    flags["stacks"] = (1, "of each draft")
    flags["drafts"] = (known, "of them")
    parser = make_parser("served-gate", "Drafts that do not help, and that do, over many captions.", **flags)
    given = parser.parse_args(argv)
    if unknown := sorted(set(given.drafts) - set(known)):
        parser.error(f"--drafts {unknown[0]!r} is unknown; known are {', '.join(known)}")
    document = run_to_end(measure(given.captions, given.tokens, given.frames, given.stacks, given.drafts))
    print_rows("Seconds of decoding over plain decoding's", document["drafts"])
    finish("served-gate", document | {"machine": machine_facts()})
    sys.exit(1 if document["broken"] else 0)
