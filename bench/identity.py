"""`python -m bench.identity`: greedy text of the stack against `transformers.generate`, token by token, in fp32.

Every clip is captioned under a part of the settings such that all of them are covered several times. Exit status 1 if
any text differs. The last line is JSON.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from bench.captions import Captioned, run_caption
from bench.clips import FULL_SCENES, SHORT_SCENES, held_out_clips
from bench.identity_plan import GUIDED_PRUNERS, Setting, coverage, plan_settings
from bench.identity_report import show
from bench.machine import machine_facts
from bench.reference import generate, start_reference, top_two_margin
from bench.running import run_to_end, say
from bench.tasks import Generated, Task
from slipstream.client.caption_client import gateway_info
from slipstream.rpc.channels import open_channel
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.rpc.v1.target_pb2 import FinishReason
from slipstream.stack.local import POCKET_DIR, Stack, StackOptions


@dataclass(frozen=True)
class Comparison:
    """One caption of the stack beside the reference's text."""

    clip: str
    setting: Setting
    expected: tuple[int, ...]
    captioned: Captioned

    @property
    def position(self) -> int | None:
        """Of the first token that differs; None for equal texts."""
        got = self.captioned.token_ids
        if got == self.expected:
            return None
        pairs = zip(got, self.expected, strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(got), len(self.expected)))

    @property
    def ending(self) -> str:
        """Why the text ended, and whether that was at a draft's token, inside its window, or at the target's own."""
        stopped = self.captioned.summary.finish_reason == FinishReason.FINISH_REASON_STOP
        inside = self.captioned.from_draft[-1:] == (True,)
        return f"{'end of text' if stopped else 'limit'} {'inside a window' if inside else 'at an own token'}"


async def compare(
    channel: grpc.aio.Channel, outside: Executor, tasks: Sequence[Task], plan: Sequence[Sequence[Setting]]
) -> list[Comparison]:
    """Captions every clip under its settings, while the reference already works on the next clip."""
    loop = asyncio.get_running_loop()
    answers = [loop.run_in_executor(outside, generate, task) for task in tasks]
    comparisons = []
    for number, (task, settings) in enumerate(zip(tasks, plan, strict=True), 1):
        reference = await answers[number - 1]
        for setting in settings:
            comparisons.append(await _compare(channel, task, setting, reference))
        differing = sum(comparison.position is not None for comparison in comparisons)
        say(f"clip {number} of {len(tasks)}: {len(reference.token_ids)} tokens; {differing} differences so far")
    return comparisons


async def _compare(channel: grpc.aio.Channel, task: Task, setting: Setting, reference: Generated) -> Comparison:
    limit = setting.limit(len(reference.token_ids), task.max_new_tokens)
    options = CaptionOptions(
        prompt=task.prompt,
        num_frames=task.num_frames,
        max_new_tokens=limit,
        method=setting.method,
        pruner=setting.pruner,
        alpha=setting.alpha,
        policy=setting.policy,
        max_window=setting.max_window,
        guidance=setting.guidance,
        positions=setting.positions,
        seed=setting.seed,
        gate=False,
    )
    captioned = await run_caption(channel, task.video, options)
    return Comparison(task.video.stem, setting, reference.token_ids[:limit], captioned)


def describe_differences(comparisons: Sequence[Comparison], tasks: Sequence[Task], outside: Executor) -> list[Any]:
    """Where texts differ, and by how much the reference preferred its own token there."""
    by_name = {task.video.stem: task for task in tasks}
    differences = []
    for comparison in comparisons:
        position = comparison.position
        if position is None:
            continue
        prefix = comparison.expected[:position]
        differences.append(
            {
                "clip": comparison.clip,
                "setting": asdict(comparison.setting),
                "position": position,
                "expected": comparison.expected[position : position + 1],
                "got": comparison.captioned.token_ids[position : position + 1],
                "reference_margin": outside.submit(top_two_margin, by_name[comparison.clip], prefix).result(),
            }
        )
    return differences


def guidance_facts(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Whether both kinds of guidance kept the same tokens, and what they weighed on the wire."""
    digests: dict[tuple[str, str, float], dict[str, set[str]]] = {}
    weights: dict[str, dict[int, int]] = {}
    for comparison in comparisons:
        setting, summary = comparison.setting, comparison.captioned.summary
        speculation = summary.speculation
        if setting.method != "parallel" or setting.pruner not in GUIDED_PRUNERS or not speculation.kept_digest:
            continue
        kinds = digests.setdefault((comparison.clip, setting.pruner, setting.alpha), {})
        kinds.setdefault(setting.guidance, set()).add(speculation.kept_digest)
        weights.setdefault(setting.guidance, {})[summary.video.video_tokens] = speculation.guidance_bytes
    pairs = [set.union(*kinds.values()) for kinds in digests.values() if len(kinds) > 1]
    return {
        "pairs_compared": len(pairs),
        "pairs_that_keep_the_same_tokens": sum(len(kept) == 1 for kept in pairs),
        "bytes_by_video_tokens": {kind: dict(sorted(sizes.items())) for kind, sizes in weights.items()},
    }


def make_document(comparisons: Sequence[Comparison], differences: list[Any], elapsed_s: float) -> dict[str, Any]:
    """Everything that was found."""
    clips = {comparison.clip for comparison in comparisons}
    differing = {difference["clip"] for difference in differences}
    return {
        "identical": f"{len(clips) - len(differing)}/{len(clips)}",
        "comparisons": len(comparisons),
        "comparisons_identical": len(comparisons) - len(differences),
        "tokens_compared": sum(len(comparison.expected) for comparison in comparisons),
        "differences": differences,
        "coverage": coverage(comparison.setting for comparison in comparisons),
        "endings": dict(Counter(comparison.ending for comparison in comparisons).most_common()),
        "drafts_lost": sum(len(comparison.captioned.lost_at) for comparison in comparisons),
        "guidance": guidance_facts(comparisons),
        "elapsed_s": elapsed_s,
        "machine": machine_facts(),
    }


async def run(tasks: Sequence[Task], plan: Sequence[Sequence[Setting]]) -> dict[str, Any]:
    """Starts the processes, compares, and ends them."""
    started = time.monotonic()
    options = StackOptions(tasks[0].target, tasks[0].draft, threads=1)
    with start_reference() as outside:
        say("starting the stack")
        async with Stack(options) as stack, open_channel(stack.gateway_address) as channel:
            prompt = (await gateway_info(channel)).default_prompt
            tasks = [replace(task, prompt=prompt) for task in tasks]
            comparisons = await compare(channel, outside, tasks, plan)
        differences = describe_differences(comparisons, tasks, outside)
    return make_document(comparisons, differences, time.monotonic() - started)


def parse_work(argv: Sequence[str] | None = None) -> tuple[list[Task], list[list[Setting]]]:
    """Clips and settings from the command line; renders the clips."""
    parser = argparse.ArgumentParser(prog="python -m bench.identity", description="Is the stack's text transformers'?")
    parser.add_argument("--clips", type=int, default=27, help="short clips")
    parser.add_argument("--frames", type=int, default=16, help="frames of a short clip")
    parser.add_argument("--settings", type=int, default=8, help="speculative settings for a short clip")
    parser.add_argument("--full-clips", type=int, default=3, help="clips of full length")
    parser.add_argument("--full-frames", type=int, default=128)
    parser.add_argument("--full-settings", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, default=POCKET_DIR / "target")
    parser.add_argument("--draft", type=Path, default=POCKET_DIR / "draft")
    given = parser.parse_args(argv)
    kinds = [(given.full_clips, given.full_frames, FULL_SCENES), (given.clips, given.frames, SHORT_SCENES)]
    tasks = [
        Task(clip, frames, "", given.max_new_tokens, given.target, given.draft)
        for count, frames, num_scenes in kinds
        for clip in held_out_clips(count, num_scenes)
    ]
    counts = [given.full_settings] * given.full_clips + [given.settings] * given.clips
    return tasks, plan_settings(counts, given.seed)


def main() -> None:
    document = run_to_end(run(*parse_work()))
    show(document)
    print(json.dumps(document))
    sys.exit(1 if document["differences"] else 0)


if __name__ == "__main__":
    main()
