"""Many captions at once, and a second prompt on the same video.

The same clips are captioned by 1, 2, 4 and 8 clients at once, plainly and in parallel, on one core each for target
and draft (gateway and clients take what they find). The target has the videos' prefills at hand from a round before,
so that decoding is measured; cold runs, where it has not, are dominated by prefills, which gain nothing by company.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.common import (
    cpu_s,
    forget_peak,
    held_out_clips,
    is_whole,
    machine_facts,
    make_parser,
    peak_bytes,
    run_caption,
    run_to_end,
    say,
)
from bench.output import finish
from bench.tables import print_rows
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.stack.local import Stack, StackOptions

METHODS = ("autoregressive", "slipstream")
BESIDE = "slipstream"
"""The method that others are held against."""
CLIENTS = (1, 2, 4, 8)
ASKED = {"num_frames": 64, "max_new_tokens": 200}
SECOND_PROMPT = "What happens in this video?"


@dataclass
class Run:
    """What `num_clients` clients saw who captioned all clips."""

    num_clients: int
    seconds: float = 0.0
    captions: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    token_times_s: list[float] = field(default_factory=list)
    peak_mib: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def row(self, reference: "Run") -> dict[str, Any]:
        """Figures, with the texts compared to those of `reference`."""
        cuts = quantiles(self.token_times_s, n=20)
        same = sum(self.captions[clip] == reference.captions[clip] for clip in self.captions)
        return {
            "clients": self.num_clients,
            "tokens_per_s": round(sum(map(len, self.captions.values())) / self.seconds, 1),
            "token_ms_p50": round(1000 * cuts[9], 2),
            "token_ms_p95": round(1000 * cuts[18], 2),
            "peak_mib": self.peak_mib,
            "cpu_s": {name: round(seconds, 1) for name, seconds in self.cpu_s.items()},
            "identical": f"{same}/{len(self.captions)}",
        }


@dataclass(frozen=True)
class Clients:
    """Clients that share the clips among themselves."""

    stack: Stack
    captioner: AsyncCaptioner
    clips: Sequence[Path]

    async def run(self, num_clients: int, **options: Any) -> Run:
        run, waiting = Run(num_clients), list(self.clips)
        pids = {name: process.pid for name, process in self.stack.processes.items()}
        for pid in pids.values():
            forget_peak(pid)
        used_s, started = {name: cpu_s(pid) for name, pid in pids.items()}, time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._client(run, waiting, CaptionOptions(**options)))
        run.seconds = time.perf_counter() - started
        run.cpu_s = {name: cpu_s(pid) - used_s[name] for name, pid in pids.items()}
        run.peak_mib = {name: peak_bytes(pid) // 2**20 for name, pid in pids.items()}
        return run

    async def _client(self, run: Run, waiting: list[Path], options: CaptionOptions) -> None:
        while waiting:
            clip = waiting.pop(0)
            watch = _token_watch(run.token_times_s)
            run.captions[clip] = (await run_caption(self.captioner, clip, options, watch)).token_ids


def _token_watch(token_times_s: list[float]) -> Callable[[int, bool], None]:
    """Adds the seconds of every token but those of the first commit; tokens that come together share their time."""
    seen, last_s = 0, 0.0

    def on_tokens(num_tokens: int, has_draft: bool) -> None:
        nonlocal seen, last_s
        now, num_new = time.perf_counter(), num_tokens - seen
        if seen:
            token_times_s.extend([(now - last_s) / num_new] * num_new)
        seen, last_s = num_tokens, now

    return on_tokens


async def measure_sessions(
    num_clips: int = 8, num_rounds: int = 2, methods: Sequence[str] = METHODS, clients: Sequence[int] = CLIENTS
) -> dict[str, Any]:
    """Rows by method and number of clients, of the fastest of the rounds, which take turns so that a busy moment does
    not hit one method or number of clients only. `rises`: any number is faster than the first one. `over_slipstream`:
    rates by method, over those of `slipstream` with as many clients."""
    clips, runs = held_out_clips(num_clips), {(method, count): list[Run]() for method in methods for count in clients}
    async with _stack(prefix_cache_mb=4096) as stack, connect_async(stack.gateway_address) as captioner:
        shared = Clients(stack, captioner, clips)
        await shared.run(2, **{**ASKED, "method": "slipstream", "max_new_tokens": 16})
        for method, count in list(runs) * num_rounds:
            run = await shared.run(count, method=method, **ASKED)
            runs[method, count].append(run)
            say(f"sessions: {method}: {json.dumps(run.row(runs[method, clients[0]][0]))}")
    rows: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for (method, _), own in runs.items():
        rows[method].append(min(own, key=lambda run: run.seconds).row(runs[methods[0], clients[0]][0]))
    return {
        "clips": num_clips,
        **ASKED,
        **rows,
        "rises": all(_rises(rows[method]) for method in methods),
        "over_slipstream": {name: _over(own, rows[BESIDE]) for name, own in rows.items()} if BESIDE in rows else {},
        "all_identical": all(is_whole(row["identical"]) for own in rows.values() for row in own),
    }


async def measure_cold(num_clips: int = 4) -> dict[str, Any]:
    """Rows by method for one client and four, of clips whose prefills are not at hand."""
    rows: dict[str, Any] = {}
    async with _stack(prefix_cache_mb=0) as stack, connect_async(stack.gateway_address) as captioner:
        cold = Clients(stack, captioner, held_out_clips(num_clips))
        await cold.run(2, **{**ASKED, "method": "slipstream", "max_new_tokens": 2})
        for method in METHODS:
            alone, together = [await cold.run(num_clients, method=method, **ASKED) for num_clients in (1, 4)]
            rows[method] = [run.row(alone) for run in (alone, together)]
    return rows | {"all_identical": all(is_whole(row["identical"]) for own in rows.values() for row in own)}


async def measure_prefix_reuse(num_frames: int = 128, max_new_tokens: int = 64) -> dict[str, Any]:
    """Prefill seconds of a first and a second prompt about one video, and whether the second's text is what it is
    without reuse."""
    (clip,) = held_out_clips(1)
    first = CaptionOptions(num_frames=num_frames, max_new_tokens=max_new_tokens, method="autoregressive")
    second = CaptionOptions(SECOND_PROMPT).over(first)
    say("prefix reuse: two prompts about one video")
    captions = {}
    for cache_mb, asked in ((512, {"first": first, "second": second}), (0, {"fresh": second})):
        async with _stack(prefix_cache_mb=cache_mb) as stack, connect_async(stack.gateway_address) as captioner:
            for name, options in asked.items():
                captions[name] = await run_caption(captioner, clip, options)
    found: dict[str, Any] = {"frames": num_frames}
    for name, captioned in captions.items():
        timings = captioned.caption.timings
        found[f"{name}_prefill_s"] = round(timings.target_encode_s + timings.target_prefill_s, 4)
        found[f"{name}_first_token_s"] = round(timings.first_token_s, 4)
    video = captions["second"].caption.video
    return found | {
        "prompt_tokens": video.prompt_tokens,
        "reused_tokens": video.reused_tokens,
        "identical": captions["second"].token_ids == captions["fresh"].token_ids,
    }


def _stack(prefix_cache_mb: int) -> Stack:
    flags = {"target": ("--prefix-cache-mb", str(prefix_cache_mb))}
    return Stack(StackOptions(threads=1, pin=True, restart=False, extra_flags=flags))


def _rises(rows: Sequence[dict[str, Any]]) -> bool:
    first, *others = [row["tokens_per_s"] for row in rows]
    return all(rate > first for rate in others)


def _over(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[float]:
    return [round(own["tokens_per_s"] / other["tokens_per_s"], 3) for own, other in zip(rows, others, strict=True)]


def main(argv: Sequence[str]) -> None:
    """Any methods at any numbers of clients; texts are compared with those of the first method alone."""
    flags: dict[str, Any] = {"methods": (list(METHODS), "of them"), "clients": (list(CLIENTS), "at once")}
    flags |= {"clips": (16, "that the clients share"), "rounds": (2, "of which the fastest counts")}
    given = make_parser("sessions", "Many captions at once, by method.", **flags).parse_args(argv)
    found = run_to_end(measure_sessions(given.clips, given.rounds, given.methods, given.clients))
    shown = ("clients", "tokens_per_s", "token_ms_p50", "token_ms_p95", "identical")
    rows = [{"method": name} | {key: row[key] for key in shown} for name in given.methods for row in found[name]]
    print_rows("Captions at once, prefills at hand", rows)
    finish("sessions", found | {"machine": machine_facts()})
