"""`gpu-serve`: models of full size, as folders of the hub's form, through the real stack.

Three stacks, one after the other: the 7B with the 3B as its draft, for the times; the 7B as its own draft with a strict
width, whose texts must be plain ones where 16 bits leave many tokens nearly as likely; the 3B as its own draft in fp32,
where nothing but a mistake makes the two differ, so that no draft token may be refused: tau is 1 up to the text's end.
"""

import asyncio
import json
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from bench.common import PROC, Captioned, first_difference, run_caption, run_to_end, say
from bench.gpu.checks import OWN_LIMIT_S, Report, make_gpu_parser, parse_device
from bench.gpu.folders import write_folder
from bench.gpu.random_model import GEOMETRIES, tiny
from bench.output import FOLDER
from slipstream import AsyncCaptioner, CaptionOptions, connect_async
from slipstream.budget import MIB
from slipstream.stack.local import FRESH, Stack, StackOptions
from tests.support.clips import make_colour_clip

NAMES = {"target": "Qwen2.5-VL-7B", "draft": "Qwen2.5-VL-3B"}
PROMPT, SECOND_PROMPT = "Describe this video in detail.", "What happens in this video?"
SIDES, TINY_SIDES = (588, 336), (84, 56)
STRICT_WIDTH = 16
SAMPLE_S, MOST_TRIES = 0.1, 5
MOST_READY_S, MOST_HOST_BYTES, MOST_ENCODE_S, MOST_GUIDANCE_S = 120.0, 6e9, 1.0, 0.050
KV_MB, CACHE_MB = 4096, {"target": 2048, "draft": 256}
"""Of each model for keys and values, and for what it keeps of videos, which at the draft are embeddings alone: told, so
that the rest of the device's memory can be judged."""
MOST_BESIDE_BYTES = 4e9
"""That the device holds beside weights, and what is told to be kept."""
MODELS = ("target", "draft")
STATIC_STEPS = "static_steps."
TOLD = ("static_", "attention.", "vision_attention.")
"""How events begin that say by which way a model goes."""


@dataclass
class Memory:
    """Of the services: the most that was resident in one of them, and, sampled, the most that was its own, and what the
    device held beyond what it held before."""

    host_bytes: dict[str, int] = field(default_factory=dict)
    """What is mapped from files, such as weights on their way to the device, counts while it is resident."""
    anonymous_bytes: dict[str, int] = field(default_factory=dict)
    device_bytes: int | None = None
    before_bytes: int | None = None
    """What the device held at the first look, when no service has begun."""

    def look(self, stack: Stack, device: torch.device) -> None:
        for name, process in stack.processes.items():
            if process.starts and process.exit_status is None:
                for seen, line in ((self.host_bytes, "VmHWM:"), (self.anonymous_bytes, "RssAnon:")):
                    seen[name] = max(seen.get(name, 0), _status_bytes(process.pid, line))
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            if self.before_bytes is None:
                self.before_bytes = total - free
            self.device_bytes = max(self.device_bytes or 0, total - free - self.before_bytes)


def _status_bytes(pid: int, name: str) -> int:
    """0 for a process that is gone."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Logs:
    """Of a stack's services, kept in a folder while they are written: they go with the stack, however it is left."""

    def __init__(self, folder: Path) -> None:
        """What is there of an earlier run goes."""
        self._folder = folder
        self._followed: dict[Path, tuple[BinaryIO, BinaryIO]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for older in folder.glob("*.log"):
            older.unlink()

    def look(self, stack: Stack) -> None:
        """Takes what is new. A log that was seen once is read to its end, also when it is gone from its folder."""
        for path in (process.log_path for process in stack.processes.values()):
            if path not in self._followed and path.exists():
                self._followed[path] = path.open("rb"), (self._folder / path.name).open("wb")
        for log, kept in self._followed.values():
            kept.write(log.read())
            kept.flush()

    def close(self) -> None:
        for log, kept in self._followed.values():
            log.close()
            kept.close()


def told_events(log: Path) -> list[dict[str, Any]]:
    """What a model's log says of its ways: names and fields of events; none where there is no log."""
    found = []
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        with suppress(ValueError):  # what no logger has written
            entry = json.loads(line)
            if isinstance(entry, dict) and str(entry.get("event")).startswith(TOLD):
                found.append({name: value for name, value in entry.items() if name not in ("timestamp", "service")})
    return found


def judge_static(report: Report, name: str, events: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Whether the models of a stack take static steps: without them everything else may pass, too."""
    for model in MODELS:
        said = [event["event"] for event in events[model] if event["event"].startswith(STATIC_STEPS)]
        is_on = f"{STATIC_STEPS}on" in said
        report.equals(f"{name}: static steps of the {model}", "on" if is_on else f"its log says {said}", "on")


@dataclass(frozen=True)
class Running:
    captioner: AsyncCaptioner
    memory: Memory
    ready_s: float


@asynccontextmanager
async def running(options: StackOptions, device: torch.device, logs_folder: Path) -> AsyncIterator[Running]:
    """A stack whose memory is watched and whose logs are kept from its start, also of one that fails there."""
    stack, memory, began = Stack(options, report=say), Memory(), time.monotonic()
    logs = Logs(logs_folder)
    memory.look(stack, device)

    async def watch() -> None:
        while True:
            memory.look(stack, device)
            logs.look(stack)
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    try:
        async with stack, connect_async(stack.gateway_address) as captioner:
            yield Running(captioner, memory, time.monotonic() - began)
            memory.look(stack, device)
    finally:
        watching.cancel()
        logs.look(stack)
        logs.close()


# -- the three stacks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    options: StackOptions
    clips: Sequence[Path]
    template: CaptionOptions
    long: int
    """Tokens of a caption that a draft must have time to join."""
    device: torch.device
    logs: Path
    """Where the logs of the stack go."""

    @property
    def told_bytes(self) -> int:
        """Of both models' weights, and of what they are told that they may keep."""
        folders = Path(self.options.target_model), Path(self.options.draft_model or "")
        weights = sum(shard.stat().st_size for folder in folders for shard in folder.glob("*.safetensors"))
        return weights + (2 * KV_MB + sum(CACHE_MB.values())) * MIB

    async def caption(self, stack: Running, clip: int, **asked: Any) -> Captioned:
        options = CaptionOptions.from_mapping({"gate": False, "max_window": STRICT_WIDTH - 1, **asked})
        return await run_caption(stack.captioner, self.clips[clip], options.over(self.template))


async def serve_pair(work: Work, report: Report) -> dict[str, Any]:
    """Times of the second clip, as the first one of a stack also pays for what is done once; of a second prompt about
    it, again the second of the stack: the target has its video's states then, and the draft its embeddings; and of a
    third clip without a draft, as both models encode a clip at the same time, on one GPU.

    Of guidance the target's part is judged: all layers of the second prompt's text, behind the first of which it is
    made. What the draft waits for it has the hashing of all frames in it, at both models, and the frames' way there."""
    async with running(work.options, work.device, work.logs) as stack:
        say(f"gpu-serve: ready after {stack.ready_s:.0f} s")
        for prompt in (PROMPT, SECOND_PROMPT):
            await work.caption(stack, 0, method="slipstream", prompt=prompt)
        drafted = await work.caption(stack, 1, method="slipstream")
        again = await work.caption(stack, 1, method="slipstream", prompt=SECOND_PROMPT)
        plain = await work.caption(stack, 1, method="autoregressive")
        alone = await work.caption(stack, 2, method="autoregressive")
    timings, second = drafted.caption.timings, again.caption
    wanted = work.template.max_new_tokens
    guided_s = second.timings.target_prefill_s if second.video.reused_tokens else None
    waited_s = second.timings.draft_encode_s + second.timings.draft_guidance_s
    report.at_most("ready, s", stack.ready_s, MOST_READY_S)
    own = max(stack.memory.anonymous_bytes.values())
    report.at_most("most host memory of a service's own, bytes", own, MOST_HOST_BYTES)
    beside = None if stack.memory.device_bytes is None else stack.memory.device_bytes - work.told_bytes
    report.at_most("device memory beside weights, keys and values, bytes", beside, MOST_BESIDE_BYTES)
    report.equals("tokens of a caption", drafted.caption.num_tokens, wanted)
    report.at_most("encoding of a plain caption, s", alone.caption.timings.target_encode_s or None, MOST_ENCODE_S)
    report.shows("encoding while both models encode, s", max(timings.target_encode_s, timings.draft_encode_s))
    report.at_most("guidance of a second prompt: all of the target's layers, s", guided_s, MOST_GUIDANCE_S)
    report.shows("guidance of a second prompt: the draft's wait, hashing of frames included, s", waited_s)
    return {
        "ready_s": stack.ready_s,
        "memory": vars(stack.memory),
        "video": {"frames": drafted.caption.video.num_frames, "tokens": drafted.caption.video.video_tokens},
        "timings": vars(timings),
        "second_prompt": {"reused_tokens": second.video.reused_tokens, "timings": vars(second.timings)},
        "plain_timings": vars(alone.caption.timings),
        "plain_pass_s": plain.caption.speculation.target_pass_s,
        "draft_pass_s": drafted.caption.speculation.draft_pass_s,
        "tau": drafted.caption.speculation.tau,
        "differs_at": first_difference(drafted.token_ids, plain.token_ids),
    }


async def serve_strict(work: Work, report: Report) -> dict[str, Any]:
    flags = {**FRESH, "target": (*FRESH["target"], "--strict-width", str(STRICT_WIDTH))}
    options = replace(work.options, draft_model=work.options.target_model, extra_flags=flags)
    async with running(options, work.device, work.logs) as stack:
        drafted = await _judged(work, stack)
        plain = await work.caption(stack, 0, method="autoregressive", max_new_tokens=work.long)
    report.equals("strict text: windows were judged", drafted.caption.speculation.windows > 0, True)
    report.equals(
        "strict text: first token that is not plain's", first_difference(drafted.token_ids, plain.token_ids), None
    )
    return _drafted(drafted, stack)


async def serve_own_draft(work: Work, report: Report) -> dict[str, Any]:
    same = work.options.draft_model or ""
    options = replace(work.options, target_model=same, dtype="float32", extra_flags=FRESH)
    async with running(options, work.device, work.logs) as stack:
        drafted = await _judged(work, stack)
    found = drafted.caption.speculation
    # The limit cuts the last window: tokens behind it were judged, and are no text. A refusal makes the draft restart.
    report.equals("draft = target in fp32: refusals", found.restarts if found.judged else "nothing judged", 0)
    return _drafted(drafted, stack)


async def _judged(work: Work, stack: Running) -> Captioned:
    """A longer caption some windows of which were judged: nobody waits for a draft, and a text may be over before it
    is there."""
    for _ in range(MOST_TRIES):
        drafted = await work.caption(stack, 0, method="slipstream", pruner="none", max_new_tokens=work.long)
        if drafted.caption.speculation.judged:
            break
    return drafted


def _drafted(drafted: Captioned, stack: Running) -> dict[str, Any]:
    found = drafted.caption.speculation
    counts = {name: getattr(found, name) for name in ("judged", "accepted", "tau", "windows", "restarts")}
    return {**counts, "ready_s": stack.ready_s, "memory": vars(stack.memory)}


STACKS = {"pair": serve_pair, "strict": serve_strict, "own-draft": serve_own_draft}


# -- program ----------------------------------------------------------------------------------------------------------


async def measure(given: Namespace, report: Report, folder: Path) -> dict[str, Any]:
    ends = asyncio.get_running_loop().time() + OWN_LIMIT_S
    places, written_s = {}, {}
    for seed, (role, name) in enumerate(NAMES.items()):
        began, place = time.monotonic(), (given.folders or folder) / name
        if not place.exists():
            geometry = tiny(GEOMETRIES[name]) if given.tiny else GEOMETRIES[name]
            write_folder(geometry, place, given.device, seed=seed)
        places[role], written_s[name] = place, time.monotonic() - began
    if given.device.type == "cuda":
        torch.cuda.empty_cache()
    frames, tokens, long, sides = (8, 12, 200, TINY_SIDES) if given.tiny else (128, 64, 256, SIDES)
    clips = [folder / f"{number}.mp4" for number in range(3)]
    for number, clip in enumerate(clips):
        clip.write_bytes(make_colour_clip(number, frames, size=sides))
    threads = 1 if given.tiny else None
    options = StackOptions(places["target"], places["draft"], str(given.device), restart=False, threads=threads)
    budget = () if given.tiny else ("--kv-budget-mb", str(KV_MB))
    caches = {"target": "--prefix-cache-mb", "draft": "--embedding-cache-mb"}
    flags = {name: (*budget, flag, str(CACHE_MB[name])) for name, flag in caches.items()}
    options = replace(options, extra_flags=flags)
    template = CaptionOptions(PROMPT, num_frames=frames, max_new_tokens=tokens, guidance="scores")
    work = Work(options, clips, template, long, given.device, given.logs)
    found: dict[str, Any] = {"geometries": NAMES, "written_s": written_s}
    for name in given.only:
        say(f"gpu-serve: {name}")
        found[name] = await _serve(name, replace(work, logs=given.logs / name), report, ends)
    return found


async def _serve(name: str, work: Work, report: Report, ends: float) -> dict[str, Any]:
    """What one stack shows, or why it does not; and what its models say of their ways."""
    try:
        async with asyncio.timeout_at(ends):
            found = await STACKS[name](work, report)
    except TimeoutError:
        found = {"error": f"the time was up after {OWN_LIMIT_S:g} s"}
        report.equals(f"{name} was served", found, "in time")
    except Exception as error:  # the other stacks still tell something
        found = {"error": f"{type(error).__name__}: {error}"}
        report.equals(f"{name} was served", found, "without an error")
    events = {model: told_events(work.logs / f"{model}.log") for model in MODELS}
    if "error" not in found and work.device.type == "cuda":
        judge_static(report, name, events)
    return found | {"events": events, "logs": str(work.logs)}


def main(argv: Sequence[str]) -> None:
    parser = make_gpu_parser("gpu-serve", "Models of full size through the real stack.")
    words = "where Qwen2.5-VL-7B and Qwen2.5-VL-3B of `gpu-write` are, or go and stay; without it they go"
    parser.add_argument("--folders", type=Path, help=words)
    parser.add_argument("--logs", type=Path, default=FOLDER / "gpu-serve-logs", help="where the services' logs stay")
    parser.add_argument("--only", nargs="+", choices=list(STACKS), default=list(STACKS), metavar="STACK")
    given = parse_device(parser, argv)
    report = Report(given)
    with tempfile.TemporaryDirectory(prefix="slipstream-gpu-") as folder:
        found = run_to_end(measure(given, report, Path(folder)))
    report.finish(**found)
