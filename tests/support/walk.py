"""Counts the product files that one caption crosses: `python -m tests.support.walk` starts a real stack and traces it.

A file is on a walk when a line of one of its functions runs then, in any process of the services or of the command;
a generated `__init__` of a dataclass counts for the file of its class. Module level code does not count, nor do
generated `_pb2` files, nor what goes on in a stack anyway (tasks that began before the request, such as health polls).

Only the command line is used, so that any checkout can be measured whatever its modules are called.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
STARTING, CAPTION, ROUND, JOB = range(4)
"""Phases, as the tracer knows them."""
CLIP_SEED, WARM_UP_SEED = 90_001, 90_002
TEXTS_BEFORE, TEXTS_IN_ROUND, TEXTS_AFTER = 4, 3, 4
"""Pieces of text that come out before, in and at least after the part of a caption that is called one round."""
IDLE_SHARE = 0.25
"""A stack is idle when its processes, waiting included, use less of one core than that."""
IDLE_POLL_S = 0.5
START_S, COMMAND_S, STOP_S = 240.0, 240.0, 20.0


@dataclass(frozen=True)
class Walk:
    """Product files, relative to the checkout and sorted."""

    caption: tuple[str, ...]
    """One caption, from the start of the command to its end, at a running gateway."""
    round: tuple[str, ...]
    """Of these what the services cross from one verdict to the next in mid-caption."""
    archive_extra: tuple[str, ...]
    """What handing in, captioning and exporting one item cross besides."""
    imported: tuple[str, ...]
    """All that the processes of these captions and the job load, called or not."""
    background: tuple[str, ...]
    """What runs in an idle stack; not on any walk for that."""

    @property
    def counts(self) -> dict[str, int]:
        """How many files each list has."""
        return {name: len(files) for name, files in asdict(self).items()}


@dataclass(frozen=True)
class Note:
    """One line of a record."""

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

    def notes(self, without: Sequence[int] = ()) -> list[Note]:
        """What all processes noted, except those of these ids."""
        skipped = {f"{pid}.record" for pid in without}
        records = [path for path in sorted(self.folder.glob("*.record")) if path.name not in skipped]
        return [note for path in records for note in self._read(path)]

    def _read(self, path: Path) -> Iterator[Note]:
        _, *lines = path.read_bytes().rstrip(b"\0").decode().splitlines()
        for line in lines:
            phase, kind, name = line.split("\t")
            file = Path(name).resolve().relative_to(self._tree)  # one folder may be reached by two names
            if not file.name.endswith(GENERATED):
                yield Note(int(phase), kind, str(file))

    def _cpu_s(self) -> float:
        pids = [path.stem for path in self.folder.glob("*.record")]
        return sum(_cpu_s(pid) for pid in pids)

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_S)


def measure(tree: Path = TREE) -> Walk:
    """Traces a caption and an archive job of this checkout with its pocket pair. Takes half a minute."""
    with TemporaryDirectory(prefix="walk-") as name:
        folder = Path(name)
        clips = {seed: folder / "videos" / f"{seed}.mp4" for seed in (CLIP_SEED, WARM_UP_SEED)}
        for seed, path in clips.items():
            path.parent.mkdir(exist_ok=True)
            render_clip(seed, path)
        caption = _trace_caption(tree, folder, clips)
        job = _trace_job(tree, folder, clips)
    return _count(*caption, job)


def _trace_caption(tree: Path, folder: Path, clips: dict[int, Path]) -> tuple[list[Note], list[Note]]:
    """Notes of the services and of one `caption` command."""
    traced = _new(tree, folder / "caption")
    with traced.stack("--no-archive") as address:
        traced.finish(traced.start("caption", clips[WARM_UP_SEED], "--gateway", address, "--max-new-tokens", 8))
        commands = _command_pids(traced)
        traced.wait_idle()
        traced.enter(CAPTION)
        process = traced.start("caption", clips[CLIP_SEED], "--gateway", address, "--max-new-tokens", 320)
        _follow(traced, process)
        traced.finish(process)
        traced.enter(STARTING)
    services = traced.notes(without=[*commands, process.pid])
    return services, [note for note in traced.notes(without=commands) if note not in services]


def _new(tree: Path, folder: Path) -> TracedTree:
    folder.mkdir()
    return TracedTree(tree, folder)


def _command_pids(traced: TracedTree) -> list[int]:
    """Of the commands so far: `up`, which is not asked anything by a caption, and the one that warmed the stack up."""
    records = traced.folder.glob("*.record")
    return [int(path.stem) for path in records if COMMAND.encode() in path.read_bytes().split(b"\n")[0].split(b"\t")]


def _follow(traced: TracedTree, process: subprocess.Popen[bytes]) -> None:
    """Reads the text as it comes, and lets some of it be a phase of its own."""
    assert process.stdout is not None
    texts = 0
    while os.read(process.stdout.fileno(), 65_536):
        texts += 1
        if texts == TEXTS_BEFORE:
            traced.enter(ROUND)
        elif texts == TEXTS_BEFORE + TEXTS_IN_ROUND:
            traced.enter(CAPTION)
    assert texts >= TEXTS_BEFORE + TEXTS_IN_ROUND + TEXTS_AFTER, f"{texts} pieces of text: {traced.errors()}"


def _trace_job(tree: Path, folder: Path, clips: dict[int, Path]) -> list[Note]:
    """Notes of the services and of one `archive submit` command that waits and writes the result."""
    traced, videos = _new(tree, folder / "job"), folder / "videos"
    with traced.stack("--archive", "--data", folder / "job" / "data", "--video-root", videos) as address:
        traced.finish(traced.start("caption", clips[WARM_UP_SEED], "--gateway", address, "--max-new-tokens", 8))
        commands = _command_pids(traced)
        traced.wait_idle()
        traced.enter(JOB)
        output = folder / "job" / "out.jsonl"
        words = ("archive", "submit", clips[CLIP_SEED], "--gateway", address, "--output", output)
        traced.finish(traced.start(*words, "--max-new-tokens", 64))
        traced.enter(STARTING)
        assert json.loads(output.read_text())["text"], output.read_text()
    return traced.notes(without=commands)


def _count(services: list[Note], command: list[Note], job: list[Note]) -> Walk:
    """A worker that waits for jobs is older than the job, so of the archive's old tasks only the polls are left out."""
    caption = _files(services + command, "call", CAPTION, ROUND)
    background = _files(services, "background", CAPTION, ROUND) - caption
    job_files = _files(job, "call", JOB) | _files(job, "background", JOB)
    return Walk(
        caption=tuple(sorted(caption)),
        round=tuple(sorted(_files(services, "call", ROUND))),
        archive_extra=tuple(sorted(job_files - caption - background)),
        imported=tuple(sorted({note.file for note in services + command + job if note.kind == "import"})),
        background=tuple(sorted(background)),
    )


def _files(notes: Sequence[Note], kind: str, *phases: int) -> set[str]:
    return {note.file for note in notes if note.kind == kind and note.phase in phases}


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
