"""Measures every method on the same clips, clip by clip in rotating order. Knows how to run things, not what they mean.

The processes are stacks, with every service's use of processor and memory, and the outside reference. While one of them
works the others are idle, so that each has the cores to itself.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import reference
from bench.common import NO_TIME, Budget, Captioned, Task, Usage, cpu_s, forget_peak, peak_bytes, run_caption, say
from bench.methods.agreement import Agreement, accepted_shares, draft_agreements, kept_tokens
from bench.methods.listing import ALPHA, ENGINE_PLAIN, BenchMethod, Place, caption_options
from bench.methods.samples import Sample, median, reference_sample, stack_sample
from bench.reference import Generated, start_reference
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.errors import SlipstreamError
from slipstream.speculation.methods import Drafter, get_method
from slipstream.stack.local import FRESH, Stack, StackOptions

# -- the processes ----------------------------------------------------------------------------------------------------

OUTSIDE: Mapping[str, Callable[[Task], Generated]] = {
    "transformers": reference.generate,
    "transformers_assisted": reference.generate_assisted,
    "transformers_assisted_shown": reference.generate_assisted_with_video,
    "transformers_prompt_lookup": reference.generate_with_prompt_lookup,
}


@dataclass(frozen=True)
class MeasuredStack:
    """A running stack whose captions are measured one at a time."""

    captioner: AsyncCaptioner
    pids: Mapping[str, int]
    cores: int
    """That each model may run on at a time."""

    async def caption(self, clip: Path, options: CaptionOptions) -> tuple[Captioned, dict[str, Usage]]:
        """The caption; seconds of processor time from its first token to its last, and memory peaks over all of it."""
        at_first: dict[str, float] = {}

        def on_tokens(num_tokens: int, has_draft: bool) -> None:
            if not at_first:
                at_first.update({name: cpu_s(pid) for name, pid in self.pids.items()})

        for pid in self.pids.values():
            forget_peak(pid)
        captioned = await run_caption(self.captioner, clip, options, on_tokens)
        return captioned, {
            name: Usage(cpu_s(pid) - at_first.get(name, 0.0), peak_bytes(pid), self.cores)
            for name, pid in self.pids.items()
        }


@dataclass(frozen=True)
class Processes:
    stacks: Mapping[Place, MeasuredStack]
    outside: ProcessPoolExecutor
    default_prompt: str

    async def call_outside(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.outside, partial(function, *args))


@asynccontextmanager
async def start_processes(target: Path, draft: Path, device: str, dtype: str) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as running:
        outside = running.enter_context(start_reference(min(os.sched_getaffinity(0))))
        stacks: dict[Place, MeasuredStack] = {}
        for place, options in _settings(target, draft, device, dtype).items():
            say(f"starting the stack: {place}")
            stack = await running.enter_async_context(Stack(options))
            captioner = await running.enter_async_context(connect_async(stack.gateway_address))
            pids = {name: process.pid for name, process in stack.processes.items()}
            stacks[place] = MeasuredStack(captioner, pids, options.threads or 1)
        info = await stacks[Place.PAIR].captioner.info()
        yield Processes(stacks, outside, info.default_prompt)


def _settings(target: Path, draft: Path, device: str, dtype: str) -> dict[Place, StackOptions]:
    is_cpu = device == "cpu"  # elsewhere a core each would be what is measured
    threads = 1 if is_cpu else None
    pair = StackOptions(target, draft, device=device, dtype=dtype, threads=threads, pin=is_cpu, extra_flags=FRESH)
    settings = {Place.PAIR: pair, Place.SAME: replace(pair, draft_model=target)}
    if is_cpu:
        num_cores = len(os.sched_getaffinity(0))
        settings[Place.PAIR_BOTH_CORES] = StackOptions(target, draft, extra_flags=FRESH)
        settings[Place.BOTH_CORES] = StackOptions(target, None, threads=num_cores, extra_flags=FRESH)
    return settings


# -- the comparison ---------------------------------------------------------------------------------------------------

WARM_UP_TOKENS = 32
RECORDED_PRUNERS = ("uv_spread", "uv", "none", "all")
"""What chains may be drafted from without attention."""
DRAWN_PRUNERS = ("uv", "uv_spread", "uv_cosine", "attention", "attention_variation", "specvlm", "uniform")
TIMELINES_AFTER_CLIPS = 2
TIMELINES = ("autoregressive", "sd", "sd_tree", "parallelvlm", "slipstream")


@dataclass
class Findings:
    samples: list[Sample] = field(default_factory=list)
    timelines: list[Sample] = field(default_factory=list)
    agreements: dict[str, dict[str, Agreement]] = field(default_factory=dict)
    """By pruner, then by clip."""
    accepted: dict[str, list[float]] = field(default_factory=dict)
    """Of the lossy methods: clip by clip, the share of their tokens that the target would have chosen."""
    kept: dict[str, list[int]] = field(default_factory=dict)
    """Of the first clip."""
    notes: list[str] = field(default_factory=list)
    num_clips: int = 0


@dataclass
class Comparison:
    processes: Processes
    compared: Sequence[BenchMethod]
    clips: Sequence[Path]
    template: Task
    budget: Budget
    sampling: CaptionOptions = field(default_factory=CaptionOptions)
    """Temperature, seed and structure of all captions; without them greedy, and any text."""
    findings: Findings = field(default_factory=Findings)

    def __post_init__(self) -> None:
        self._methods = [m for m in self.compared if m.place is Place.OUTSIDE or m.place in self.processes.stacks]
        self._caption_s: dict[str, float] = {}
        """Of each method's last whole caption."""

    async def warm_up(self) -> None:
        """One caption of few tokens by every method; those that a stack refuses are left out of all that follows, and
        so are those for which there is no time."""
        for method in list(self._methods):
            if not self.budget.allows(0.0):
                self._methods.remove(method)
                self.findings.notes.append(f"{method.name} is left out: {NO_TIME} for it")
                continue
            say(f"warming up: {method.name}")
            try:
                await self._measure(method, self.clips[0], WARM_UP_TOKENS)
            except SlipstreamError as error:
                self._methods.remove(method)
                self.findings.notes.append(f"{method.name} is left out: {error}")

    async def run(self) -> None:
        """The clips with the timelines among them, as far as there is time, then what the reference can tell of the
        texts."""
        for number, clip in enumerate(self.clips):
            if number == TIMELINES_AFTER_CLIPS:
                await self._draw_timelines()
            if not self._allows(sum(self._expected_s(method.name) for method in self._methods_of(number)), number + 1):
                self.findings.notes.append(f"{number} of {len(self.clips)} clips: {NO_TIME} for more")
                break
            await self._run_clip(number, clip)
        if len(self.clips) <= TIMELINES_AFTER_CLIPS:
            await self._draw_timelines()
        await self._consult()

    async def _run_clip(self, number: int, clip: Path) -> None:
        methods = self._methods_of(number)
        turn = number % max(len(methods), 1)
        for method in methods[turn:] + methods[:turn]:
            if not self._allows(self._expected_s(method.name), number + 1):
                self.findings.notes.append(f"{method.name} was not measured on {clip.stem}: {NO_TIME} for it")
                continue
            say(f"clip {number + 1} of {len(self.clips)}: {method.name}")
            began_s = self.budget.spent_s
            try:
                self.findings.samples.append(await self._measure(method, clip, self.template.max_new_tokens))
            except SlipstreamError as error:
                self.findings.notes.append(f"{method.name} failed on {clip.stem}: {error}")
            self._caption_s[method.name] = self.budget.spent_s - began_s
        self.findings.num_clips = number + 1

    def _methods_of(self, number: int) -> list[BenchMethod]:
        """Those that caption the clip of that number."""
        return [method for method in self._methods if method.max_clips is None or number < method.max_clips]

    def _expected_s(self, name: str) -> float:
        """Of a caption by that method: what its last one took, or else the longest one so far."""
        return self._caption_s.get(name) or max(self._caption_s.values(), default=0.0)

    def _allows(self, seconds: float, num_clips: int) -> bool:
        """Whether there is time for it, and then for what is asked about so many clips."""
        return self.budget.allows(seconds, reserved_s=self._epilogue_s(num_clips))

    async def _draw_timelines(self) -> None:
        """Captions of the first clip of which the gateway tells what the models did when."""
        names = {method.name for method in self._methods}
        for name in [name for name in TIMELINES if name in names]:
            if not self._allows(self._expected_s(name), self.findings.num_clips):
                self.findings.notes.append(f"timeline of {name}: {NO_TIME} for it")
                continue
            say(f"timeline: {name}")
            asked = caption_options(method=name, trace=True)
            try:
                self.findings.timelines.append(await self._caption(name, Place.PAIR, self.clips[0], asked))
            except SlipstreamError as error:
                self.findings.notes.append(f"timeline of {name}: {error}")

    async def _consult(self) -> None:
        """What the texts say of the draft's agreement, of lossy methods' acceptance, and of the tokens kept."""
        plain = [sample for sample in self.findings.samples if sample.method == ENGINE_PLAIN]
        drawn = self.sampling.sampling
        for sample in plain:
            say(f"the draft's agreement on {Path(sample.clip).stem}")
            task = replace(self.template, video=Path(sample.clip))
            asked = (task, sample.token_ids, RECORDED_PRUNERS, ALPHA, drawn)
            found = await self.processes.call_outside(draft_agreements, *asked)
            for pruner, agreement in zip(RECORDED_PRUNERS, found, strict=True):
                self.findings.agreements.setdefault(pruner, {})[sample.clip] = agreement
            await self._accepted(task)
        say("the tokens that pruners keep")
        task = replace(self.template, video=self.clips[0])
        self.findings.kept = await self.processes.call_outside(kept_tokens, task, DRAWN_PRUNERS, ALPHA)

    async def _accepted(self, task: Task) -> None:
        lossy = {method.name for method in self._methods if method.lossy}
        texts = {
            s.method: s.token_ids for s in self.findings.samples if s.method in lossy and s.clip == str(task.video)
        }
        if texts:
            for name, share in (await self.processes.call_outside(accepted_shares, task, texts)).items():
                self.findings.accepted.setdefault(name, []).append(share)

    def _epilogue_s(self, num_clips: int) -> float:
        """What asking the reference and theory takes, about: three prefills a clip, and as much for the drawn one."""
        prefill_s = median(sample.first_token_s for sample in self.findings.samples) or 0.0
        return prefill_s * 3 * (num_clips + 1)

    async def _measure(self, method: BenchMethod, clip: Path, max_new_tokens: int) -> Sample:
        task = replace(self.template, video=clip, max_new_tokens=max_new_tokens)
        if method.place is Place.OUTSIDE:
            answer = await self.processes.call_outside(OUTSIDE[method.name], task)
            return reference_sample(method.name, str(clip), answer)
        options = caption_options(method.options, max_new_tokens=max_new_tokens)
        return await self._caption(method.name, method.place, clip, options)

    async def _caption(self, name: str, place: Place, clip: Path, options: CaptionOptions) -> Sample:
        prompt, num_frames, most = self.template.prompt, self.template.num_frames, self.template.max_new_tokens
        asked = options.over(CaptionOptions(prompt, num_frames=num_frames, max_new_tokens=most))
        asked = self.sampling.over(asked)
        sample = stack_sample(name, str(clip), *await self.processes.stacks[place].caption(clip, asked))
        if sample.figures.get("drafts_lost"):
            self.findings.notes.append(f"{name} lost its draft on {clip.stem}, and went on without for a while")
        return sample


def recorded_pruner(method: BenchMethod) -> str | None:
    """The pruner whose recorded agreement is that of this method's draft."""
    if method.place is not Place.PAIR or method.lossy:
        return None
    built = get_method(method.options.method)
    pruner = method.options.get("pruner", built.pruner)
    return pruner if built.drafter is Drafter.DRAFT and pruner in RECORDED_PRUNERS else None
