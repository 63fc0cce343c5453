"""`python -m bench`: every method on the same clips in one run, clip by clip in rotating order; the last line is JSON.

Each model process has one core. While transformers runs (in its own process, on the target's core) the stack is idle,
and the other way round.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from bench import reference, report
from bench.agreement import draft_agreement
from bench.captions import run_caption
from bench.clips import held_out_clips
from bench.machine import machine_facts
from bench.prediction import prediction_row
from bench.reference import start_reference
from bench.running import run_to_end, say
from bench.samples import ENGINE_PLAIN, OUTSIDE_PLAIN, Sample, method_row, rate_ratio, reference_sample, stack_sample
from bench.tasks import Agreement, Task
from slipstream.cli.client import gateway_info
from slipstream.cli.launch import FRESH, POCKET_DIR
from slipstream.cli.stack import Stack, StackOptions
from slipstream.rpc.client import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

STACK_METHODS = {
    ENGINE_PLAIN: CaptionOptions(method="autoregressive"),
    "parallel fixed": CaptionOptions(method="parallel", policy="fixed", gate=False),
    "parallel self_clocked": CaptionOptions(method="parallel", policy="self_clocked"),
}
REFERENCE_METHODS = {
    OUTSIDE_PLAIN: reference.generate,
    f"{OUTSIDE_PLAIN} assisted": reference.generate_assisted,
    f"{OUTSIDE_PLAIN} assisted, video shown": reference.generate_assisted_with_video,
}
WARM_UP_TOKENS = 32
PRUNER, ALPHA, MAX_WINDOW = "uv_spread", 0.9, 24


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    clips: tuple[Path, ...]
    num_reference_clips: int
    template: Task
    """All but the clip."""


class Bench:
    """The running processes, and what was measured with them so far."""

    def __init__(self, plan: Plan, channel: grpc.aio.Channel, outside: ProcessPoolExecutor) -> None:
        self.samples: list[Sample] = []
        self.agreements: dict[str, Agreement] = {}
        self._plan = plan
        self._channel = channel
        self._outside = outside

    async def warm_up(self) -> None:
        """One short caption by every method."""
        clip = self._plan.clips[0]
        for method in self._methods(0):
            say(f"warming up: {method}")
            await self._measure(method, clip, WARM_UP_TOKENS)

    async def run(self) -> None:
        """Every method on every clip, then the draft's agreement on the texts."""
        for number, clip in enumerate(self._plan.clips):
            methods = self._methods(number)
            turn = number % len(methods)
            for method in methods[turn:] + methods[:turn]:
                say(f"clip {number + 1} of {len(self._plan.clips)}: {method}")
                self.samples.append(await self._measure(method, clip, self._plan.template.max_new_tokens))
        for sample in [sample for sample in self.samples if sample.method == ENGINE_PLAIN]:
            say(f"the draft's agreement on {sample.clip}")
            task = replace(self._plan.template, video=Path(sample.clip))
            self.agreements[sample.clip] = await self._outside_call(
                draft_agreement, task, sample.token_ids, PRUNER, ALPHA
            )

    def _methods(self, clip_number: int) -> list[str]:
        outside = REFERENCE_METHODS if clip_number < self._plan.num_reference_clips else {}
        return [*STACK_METHODS, *outside]

    async def _measure(self, method: str, clip: Path, max_new_tokens: int) -> Sample:
        task = replace(self._plan.template, video=clip, max_new_tokens=max_new_tokens)
        if method in REFERENCE_METHODS:
            return reference_sample(method, str(clip), await self._outside_call(REFERENCE_METHODS[method], task))
        options = CaptionOptions(
            prompt=task.prompt,
            num_frames=task.num_frames,
            max_new_tokens=max_new_tokens,
            pruner=PRUNER,
            alpha=ALPHA,
            max_window=MAX_WINDOW,
        )
        options.MergeFrom(STACK_METHODS[method])
        return stack_sample(method, str(clip), await run_caption(self._channel, clip, options))

    async def _outside_call(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._outside, function, *args)


def make_document(bench: Bench, plan: Plan) -> dict[str, Any]:
    """Everything that was found."""
    samples = bench.samples
    methods = [name for name in (*STACK_METHODS, *REFERENCE_METHODS) if any(s.method == name for s in samples)]
    policies = {options.policy: name for name, options in STACK_METHODS.items() if options.policy}
    return {
        "clips": len(plan.clips),
        "frames": plan.template.num_frames,
        "max_new_tokens": plan.template.max_new_tokens,
        "pruner": PRUNER,
        "alpha": ALPHA,
        "max_window": MAX_WINDOW,
        "methods": [method_row(name, samples) for name in methods],
        "self_clocked_over_fixed": rate_ratio(samples, policies["self_clocked"], policies["fixed"]),
        "prediction": {
            policy: prediction_row(policy, [s for s in samples if s.method == name], bench.agreements, MAX_WINDOW)
            for policy, name in policies.items()
        },
        "machine": machine_facts(),
    }


async def measure(plan: Plan) -> dict[str, Any]:
    """Starts the processes, measures, and ends them."""
    options = StackOptions(plan.template.target, plan.template.draft, threads=1, pin=True, extra_flags=FRESH)
    core = min(os.sched_getaffinity(0))
    say("starting the stack")
    with start_reference(core) as outside:
        async with Stack(options) as stack, open_channel(stack.gateway_address) as channel:
            template = replace(plan.template, prompt=(await gateway_info(channel)).default_prompt)
            plan = replace(plan, template=template)
            bench = Bench(plan, channel, outside)
            await bench.warm_up()
            await bench.run()
    return make_document(bench, plan)


def parse_plan(argv: Sequence[str] | None = None) -> Plan:
    """From the command line; renders the clips."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures every method on the same clips.")
    parser.add_argument("--clips", type=int, default=10)
    parser.add_argument("--reference-clips", type=int, default=3, help="clips that transformers captions too")
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--target", type=Path, default=POCKET_DIR / "target")
    parser.add_argument("--draft", type=Path, default=POCKET_DIR / "draft")
    given = parser.parse_args(argv)
    clips = tuple(held_out_clips(given.clips))
    template = Task(clips[0], given.frames, "", given.max_new_tokens, given.target, given.draft)
    return Plan(clips, given.reference_clips, template)


def main() -> None:
    document = run_to_end(measure(parse_plan()))
    report.show(document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
