"""`python -m bench.guarantees.sessions`: many captions at once, and a second prompt on the same video.

The same clips are captioned by 1, 2, 4 and 8 clients at once, plainly and in parallel, on one core each for target
and draft (gateway and clients take what they find). The target has the videos' prefills at hand from a round before,
so that decoding is measured; `cold` runs, where it has not, are dominated by prefills, which gain nothing by company.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import grpc

from bench.captions import Captioned, run_caption
from bench.clips import held_out_clips
from bench.machine import machine_facts
from bench.running import run_to_end, say
from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.stack.local import Stack, StackOptions

METHODS = {"plain": "autoregressive", "parallel": "parallel"}
CLIENTS = (1, 2, 4, 8)
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
        num_tokens = sum(map(len, self.captions.values()))
        cuts = quantiles(self.token_times_s, n=20)
        same = sum(self.captions[clip] == reference.captions[clip] for clip in self.captions)
        return {
            "clients": self.num_clients,
            "tokens_per_s": round(num_tokens / self.seconds, 1),
            "token_ms_p50": round(1000 * cuts[9], 2),
            "token_ms_p95": round(1000 * cuts[18], 2),
            "peak_mib": self.peak_mib,
            "cpu_s": {name: round(seconds, 1) for name, seconds in self.cpu_s.items()},
            "identical": f"{same}/{len(self.captions)}",
        }


class Clients:
    """Clients that share the clips among themselves."""

    def __init__(self, stack: Stack, channel: grpc.aio.Channel, clips: Sequence[Path], options: CaptionOptions) -> None:
        self._stack = stack
        self._channel = channel
        self._clips = clips
        self._options = options

    async def run(self, method: str, num_clients: int, max_new_tokens: int = 0) -> Run:
        """Every clip once, `num_clients` at a time. `max_new_tokens`: fewer than the options say."""
        options = CaptionOptions(method=METHODS[method])
        options.MergeFrom(self._options)
        if max_new_tokens:
            options.max_new_tokens = max_new_tokens
        run, waiting = Run(num_clients), list(self._clips)
        self._reset_peaks()
        run.cpu_s = {name: _cpu_s(process.pid) for name, process in self._stack.processes.items()}
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._client(run, waiting, options))
        run.seconds = time.perf_counter() - started
        run.cpu_s = {name: _cpu_s(process.pid) - run.cpu_s[name] for name, process in self._stack.processes.items()}
        run.peak_mib = {name: _peak_kib(process.pid) // 1024 for name, process in self._stack.processes.items()}
        return run

    async def _client(self, run: Run, waiting: list[Path], options: CaptionOptions) -> None:
        while waiting:
            clip = waiting.pop(0)
            stopwatch = TokenTimes(run.token_times_s)
            captioned = await run_caption(self._channel, clip, options, stopwatch)
            run.captions[clip] = captioned.token_ids

    def _reset_peaks(self) -> None:
        for process in self._stack.processes.values():
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


class TokenTimes:
    """Adds the seconds of every token but those of the first commit; tokens that come together share their time."""

    def __init__(self, token_times_s: list[float]) -> None:
        self._times_s = token_times_s
        self._num_tokens = 0
        self._last = 0.0

    def __call__(self, num_tokens: int, has_draft: bool) -> None:
        now, num_new = time.perf_counter(), num_tokens - self._num_tokens
        if self._num_tokens:
            self._times_s += [(now - self._last) / num_new] * num_new
        self._last, self._num_tokens = now, num_tokens


def _peak_kib(pid: int) -> int:
    """Largest resident size since the last reset."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def _cpu_s(pid: int) -> float:
    """Processor time used so far: on a busy machine the steadier figure."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_sessions(
    num_clips: int = 8,
    num_frames: int = 64,
    max_new_tokens: int = 200,
    clients: Sequence[int] = CLIENTS,
    num_rounds: int = 2,
) -> dict[str, Any]:
    """Rows by method and number of clients, of the fastest of the rounds, which take turns so that a busy moment does
    not hit one number of clients only; `rises` says that four are faster than one and none slower."""
    clips = held_out_clips(num_clips)
    options = CaptionOptions(num_frames=num_frames, max_new_tokens=max_new_tokens)
    rows: dict[str, Any] = {}
    say("sessions: starting the stack")
    async with _stack(prefix_cache_mb=2048) as stack, open_channel(stack.gateway_address) as channel:
        shared = Clients(stack, channel, clips, options)
        say("sessions: warming up")
        await shared.run("parallel", 2, max_new_tokens=16)
        for method in METHODS:
            runs: dict[int, list[Run]] = {num_clients: [] for num_clients in clients}
            for _ in range(num_rounds):
                for num_clients in clients:
                    run = await shared.run(method, num_clients)
                    runs[num_clients].append(run)
                    say(f"sessions: {method}: {json.dumps(run.row(runs[clients[0]][0]))}")
            fastest = [min(runs[num_clients], key=lambda run: run.seconds) for num_clients in clients]
            rows[method] = [run.row(runs[clients[0]][0]) for run in fastest]
    async with _stack(prefix_cache_mb=0) as stack, open_channel(stack.gateway_address) as channel:
        cold = Clients(stack, channel, clips[: max(1, num_clips // 2)], options)
        await cold.run("parallel", 2, max_new_tokens=2)
        for method in METHODS:
            alone, together = await cold.run(method, 1), await cold.run(method, 4)
            rows[f"{method}_cold"] = [run.row(alone) for run in (alone, together)]
            say(f"sessions: {method}, cold: {json.dumps(rows[f'{method}_cold'])}")
    return {
        "clips": num_clips,
        "frames": num_frames,
        "max_new_tokens": max_new_tokens,
        **rows,
        "rises": all(_rises(rows[method]) for method in METHODS),
        "all_identical": all(_is_whole(row["identical"]) for method in rows for row in rows[method]),
    }


async def measure_prefix_reuse(num_frames: int = 128, max_new_tokens: int = 64) -> dict[str, Any]:
    """Prefill seconds of a first and a second prompt about one video, and whether the second's text is what it is
    without reuse."""
    (clip,) = held_out_clips(1)
    options = CaptionOptions(num_frames=num_frames, max_new_tokens=max_new_tokens, method="autoregressive")
    second = CaptionOptions(prompt=SECOND_PROMPT)
    second.MergeFrom(options)
    say("prefix reuse: two prompts about one video")
    async with _stack(prefix_cache_mb=512) as stack, open_channel(stack.gateway_address) as channel:
        captions = [await run_caption(channel, clip, asked) for asked in (options, second)]
    async with _stack(prefix_cache_mb=0) as stack, open_channel(stack.gateway_address) as channel:
        fresh = await run_caption(channel, clip, second)
    return {
        "frames": num_frames,
        "prompt_tokens": captions[1].summary.video.prompt_tokens,
        "reused_tokens": captions[1].summary.video.reused_tokens,
        **{
            f"{name}_{what}_s": round(seconds, 4)
            for name, caption in (("first", captions[0]), ("second", captions[1]), ("fresh", fresh))
            for what, seconds in _prefill_seconds(caption).items()
        },
        "identical": captions[1].token_ids == fresh.token_ids,
    }


def _prefill_seconds(caption: Captioned) -> dict[str, float]:
    timings = caption.summary.timings
    return {
        "prefill": timings.target_encode_s + timings.target_prefill_s,
        "first_token": timings.first_token_s,
    }


def _stack(prefix_cache_mb: int) -> Stack:
    flags = {"target": ("--prefix-cache-mb", str(prefix_cache_mb))}
    return Stack(StackOptions(threads=1, pin=True, restart=False, extra_flags=flags))


def _rises(rows: Sequence[dict[str, Any]]) -> bool:
    rates: dict[int, float] = {row["clients"]: row["tokens_per_s"] for row in rows}
    return rates.get(4, float("inf")) > rates[1] and min(rates.values()) == rates[1]


def _is_whole(share: str) -> bool:
    same, total = share.split("/")
    return same == total


async def measure(num_clips: int, num_frames: int, max_new_tokens: int) -> dict[str, Any]:
    """Both measurements."""
    return {
        "sessions": await measure_sessions(num_clips, num_frames, max_new_tokens),
        "prefix_reuse": await measure_prefix_reuse(),
        "machine": machine_facts(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.guarantees.sessions", description=__doc__)
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    given = parser.parse_args()
    document = run_to_end(measure(given.clips, given.frames, given.max_new_tokens))
    print(json.dumps(document))
    sys.exit(0 if document["sessions"]["all_identical"] and document["prefix_reuse"]["identical"] else 1)


if __name__ == "__main__":
    main()
