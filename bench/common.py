"""What all measurements share: clips, captions as their client sees them, what processes use, budget and machine.

Progress goes to stderr by `say`. Imports no torch.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import typer

from slipstream import AsyncCaptioner, Caption, CaptionOptions, CommittedText, StageChange, Trace
from slipstream.cli.common import run_async
from slipstream.stack.local import POCKET_DIR
from tests.support.fuzzing import REPORT_VARIABLE, found_in
from training.world import FULL_SCENES, HELD_OUT_SEEDS

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
CLIP_FOLDER = ROOT / ".cache" / "bench"
SHORT_SCENES = (1, 2)
PROMPT = "Describe this video in detail."
MODELS = {"target": POCKET_DIR / "target", "draft": POCKET_DIR / "draft"}
"""What is measured unless somebody says otherwise."""
PROC = Path("/proc")
TEST_TIMEOUT_S = 3600
NO_TIME = "there was no time"
"""What a note says of something that gave way to the clock."""
MARGIN = 1.1
"""What is to come is taken to last so much longer than its like has lasted."""


def is_whole(share: str) -> bool:
    """Whether all of "3/3" is there."""
    same, total = share.split("/")
    return same == total


@dataclass(frozen=True)
class Task:
    """What to caption, and with which checkpoints."""

    video: Path
    num_frames: int
    prompt: str
    max_new_tokens: int
    target: Path
    draft: Path


@dataclass(frozen=True)
class Captioned:
    """One caption as its client saw it."""

    caption: Caption
    ready_at: tuple[int, ...] = ()
    """How many tokens there were at each moment when a draft became ready."""
    lost_at: tuple[int, ...] = ()
    """The same for drafts that were lost."""
    trace: tuple[Trace, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.caption.tokens)


@dataclass(frozen=True)
class Usage:
    """Of one process between two moments."""

    cpu_s: float
    """Seconds that its threads ran, together."""
    peak_bytes: int
    """Most resident memory since the peak was last forgotten."""
    cores: int = 1
    """That it may run on at a time."""


class Budget:
    """A limit on the whole run, counted from now: what is measured last gives way to the clock."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._limit_s = limit_s

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    def allows(self, seconds: float, *, reserved_s: float = 0.0) -> bool:
        """Something that should take `seconds` would end in time, and leave `reserved_s` for what follows."""
        return self.spent_s + MARGIN * seconds + reserved_s <= self._limit_s


async def run_caption(
    captioner: AsyncCaptioner,
    video: Path,
    options: CaptionOptions,
    on_tokens: Callable[[int, bool], None] = lambda num_tokens, has_draft: None,
) -> Captioned:
    """Uploads `video` and follows its caption to the end.

    `on_tokens` hears how many tokens there are whenever there are more, and whether a draft has joined.
    """
    num_tokens = 0
    moments: dict[str, list[int]] = {"draft_ready": [], "draft_lost": []}
    traced: list[Trace] = []
    async with captioner.events(video, options=options) as events:
        async for event in events:
            match event:
                case Trace():
                    traced.append(event)
                case StageChange():
                    moments.get(event.stage, []).append(num_tokens)
                    if event.stage == "draft_lost":
                        say(f"a draft was lost after {num_tokens} tokens: {event.detail}")
                case CommittedText():
                    num_tokens += len(event.tokens)
                    on_tokens(num_tokens, bool(moments["draft_ready"]))
    ready_at, lost_at = (tuple(counts) for counts in moments.values())
    return Captioned(events.caption, ready_at, lost_at, tuple(traced))


def first_difference(got: tuple[int, ...], expected: tuple[int, ...]) -> int | None:
    """Position of the first token that differs; None for equal texts."""
    if got == expected:
        return None
    pairs = zip(got, expected, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(got), len(expected)))


def held_out_clips(count: int, num_scenes: tuple[int, int] = FULL_SCENES) -> list[Path]:
    """`count` clips that the models were never trained on, rendered once and kept in a cache folder."""
    CLIP_FOLDER.mkdir(parents=True, exist_ok=True)
    first = HELD_OUT_SEEDS.start
    return [_rendered(seed, num_scenes) for seed in range(first, first + count)]


def _rendered(seed: int, num_scenes: tuple[int, int]) -> Path:
    least, most = num_scenes
    path = CLIP_FOLDER / f"clip-{seed}-{least}to{most}.mp4"
    if not path.exists():
        from training.data import render_clip  # and with it av, which most that is measured does without

        unfinished = path.with_suffix(".unfinished")
        render_clip(seed, unfinished, num_scenes)
        unfinished.replace(path)
    return path


def make_parser(name: str, description: str, from_0: Collection[str] = (), /, **flags: Any) -> argparse.ArgumentParser:
    """The command line of `python -m bench NAME`: a flag `--like-this` for each keyword, whose value is the default or
    (default, help). Values have the type of their default, which for a list is that of its first element; False makes
    a switch. Whole numbers are at least 1, or 0 where that is the default and for those named in `from_0`."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    for flag, given in flags.items():
        default, words = given if isinstance(given, tuple) else (given, None)
        how: dict[str, Any] = {"help": words, "default": default}
        if default is False:
            how["action"] = "store_true"
        elif isinstance(default, list):
            how |= {"nargs": "+", "type": _type_of(default[0], flag in from_0), "metavar": flag.upper()}
        else:
            how["type"] = _type_of(default, flag in from_0)
        parser.add_argument("--" + flag.replace("_", "-"), **how)
    return parser


def _type_of(default: Any, from_0: bool) -> Callable[[str], Any]:
    return at_least(0 if from_0 or not default else 1) if type(default) is int else type(default)


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number of a command line."""

    def read(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} must be at least {least}")
        return number

    read.__name__ = "int"  # as argparse calls it where the text is no number
    return read


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. A signal that ends this process ends the processes that `work` started, too."""
    try:
        return run_async(work)
    except typer.Exit as stopped:
        sys.exit(stopped.exit_code)


def run_parts(names: Iterable[str], run: Callable[[str], T]) -> dict[str, T]:
    """What each part reports, said as soon as it is there: a run that is ended in the middle was not in vain."""
    reports = dict[str, T]()
    for name in names:
        started = time.monotonic()
        reports[name] = run(name)
        say(f"{name}: {time.monotonic() - started:.0f} s: {json.dumps(reports[name])}")
    return reports


async def run_test(path: str, report: str, environ: Mapping[str, str], *flags: str) -> dict[str, Any]:
    """Runs one file of tests in a process of its own; `passed`, and what it reported under that name."""
    with tempfile.TemporaryDirectory(prefix="slipstream-test-") as folder:
        words = ("-m", "pytest", "-q", f"--timeout={TEST_TIMEOUT_S}", *flags, path)
        asked = {**os.environ, **environ, REPORT_VARIABLE: folder}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=ROOT, env=asked, stdout=sys.stderr.fileno()
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            raise
        found = found_in(folder, report)
        return {"passed": status == 0 and bool(found)} | found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cpu_s(pid: int, *, with_children: bool = False) -> float:
    """Seconds that all threads of a process have run, in user code and in the kernel, and if asked ended children."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if with_children else 13])) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """Processor seconds that all of the machine's processes have run since it started."""
    user, nice, system, _idle, _waiting, *interrupted = map(int, (PROC / "stat").read_text().split()[1:9])
    return (user + nice + system + sum(interrupted)) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """The most memory that was resident since the process began, or since `forget_peak`."""
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak(pid: int) -> None:
    """The peak is counted anew from here, where the kernel lets us; else it stays that of the whole process."""
    try:
        (PROC / str(pid) / "clear_refs").write_text("5")
    except OSError:
        return


def machine_facts() -> dict[str, Any]:
    """What the figures were measured on: processor, cores and versions."""
    info = (PROC / "cpuinfo").read_text().splitlines() if (PROC / "cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "grpcio")},
    }
