"""Kills, freezes and restarts the draft under captions; the text must be that of plain decoding, token by token.

Kinds of runs:

- `kill`: SIGKILL at a random token; whether the draft is back before the text ends is left to chance.
- `freeze`: SIGSTOP at a random token, SIGCONT a random time later.
- `restart`: SIGKILL at an early token; the local stack starts the draft again, and it must join the same caption.

`draft-faults` writes greedy texts on a copy of the target's checkpoint that knows no end of text, so that texts are as
long as they are asked to be and a draft has time to come back. The part `coupled` of the guarantees samples with a seed
for every clip, under settings that differ in all options. A fault strikes only once a draft has joined.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.common import (
    CLIP_FOLDER,
    MODELS,
    SHORT_SCENES,
    Captioned,
    held_out_clips,
    machine_facts,
    make_parser,
    run_caption,
    run_to_end,
    say,
)
from bench.guarantees.identity import VARIED, coverage, plan_settings
from bench.methods.samples import Spread
from bench.output import finish
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.stack.local import Stack, StackOptions
from slipstream.stack.process import ServiceProcess

KINDS = ("none", "kill", "freeze", "restart")
FREEZE_S = (0.3, 3.0)
EARLY_SHARE, LATE_SHARE = 0.1, 0.8
"""A draft that must join again dies in the first tenth of the text; the others any time before its last fifth."""
POLICIES = ("self_clocked", "fixed")
KILL_EVERY = 5
"""In every so many runs of `coupled` the draft is killed, before half of the text is there."""
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 1.0, "repetition_penalty": 1.1},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.05},
    {"temperature": 1.0, "min_p": 0.02, "presence_penalty": 0.3, "frequency_penalty": 0.1},
)


@dataclass(frozen=True)
class Fault:
    """What happens to the draft in one run, and with which options its text is written."""

    kind: str
    clip: int
    at_share: float
    """Of the tokens of the plain text."""
    freeze_s: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
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


def plan_faults(counts: Mapping[str, int], num_clips: int, seed: int) -> list[Fault]:
    rng = random.Random(seed)
    faults = [
        Fault(
            kind,
            clip=index % num_clips,
            at_share=rng.uniform(0.0, EARLY_SHARE if kind == "restart" else LATE_SHARE),
            freeze_s=rng.uniform(*FREEZE_S),
            options={"policy": POLICIES[index // num_clips % len(POLICIES)]},
        )
        for kind, count in counts.items()
        for index in range(count)
    ]
    rng.shuffle(faults)
    return faults


def kind_row(kind: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
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


@dataclass
class Strike:
    """Carries out one fault once the caption has a draft and so many tokens. Call it as tokens come."""

    fault: Fault
    draft: ServiceProcess
    at_token: int
    struck_at: int = 0
    _thaw: asyncio.TimerHandle | None = None

    def __call__(self, num_tokens: int, has_draft: bool) -> None:
        if self.struck_at or self.fault.kind == "none" or not has_draft or num_tokens < self.at_token:
            return
        self.struck_at = num_tokens
        if self.fault.kind == "freeze":
            os.kill(self.draft.pid, signal.SIGSTOP)
            self._thaw = asyncio.get_running_loop().call_later(self.fault.freeze_s, self.thaw)
        else:
            os.kill(self.draft.pid, signal.SIGKILL)

    def thaw(self) -> None:
        """Lets a frozen draft go on, at the latest when its caption has ended."""
        if self._thaw is not None:
            self._thaw.cancel()
            with suppress(ProcessLookupError):
                os.kill(self.draft.pid, signal.SIGCONT)


@dataclass
class FaultRuns:
    """Captions on one stack, with and without faults. `samplings`: options of each clip's texts, the plain one too."""

    stack: Stack
    captioner: AsyncCaptioner
    clips: Sequence[Path]
    samplings: Sequence[Mapping[str, Any]]
    shared: Mapping[str, Any]
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    async def run(self, fault: Fault) -> Outcome:
        """One caption with its fault; returns when the draft is well again."""
        expected = await self._plain_text(fault.clip)
        draft = self.stack.processes["draft"]
        starts = draft.starts
        strike = Strike(fault, draft, at_token=max(1, round(fault.at_share * len(expected))))
        try:
            captioned = await self._caption(fault.clip, strike, method="slipstream", **fault.options)
        finally:
            strike.thaw()
        if strike.struck_at and fault.kind in ("kill", "restart"):
            await self.stack.wait_started("draft", starts + 1)
        return Outcome(
            fault,
            identical=captioned.token_ids == expected,
            drafts_lost=len(captioned.lost_at),
            struck_at=strike.struck_at,
            rejoined=0 < strike.struck_at <= max(captioned.ready_at, default=0),
            longest_gap_s=captioned.caption.timings.longest_gap_s,
            tokens_per_s=captioned.caption.decoding_rate,
        )

    async def _plain_text(self, clip: int) -> tuple[int, ...]:
        if clip not in self.texts:
            plain = await self._caption(clip, lambda num_tokens, has_draft: None, method="autoregressive")
            self.texts[clip] = plain.token_ids
        return self.texts[clip]

    async def _caption(self, clip: int, on_tokens: Callable[[int, bool], None], **options: Any) -> Captioned:
        asked = CaptionOptions(gate=False, **self.shared, **self.samplings[clip], **options)
        return await run_caption(self.captioner, self.clips[clip], asked, on_tokens)


async def run_faults(
    options: StackOptions,
    clips: Sequence[Path],
    faults: Sequence[Fault],
    samplings: Sequence[Mapping[str, Any]],
    **shared: Any,
) -> list[Outcome]:
    outcomes = []
    say("starting the stack")
    async with Stack(options, report=say) as stack, connect_async(stack.gateway_address) as captioner:
        runs = FaultRuns(stack, captioner, clips, samplings, shared)
        for number_, fault in enumerate(faults, 1):
            outcome = await runs.run(fault)
            outcomes.append(outcome)
            verdict = "same text" if outcome.identical else "TEXT DIFFERS"
            joined = ", joined again" if outcome.rejoined and fault.kind != "none" else ""
            say(f"run {number_} of {len(faults)}: {fault.kind} at token {outcome.struck_at}: {verdict}{joined}")
    return outcomes


def endless_copy(checkpoint: Path) -> Path:
    """A checkpoint of the same weights that knows no end of text."""
    copy = CLIP_FOLDER / f"endless-{checkpoint.name}"
    copy.mkdir(parents=True, exist_ok=True)
    for source in checkpoint.resolve().iterdir():
        link = copy / source.name
        link.unlink(missing_ok=True)
        if source.name == "generation_config.json":
            link.write_text(json.dumps(json.loads(source.read_text()) | {"eos_token_id": []}))
        else:
            link.symlink_to(source)
    return copy


async def measure_coupled(num_clips: int = 10, runs_per_clip: int = 10, num_frames: int = 16) -> dict[str, Any]:
    """Same seed, same text, whatever the draft does: how many runs gave the plain text of their seed."""
    settings = [own[1:] for own in plan_settings([runs_per_clip] * num_clips, seed=0)]
    rng = random.Random(0)
    samplings = [SAMPLINGS[clip % len(SAMPLINGS)] | {"seed": rng.randrange(2**63)} for clip in range(num_clips)]
    faults = [
        Fault(
            "kill" if index % KILL_EVERY == KILL_EVERY - 1 else "none",
            clip,
            at_share=rng.uniform(0.0, 0.5),
            options={name: getattr(setting, name) for name in (*VARIED, "guidance")},
        )
        for clip, own in enumerate(settings)
        for index, setting in enumerate(own)
    ]
    clips, shared = held_out_clips(num_clips, SHORT_SCENES), {"num_frames": num_frames, "max_new_tokens": 160}
    outcomes = await run_faults(StackOptions(threads=1), clips, faults, samplings, **shared)
    counts = coverage(setting for own in settings for setting in own)
    return {
        "coupled_identical": f"{sum(outcome.identical for outcome in outcomes)}/{len(outcomes)}",
        "drafts_killed": sum(outcome.struck_at > 0 for outcome in outcomes),
        "coverage": {name: counts[name] for name in VARIED},
    }


def main(argv: Sequence[str]) -> None:
    """Exit status 1 if any text differs, a fault could not strike, or a restarted draft did not join."""
    runs = {kind: (count, "runs of this kind") for kind, count in zip(KINDS, (4, 20, 10, 10), strict=True)}
    others = {"clips": 4, "frames": 32, "max_new_tokens": 1500, "seed": 0}
    given = make_parser(
        "draft-faults", "Does a dying draft change text?", KINDS, **runs, **others, **MODELS
    ).parse_args(argv)
    faults = plan_faults({kind: getattr(given, kind) for kind in KINDS}, given.clips, given.seed)
    options = StackOptions(endless_copy(given.target), given.draft, threads=1)
    shared = {"num_frames": given.frames, "max_new_tokens": given.max_new_tokens}
    clips = held_out_clips(given.clips)
    outcomes = run_to_end(run_faults(options, clips, faults, [{}] * given.clips, **shared))
    rows = [kind_row(kind, outcomes) for kind in KINDS]
    print_rows("captions whose draft fails", rows)
    ok = all(outcome.passed for outcome in outcomes)
    found = {"identical": all(outcome.identical for outcome in outcomes), "ok": ok, "kinds": rows, "seed": given.seed}
    document = {**found, "runs": [asdict(outcome) for outcome in outcomes], "machine": machine_facts()}
    finish("draft-faults", document, series=("runs",))
    sys.exit(0 if ok else 1)
