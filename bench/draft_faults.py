"""`python -m bench.draft_faults`: kills, freezes and restarts the draft under captions; the text must not change.

Kinds of runs:

- `kill`: SIGKILL at a random token; whether the draft is back before the text ends is left to chance.
- `freeze`: SIGSTOP at a random token, SIGCONT a random time later.
- `restart`: SIGKILL at an early token; the local stack starts the draft again, and it must join the same caption.

The target is a copy of the checkpoint that knows no end of text, so that texts are as long as they are asked to be and
a draft has time to come back. A fault strikes only once a draft has joined. Exit status 1 if any text differs, a fault
could not strike, or a restarted draft did not join. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc

from bench.captions import Captioned, run_caption
from bench.clips import CLIP_FOLDER, held_out_clips
from bench.fault_plan import KINDS, Fault, Outcome, kind_row, plan_faults
from bench.machine import machine_facts
from bench.report import Cell, make_console, make_table, number
from bench.running import run_to_end, say
from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.stack.local import POCKET_DIR, Stack, StackOptions
from slipstream.stack.process import ServiceProcess


@dataclass
class Strike:
    """Carries out one fault once the caption has as many tokens as it says, and a draft. Call it as tokens come."""

    fault: Fault
    draft: ServiceProcess
    struck_at: int = 0
    """Tokens that there were; 0 while nothing has happened."""
    _thaw: asyncio.TimerHandle | None = field(default=None, repr=False)

    def __call__(self, num_tokens: int, has_draft: bool) -> None:
        if self.struck_at or self.fault.kind == "none" or not has_draft or num_tokens < self.fault.at_token:
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


class FaultRun:
    """Captions on one stack, with and without faults."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, clips: Sequence[Path], options: CaptionOptions) -> None:
        self._stack = stack
        self._channel = channel
        self._clips = clips
        self._options = options
        self._draft = stack.processes["draft"]
        self._texts: dict[int, tuple[int, ...]] = {}

    async def run(self, fault: Fault) -> Outcome:
        """One caption with its fault; returns when the draft is well again."""
        expected = await self._plain_text(fault.clip)
        starts = self._draft.starts
        strike = Strike(fault, self._draft)
        try:
            captioned = await self._caption(fault.clip, strike, method="parallel", policy=fault.policy)
        finally:
            strike.thaw()
        if strike.struck_at and fault.kind in ("kill", "restart"):
            await self._stack.wait_started("draft", starts + 1)
        summary = captioned.summary
        return Outcome(
            fault,
            identical=captioned.token_ids == expected,
            drafts_lost=len(captioned.lost_at),
            struck_at=strike.struck_at,
            rejoined=0 < strike.struck_at <= max(captioned.ready_at, default=0),
            longest_gap_s=summary.timings.longest_gap_s,
            tokens_per_s=(summary.num_tokens - 1) / summary.timings.generate_s,
        )

    async def _plain_text(self, clip: int) -> tuple[int, ...]:
        if clip not in self._texts:
            plain = await self._caption(clip, lambda num_tokens, has_draft: None, method="autoregressive")
            self._texts[clip] = plain.token_ids
        return self._texts[clip]

    async def _caption(self, clip: int, on_tokens: Callable[[int, bool], None], **options: str) -> Captioned:
        merged = CaptionOptions(**options)  # type: ignore[arg-type]
        merged.MergeFrom(self._options)
        return await run_caption(self._channel, self._clips[clip], merged, on_tokens)


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


COLUMNS: dict[str, Cell] = {
    "fault": lambda row: str(row["kind"]),
    "runs": number("runs", ".0f"),
    "draft\nstruck": number("struck", ".0f"),
    "text\nidentical": number("identical", ".0f"),
    "drafts\nlost": number("drafts_lost", ".0f"),
    "joined\nagain": number("rejoined", ".0f"),
    "longest gap\nof all, ms": number("longest_gap_s", ".0f", 1e3),
    "median of the\nlongest gaps, ms": number("median_longest_gap_s", ".0f", 1e3),
    "tok/s": number("tokens_per_s", ".1f"),
}


async def run(given: argparse.Namespace, clips: Sequence[Path], faults: Sequence[Fault]) -> list[Outcome]:
    """All runs on one stack."""
    options = CaptionOptions(num_frames=given.frames, max_new_tokens=given.max_new_tokens, gate=False)
    stack_options = StackOptions(endless_copy(given.target), given.draft, threads=1)
    outcomes = []
    say("starting the stack")
    async with Stack(stack_options, report=say) as stack, open_channel(stack.gateway_address) as channel:
        runner = FaultRun(stack, channel, clips, options)
        for number_, fault in enumerate(faults, 1):
            outcome = await runner.run(fault)
            outcomes.append(outcome)
            verdict = "same text" if outcome.identical else "TEXT DIFFERS"
            joined = ", joined again" if outcome.rejoined and fault.kind != "none" else ""
            say(f"run {number_} of {len(faults)}: {fault.kind} at token {outcome.struck_at}: {verdict}{joined}")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_faults", description="Does a dying draft change text?")
    for kind, count in zip(KINDS, (4, 20, 10, 10), strict=True):
        parser.add_argument(f"--{kind}", type=int, default=count, help=f"runs of kind {kind!r}")
    parser.add_argument("--clips", type=int, default=4)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, default=POCKET_DIR / "target")
    parser.add_argument("--draft", type=Path, default=POCKET_DIR / "draft")
    given = parser.parse_args()
    counts = {kind: getattr(given, kind) for kind in KINDS}
    faults = plan_faults(counts, given.clips, given.max_new_tokens, given.seed)
    outcomes = run_to_end(run(given, held_out_clips(given.clips), faults))
    rows = [kind_row(kind, outcomes) for kind in KINDS]
    make_console().print(make_table("captions whose draft fails", COLUMNS, rows))
    ok = all(outcome.passed for outcome in outcomes)
    runs = [asdict(outcome) for outcome in outcomes]
    print(
        json.dumps(
            {
                "identical": all(o.identical for o in outcomes),
                "ok": ok,
                "kinds": rows,
                "runs": runs,
                "seed": given.seed,
                "machine": machine_facts(),
            }
        )
    )
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
