"""Counts the product files that one caption crosses: `python -m tests.support.walk` starts a real stack and traces it.

A file is on a walk when a line of one of its functions runs then, in any process of the services or of the command;
a generated `__init__` of a dataclass counts for the file of its class. Module level code does not count, nor do
generated `_pb2` files, nor what a stack does without being asked (tasks older than the request, such as health polls).

Only the command line is used, so that any checkout can be measured whatever its modules are called.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from training.data import render_clip

TREE = Path(__file__).resolve().parents[2]
TRACER = Path(__file__).parent / "walk_tracer"
COMMAND = "slipstream.cli"
PRODUCT = ("slipstream", "services")
GENERATED = ("_pb2.py", "_pb2_grpc.py")
SERVICES = ("target", "draft", "gateway")
"""The last words of the modules that are the services."""
STARTING, JOB, CAPTION, LAST_TEXT, RESTING = 0, 1, 2, 250, 251
"""Phases, one byte: each piece of text of the caption begins another one, from CAPTION up to LAST_TEXT."""
REST_S = 6.0
"""A front looks after its batches every five seconds."""
CLIP_SEED, WARM_UP_SEED = 90_001, 90_002
CAPTION_FLAGS = ("--frames", 32, "--max-new-tokens", 240)
JOB_FLAGS = ("--frames", 8, "--max-new-tokens", 64)
WARM_UP_FLAGS = ("--frames", 8, "--max-new-tokens", 8)
IDLE_SHARE, IDLE_POLL_S = 0.25, 0.5
"""A stack is idle when all its processes together use less of one core than that for so long."""
START_S, COMMAND_S, STOP_S = 240.0, 240.0, 60.0


@dataclass(frozen=True)
class Walk:
    """Product files, relative to the checkout and sorted."""

    caption: tuple[str, ...]
    """One caption, from the start of the command to its end, at a running gateway."""
    round: tuple[str, ...]
    """What the services cross between two pieces of text in mid-caption: a draft's window and the verdict on it."""
    archive_extra: tuple[str, ...]
    """What handing in, captioning and exporting one item cross besides."""
    imported: tuple[str, ...]
    """All that these processes load, called or not."""
    unasked: tuple[str, ...]
    """What an idle stack calls; not on any walk for that."""

    @property
    def counts(self) -> dict[str, int]:
        """How many files each list has."""
        return {name: len(files) for name, files in asdict(self).items()}


@dataclass(frozen=True)
class Note:
    """One line of a record; `module` is what the process was started with."""

    module: str
    phase: int
    kind: str
    file: str


class TracedTree:
    """Runs commands of one checkout with the tracer loaded, and reads what it noted. The folder must be empty."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        self._tree = tree.resolve()
        self._phase = folder / "phase"
        self._phase.write_bytes(bytes([STARTING]))
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}
        self._env |= {
            "PYTHONPATH": os.pathsep.join([str(TRACER), str(self._tree)]),
            "WALK_FOLDER": str(folder),
            "WALK_ROOTS": os.pathsep.join(f"{self._tree / name}{os.sep}" for name in PRODUCT),
        }

    def enter(self, phase: int) -> None:
        """All processes note under this phase from now on."""
        with self._phase.open("r+b") as shared:
            shared.write(bytes([phase]))

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        """One command; its stdout is a pipe, its stderr goes to `errors.log`."""
        argv = [sys.executable, "-m", COMMAND, *map(str, words)]
        with (self.folder / "errors.log").open("ab") as errors:
            return subprocess.Popen(
                argv, cwd=self._tree, env=self._env, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )

    @contextmanager
    def stack(self, *flags: object) -> Iterator[str]:
        """A running stack of the pocket pair; gives the gateway's address."""
        process = self.start("up", "--threads", 1, *flags)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().partition("gateway:")[2].strip()
            assert address, f"no stack: {self.errors()}"
            yield address
            self._stop(process)
        finally:
            if process.poll() is None:
                process.kill()  # the services notice that their parent is gone
                process.wait()

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for a command, which must succeed."""
        process.communicate(timeout=COMMAND_S)
        assert process.returncode == 0, self.errors()

    def wait_idle(self) -> None:
        """Returns when the processes have nothing to do any more: decoders, for one, prepare themselves."""
        deadline, before = time.monotonic() + START_S, self._cpu_s()
        while time.monotonic() < deadline:
            time.sleep(IDLE_POLL_S)
            now = self._cpu_s()
            if now - before < IDLE_SHARE * IDLE_POLL_S:
                return
            before = now
        raise AssertionError("the stack does not come to rest")

    def errors(self) -> str:
        """The end of what the commands wrote to stderr."""
        return (self.folder / "errors.log").read_text(errors="replace")[-2000:]

    def notes(self, without: Sequence[str] = ()) -> list[Note]:
        """What all processes noted, except those whose records have these names."""
        return [note for name in self.records() if name not in without for note in self._read(self.folder / name)]

    def records(self) -> list[str]:
        """Names of the records of all processes so far."""
        return sorted(path.name for path in self.folder.glob("*.record"))

    def module(self, record: str) -> str:
        """What follows `-m` on the command line of the process; empty if nothing does."""
        words = (self.folder / record).read_bytes().split(b"\n")[0].decode().split("\t")
        return words[words.index("-m") + 1] if "-m" in words else ""

    def _read(self, path: Path) -> Iterator[Note]:
        _, *lines = path.read_bytes().rstrip(b"\0").decode().splitlines()
        module = self.module(path.name)
        for line in lines:
            phase, kind, name = line.split("\t")
            file = Path(name).resolve().relative_to(self._tree)  # one folder may be reached by two names
            if not file.name.endswith(GENERATED):
                yield Note(module, int(phase), kind, str(file))

    def _cpu_s(self) -> float:
        return sum(_cpu_s(record.partition(".")[0]) for record in self.records())

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_S)


def measure(tree: Path = TREE) -> Walk:
    """Traces a caption and an archive job of this checkout with its pocket pair. Half a minute on two idle cores."""
    with TemporaryDirectory(prefix="walk-") as name:
        folder = Path(name)
        clip, other = folder / "clip.mp4", folder / "other.mp4"
        render_clip(CLIP_SEED, clip)
        render_clip(WARM_UP_SEED, other)
        (folder / "records").mkdir()
        traced = TracedTree(tree, folder / "records")
        with traced.stack("--archive", "--data", folder / "data", "--video-root", folder) as address:
            traced.finish(traced.start("caption", other, "--gateway", address, *WARM_UP_FLAGS))
            traced.wait_idle()
            traced.enter(RESTING)
            time.sleep(REST_S)
            unasked = [record for record in traced.records() if traced.module(record) == COMMAND]
            _caption(traced, clip, address)
            _run_job(traced, other, address, folder / "out.jsonl")
        return count(traced.notes(without=unasked))


def _caption(traced: TracedTree, clip: Path, address: str) -> None:
    """One `caption` command, whose text is read as it comes."""
    phase = CAPTION
    traced.enter(phase)
    process = traced.start("caption", clip, "--gateway", address, *CAPTION_FLAGS)
    assert process.stdout is not None
    while os.read(process.stdout.fileno(), 65_536):
        phase = min(phase + 1, LAST_TEXT)
        traced.enter(phase)
    traced.finish(process)
    traced.enter(STARTING)


def _run_job(traced: TracedTree, clip: Path, address: str, output: Path) -> None:
    """One `archive submit` command that waits and writes the result."""
    traced.enter(JOB)
    traced.finish(traced.start("archive", "submit", clip, "--gateway", address, "--output", output, *JOB_FLAGS))
    traced.enter(STARTING)
    assert json.loads(output.read_text())["text"], output.read_text()


def count(notes: Sequence[Note]) -> Walk:
    """Sorts out what processes noted. Raises AssertionError when no round of the caption had a draft's window."""
    caption = _files(notes, lambda note: note.kind == "call" and CAPTION <= note.phase <= LAST_TEXT)
    unasked = _files(notes, lambda note: note.kind == "background" and note.phase != JOB)
    job = _files(notes, lambda note: note.kind == "call" and note.phase == JOB)
    job |= _files(notes, lambda note: note.kind == "background" and note.phase == JOB) - unasked
    return Walk(
        caption=tuple(sorted(caption)),
        round=tuple(sorted(_usual_round(notes))),
        archive_extra=tuple(sorted(job - caption)),
        imported=tuple(sorted(_files(notes, lambda note: note.kind == "import"))),
        unasked=tuple(sorted(unasked)),
    )


def _usual_round(notes: Sequence[Note]) -> frozenset[str]:
    """The most frequent set of files between two pieces of text, of those times when all three services worked."""
    calls = [note for note in notes if note.kind == "call" and note.module.rpartition(".")[2] in SERVICES]
    rounds: Counter[frozenset[str]] = Counter()
    for phase in range(CAPTION + 1, LAST_TEXT):
        if len({note.module for note in calls if note.phase == phase}) == len(SERVICES):
            rounds[frozenset(note.file for note in calls if note.phase == phase)] += 1
    assert rounds, "no round had a draft's window"
    return max(rounds, key=lambda files: (rounds[files], len(files)))


def _files(notes: Sequence[Note], wanted: Callable[[Note], bool]) -> set[str]:
    return {note.file for note in notes if wanted(note)}


def _cpu_s(pid: str) -> float:
    """Processor time of a process so far; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    user, system = map(int, fields[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the lists, then the counts as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.walk", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tree", type=Path, default=TREE, help="checkout to measure")
    walk = measure(parser.parse_args(argv).tree)
    for name, files in asdict(walk).items():
        print(f"{name}: {len(files)}", *files, "", sep="\n  ")  # noqa: T201 (this is its output)
    print(json.dumps(walk.counts))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
