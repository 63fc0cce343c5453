"""Python loads this at the start of every process of a traced stack: it notes which product files are imported and run.

A note is a line `phase kind file`. Kinds: `import`, when a module's own code runs; `call`, when a line of one of its
functions runs; `background`, a call inside an asyncio task that is older than phase 0's end, such as a health poll.
The phase is one byte that all processes share; whoever measures changes it. The notes lie in a mapped file, because a
decoder may not write to files once it is confined, and because a killed process could write nothing at its end.
"""

import builtins
import mmap
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "WALK_FOLDER"
"""Variable: where the records and the phase lie. Without it nothing is traced."""
ROOTS = "WALK_ROOTS"
"""Variable: the folders that hold product code, separated as in PATH."""
STARTING = 0
RECORD_BYTES = 1 << 18
_IMPORTER = "<frozen importlib._bootstrap>"
_GENERATED = "<string>"
"""File name in code that dataclasses generate. It runs with the globals of the class's module."""


class Tracer:
    """Notes each file once a phase and kind."""

    def __init__(self, folder: Path, roots: tuple[str, ...]) -> None:
        self._phase = _map(folder / "phase", 1)
        self._record = _map(folder / f"{os.getpid()}.record", RECORD_BYTES)
        self._roots = roots
        self._foreign = {__file__}
        self._noted: set[tuple[int, str, str]] = set()
        self._old_tasks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._end = 0
        self._lock = threading.Lock()
        self._write("\t".join(sys.orig_argv) + "\n")

    def on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        """The trace function of every thread. It is called for every Python call, so foreign code leaves it first."""
        name = frame.f_code.co_filename
        if name in self._foreign:
            return None
        phase, file = self._phase[0], _source(frame)
        if (phase, "call", file) in self._noted:
            return None
        if not file.startswith(self._roots):
            if name != _GENERATED:
                self._foreign.add(name)
            return None
        if frame.f_code.co_name == "<module>":
            self._note(phase, "import", file)
        elif phase == STARTING:
            self._is_background(phase)
        elif not _is_importing(frame):
            return self.on_line
        return None

    def on_line(self, frame: FrameType, event: str, arg: object) -> Any:
        """A coroutine that only waits for another one is entered as often as that one, but runs no line of its own."""
        if event == "line":
            phase = self._phase[0]
            self._note(phase, "background" if self._is_background(phase) else "call", _source(frame))
            frame.f_trace = None
            return None
        return self.on_line

    def _is_background(self, phase: int) -> bool:
        try:
            task = sys.modules["asyncio.tasks"].current_task()
        except (KeyError, AttributeError, RuntimeError):  # no event loop in this process (yet), or in this thread
            return False
        if task is not None and phase == STARTING:
            self._old_tasks.add(task)
        return task in self._old_tasks if task is not None else False

    def _note(self, phase: int, kind: str, file: str) -> None:
        if (phase, kind, file) not in self._noted:
            self._noted.add((phase, kind, file))
            self._write(f"{phase}\t{kind}\t{file}\n")

    def _write(self, line: str) -> None:
        content = line.encode()
        with self._lock:
            start, self._end = self._end, self._end + len(content)
        self._record[start : start + len(content)] = content


def _source(frame: FrameType) -> str:
    name = frame.f_code.co_filename
    return str(frame.f_globals.get("__file__", name)) if name == _GENERATED else name


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTER:
            return True
        frame = frame.f_back
    return False


def _map(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _trace_children_too() -> None:
    """Children that get an environment of their own, as decoders do, are traced as well."""
    start: Any = subprocess.Popen.__init__
    own = {name: os.environ[name] for name in (FOLDER, ROOTS)}
    here = str(Path(__file__).parent)

    def start_traced(self: Any, *args: Any, env: Any = None, **kwargs: Any) -> None:
        if env is not None:
            others = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != here]
            env = {**env, **own, "PYTHONPATH": os.pathsep.join([here, *others])}
        start(self, *args, env=env, **kwargs)

    setattr(subprocess.Popen, "__init__", start_traced)  # noqa: B010 (its overloads are of no interest here)


def _do_not_trace_foreign_imports() -> None:
    """Loading torch takes minutes of processor time when it is traced, and runs no product code."""
    load = builtins.__import__
    product = {Path(root).name for root in os.environ[ROOTS].split(os.pathsep)}

    def load_fast(name: str, *args: Any, **kwargs: Any) -> Any:
        trace = sys.gettrace()
        if trace is None or not name or name.partition(".")[0] in product:
            return load(name, *args, **kwargs)
        sys.settrace(None)
        try:
            return load(name, *args, **kwargs)
        finally:
            sys.settrace(trace)

    builtins.__import__ = load_fast


if FOLDER in os.environ:
    _trace_children_too()
    _do_not_trace_foreign_imports()
    tracer = Tracer(Path(os.environ[FOLDER]), tuple(os.environ[ROOTS].split(os.pathsep)))
    threading.settrace(tracer.on_call)
    sys.settrace(tracer.on_call)
