"""Greedy text of the stack against `transformers.generate`, token by token, in fp32.

Every clip is captioned under a part of the settings such that all of them are covered several times. Exit status 1 if
any text differs.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import (
    MODELS,
    SHORT_SCENES,
    Captioned,
    Task,
    first_difference,
    held_out_clips,
    machine_facts,
    make_parser,
    run_caption,
    run_to_end,
    say,
)
from bench.output import finish
from bench.reference import Generated, generate, start_reference, top_two_margin
from slipstream import AsyncCaptioner, CaptionOptions, FinishReason, connect_async
from slipstream.stack.local import Stack, StackOptions
from tests.support.processes import logged
from tests.support.tiny_checkpoint import write_tiny_llava
from tests.support.tiny_pair import write_tiny_pair
from training.world import FULL_SCENES

GUIDED_PRUNERS = ("uv", "uv_spread")
PRUNERS = (*GUIDED_PRUNERS, "random", "uniform", "none")
ALPHAS = (0.0, 0.5, 0.9, 1.0)
WINDOWS = tuple(range(1, 17))
POLICIES = ("self_clocked", "fixed")
GUIDANCE_KINDS = ("hidden_states", "scores")
POSITIONS = ("original", "compact")
VARIED = ("pruner", "alpha", "max_window", "policy", "positions")
CUTS = ("none", "none", "first token", "inside", "inside", "at the end")
"""Where max_new_tokens cuts the reference's text."""
LEVELS = {
    "policy": POLICIES,
    "max_window": WINDOWS,
    "guidance": GUIDANCE_KINDS,
    "positions": POSITIONS,
    "cut": CUTS,
}


@dataclass(frozen=True)
class Setting:
    """One way to caption a clip. `cut_share` says where "inside" cuts, as a share of the text."""

    method: str
    pruner: str = "uv"
    alpha: float = 0.9
    policy: str = "self_clocked"
    max_window: int = 16
    guidance: str = "hidden_states"
    positions: str = "original"
    seed: int = 0
    cut: str = "none"
    cut_share: float = 0.5

    def limit(self, text_len: int, max_new_tokens: int) -> int:
        """max_new_tokens for a text that has `text_len` tokens without a cut."""
        inside = min(max(round(self.cut_share * text_len), 1), max(text_len - 1, 1))
        return {"none": max_new_tokens, "first token": 1, "inside": inside, "at the end": text_len}[self.cut]


def plan_settings(per_clip: Sequence[int], seed: int) -> list[list[Setting]]:
    """For every clip plain decoding, then `per_clip[i]` speculative settings, every level equally often.

    The first two of these are twins that differ in the kind of guidance only, as both must keep the same tokens.
    """
    rng = random.Random(seed)
    drawn = {name: _balanced(levels, rng) for name, levels in LEVELS.items()}
    pruned, guided = (
        _balanced([(pruner, alpha) for pruner in pruners for alpha in ALPHAS], rng)
        for pruners in (PRUNERS, GUIDED_PRUNERS)
    )
    plain_cuts = _balanced(CUTS, rng)

    def speculative(pruner: str, alpha: float) -> Setting:
        chosen = {name: next(levels) for name, levels in drawn.items()}
        return Setting("slipstream", pruner, alpha, seed=rng.randrange(2**32), cut_share=rng.random(), **chosen)

    plan = []
    for count in per_clip:
        plain = Setting("autoregressive", cut=next(plain_cuts), cut_share=rng.random())
        twin = speculative(*next(guided))
        twins = [replace(twin, guidance=kind) for kind in GUIDANCE_KINDS]
        plan.append([plain, *twins[:count], *(speculative(*next(pruned)) for _ in range(count - 2))])
    return plan


def _balanced(levels: Sequence[Any], rng: random.Random) -> Iterator[Any]:
    """Endless: all levels in random order, again and again."""
    while True:
        yield from rng.sample(levels, len(levels))


def coverage(settings: Iterable[Setting]) -> dict[str, dict[str, int]]:
    chosen = list(settings)
    speculative = [setting for setting in chosen if setting.method == "slipstream"]
    counted = dict.fromkeys(("method", "cut"), chosen) | dict.fromkeys((*VARIED, "guidance"), speculative)
    counts = {name: Counter(getattr(setting, name) for setting in among) for name, among in counted.items()}
    return {name: {str(level): count for level, count in sorted(found.items())} for name, found in counts.items()}


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
        return first_difference(self.captioned.token_ids, self.expected)

    @property
    def ending(self) -> str:
        """Why the text ended, and whether that was at a draft's token, inside its window, or at the target's own."""
        stopped = self.captioned.caption.finish_reason is FinishReason.STOP
        last = self.captioned.caption.tokens[-1:]
        inside = bool(last) and last[0].from_draft
        return f"{'end of text' if stopped else 'limit'} {'inside a window' if inside else 'at an own token'}"


async def compare(
    captioner: AsyncCaptioner, outside: Executor, tasks: Sequence[Task], plan: Sequence[Sequence[Setting]]
) -> list[Comparison]:
    """Captions every clip under its settings, while the reference already works on the next clip."""
    loop = asyncio.get_running_loop()
    answers = [loop.run_in_executor(outside, generate, task) for task in tasks]
    comparisons = []
    for number, (task, settings) in enumerate(zip(tasks, plan, strict=True), 1):
        reference = await answers[number - 1]
        for setting in settings:
            comparisons.append(await _compare(captioner, task, setting, reference))
        differing = sum(comparison.position is not None for comparison in comparisons)
        say(f"clip {number} of {len(tasks)}: {len(reference.token_ids)} tokens; {differing} differences so far")
    return comparisons


async def _compare(captioner: AsyncCaptioner, task: Task, setting: Setting, reference: Generated) -> Comparison:
    limit = setting.limit(len(reference.token_ids), task.max_new_tokens)
    options = CaptionOptions(
        prompt=task.prompt,
        num_frames=task.num_frames,
        max_new_tokens=limit,
        **{name: getattr(setting, name) for name in ("method", *VARIED, "guidance", "seed")},
        gate=False,
    )
    captioned = await run_caption(captioner, task.video, options)
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
        setting, caption = comparison.setting, comparison.captioned.caption
        speculation = caption.speculation
        if setting.method != "slipstream" or setting.pruner not in GUIDED_PRUNERS or not speculation.kept_digest:
            continue
        kinds = digests.setdefault((comparison.clip, setting.pruner, setting.alpha), {})
        kinds.setdefault(setting.guidance, set()).add(speculation.kept_digest)
        weights.setdefault(setting.guidance, {})[caption.video.video_tokens] = speculation.guidance_bytes
    pairs = [set.union(*kinds.values()) for kinds in digests.values() if len(kinds) > 1]
    return {
        "pairs_compared": len(pairs),
        "pairs_that_keep_the_same_tokens": sum(len(kept) == 1 for kept in pairs),
        "bytes_by_video_tokens": {kind: dict(sorted(sizes.items())) for kind, sizes in weights.items()},
    }


def make_document(comparisons: Sequence[Comparison], differences: list[Any], elapsed_s: float) -> dict[str, Any]:
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


async def run(
    tasks: Sequence[Task], plan: Sequence[Sequence[Setting]], ranks: int = 1, static_steps: str = "auto"
) -> dict[str, Any]:
    started = time.monotonic()
    static = ("--static-steps", static_steps)
    flags = {"target": ("--ranks", str(ranks), *static), "draft": static}
    options = StackOptions(tasks[0].target, tasks[0].draft, threads=1, extra_flags=flags)
    with start_reference() as outside:
        say("starting the stack")
        async with Stack(options) as stack, connect_async(stack.gateway_address) as captioner:
            if static_steps == "on" and not logged(stack.processes["target"].log_path, "static_steps.on"):
                sys.exit("identity: the target takes no static steps; its log says why")
            prompt = (await captioner.info()).default_prompt
            tasks = [replace(task, prompt=prompt) for task in tasks]
            comparisons = await compare(captioner, outside, tasks, plan)
        differences = describe_differences(comparisons, tasks, outside)
    how = {"ranks": ranks, "static_steps": static_steps}
    return make_document(comparisons, differences, time.monotonic() - started) | how


def parse_work(argv: Sequence[str], folder: Path) -> tuple[list[Task], list[list[Setting]], int, str]:
    """Clips and settings from the command line; renders the clips. Writes a random pair to `folder`."""
    short = {"clips": (27, "short clips"), "frames": 16, "settings": (8, "speculative settings for a short clip")}
    full = {"full_clips": (3, "clips of full length"), "full_frames": 128, "full_settings": 4}
    flags = {**short, **full, "max_new_tokens": 320, "seed": 0, **MODELS}
    flags["ranks"] = (1, "processes that share the target")
    flags["static_steps"] = ("auto", "of target and draft: auto, on or off")
    flags["random_kv_heads"] = (0, "a pair with random weights and so many key and value heads, for as many ranks")
    given = make_parser("identity", "Is the stack's text transformers'?", ("clips", "full_clips"), **flags).parse_args(
        argv
    )
    if given.random_kv_heads:
        write = partial(write_tiny_llava, kv_heads=given.random_kv_heads)
        pair = write_tiny_pair(folder, seed=1, write=write)
        given.target, given.draft = pair.target, pair.draft
    kinds = [(given.full_clips, given.full_frames, FULL_SCENES), (given.clips, given.frames, SHORT_SCENES)]
    tasks = [
        Task(clip, frames, "", given.max_new_tokens, given.target, given.draft)
        for count, frames, num_scenes in kinds
        for clip in held_out_clips(count, num_scenes)
    ]
    counts = [given.full_settings] * given.full_clips + [given.settings] * given.clips
    return tasks, plan_settings(counts, given.seed), given.ranks, given.static_steps


def main(argv: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="slipstream-identity-") as folder:
        document = run_to_end(run(*parse_work(argv, Path(folder))))
    for name, counts in (document["coverage"] | {"ended by": document["endings"]}).items():
        print(f"{name}: " + ", ".join(f"{level} {count}" for level, count in counts.items()))
    for difference in document["differences"]:
        print(difference)
    finish("identity", document)
    sys.exit(1 if document["differences"] else 0)
