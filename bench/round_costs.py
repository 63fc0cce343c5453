"""What a round of speculation costs besides the models: seconds on a core, thread by thread, in the served stack.

Every thread's own seconds come from the kernel (`schedstat`), from the first token of a caption to its last. They
hardly grow when the machine is busy, as seconds of a clock would; caches that are shared with others still show.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import PROC, Captioned, held_out_clips, machine_facts, make_parser, run_caption, run_to_end, say
from bench.output import finish
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.stack.local import Stack, StackOptions

METHODS = ["autoregressive", "slipstream"]
LOOP, MODEL, OTHERS = "event loop", "model", "others"
"""A service's first thread, the busiest of the others where there is a model, and the rest: gRPC's, PyTorch's."""
NS = 1e9
Threads = Mapping[tuple[str, int], int]
"""Nanoseconds on a core by service and thread."""


def read_threads(pids: Mapping[str, int]) -> dict[tuple[str, int], int]:
    """What all threads have run so far."""
    found = {}
    for name, pid in pids.items():
        for task in (PROC / str(pid) / "task").iterdir():
            try:
                found[name, int(task.name)] = int((task / "schedstat").read_text().split()[0])
            except OSError:  # the thread has just ended
                continue
    return found


def split(before: Threads, after: Threads, pids: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Seconds by service and kind of thread."""
    used = {key: after[key] - before.get(key, 0) for key in after}
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for name, pid in pids.items():
        others = {thread: spent for (service, thread), spent in used.items() if service == name and thread != pid}
        model = max(others, key=lambda thread: others[thread]) if name != "gateway" and others else None
        seconds[name, LOOP] += used[name, pid] / NS
        for thread, spent in others.items():
            seconds[name, MODEL if thread == model else OTHERS] += spent / NS
    return dict(seconds)


@dataclass(frozen=True)
class RoundSample:
    """One caption, from its first token to its last."""

    method: str
    traced: bool
    """The gateway told its caller of every pass and every message of the draft, in a message each."""
    captioned: Captioned
    seconds: dict[tuple[str, str], float]

    def row(self) -> dict[str, float]:
        """Milliseconds on a core a target pass, and of the draft's model a token that it wrote."""
        speculation = self.captioned.caption.speculation
        each = {key: 1e3 * spent / speculation.passes for key, spent in self.seconds.items()}
        row = {f"{name} {kind}": spent for (name, kind), spent in each.items() if kind != MODEL}
        row |= {"beside models": sum(row.values()), "target model": each["target", MODEL], "passes": speculation.passes}
        drafted = [trace for trace in self.captioned.trace if trace.kind == "draft"]
        if drafted:
            num_drafted = sum(trace.tokens for trace in drafted)
            row["draft model, a token"] = 1e3 * self.seconds["draft", MODEL] / num_drafted
            row["draft messages"] = len(drafted) / speculation.passes
            row["T_q as told"] = 1e3 * speculation.draft_pass_s
        return row


async def measure(num_captions: int, num_frames: int, max_new_tokens: int, methods: Sequence[str]) -> dict[str, Any]:
    """Medians by method; every caption's video is prefilled before, so that decoding alone is left."""
    samples: list[RoundSample] = []
    clips = held_out_clips(2)
    async with Stack(StackOptions(threads=1, pin=True)) as stack, connect_async(stack.gateway_address) as captioner:
        pids = {name: process.pid for name, process in stack.processes.items()}
        for number in range(-len(clips), num_captions):
            for method, traced in product(methods, (False, True)):
                asked = CaptionOptions(method=method, num_frames=num_frames, max_new_tokens=max_new_tokens, gate=False)
                sample = await _sample(captioner, clips[number % len(clips)], replace(asked, trace=traced), pids)
                if number >= 0:
                    samples.append(sample)
                    say(f"{method}: {sample.row()['beside models']:.2f} ms a pass beside the models")
    rows = [
        {"method": method, "traced": traced}
        | _medians([sample.row() for sample in samples if (sample.method, sample.traced) == (method, traced)])
        for method, traced in product(methods, (False, True))
    ]
    return {"captions": num_captions, "frames": num_frames, "rows": rows}


async def _sample(captioner: AsyncCaptioner, clip: Path, asked: CaptionOptions, pids: Mapping[str, int]) -> RoundSample:
    before: dict[tuple[str, int], int] = {}

    def on_tokens(num_tokens: int, has_draft: bool) -> None:
        if not before:
            before.update(read_threads(pids))

    captioned = await run_caption(captioner, clip, asked, on_tokens)
    return RoundSample(asked.method, asked.trace, captioned, split(before, read_threads(pids), pids))


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(median(row[name] for row in rows if name in row), 3) for name in names}


def main(argv: Sequence[str]) -> None:
    flags: dict[str, Any] = {"captions": 6, "frames": 64, "tokens": 200}
    flags["methods"] = (METHODS, "that take turns")
    given = make_parser("round-costs", "What a round costs besides the models.", **flags).parse_args(argv)
    document = run_to_end(measure(given.captions, given.frames, given.tokens, given.methods))
    print_rows("milliseconds on a core a target pass", document["rows"])
    finish("round-costs", document | {"machine": machine_facts()})
