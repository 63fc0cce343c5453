"""What a check on a GPU ends with: figures beside what passes; and `python -m bench gpu-check`: all checks in order.

A figure of speed or memory is judged on a GPU at full size alone. In a tiny run on a CPU, which shows that every line
runs, its `ok` is null: it means nothing there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from bench.common import NO_TIME, ROOT, machine_facts, make_parser, say
from bench.output import finish, kept_document
from bench.tables import print_rows
from slipstream.errors import ModelNotUsable

RANDOM = "Weights are random: times and memory are those of the real geometries; texts and acceptance are nobody's."
TINY = "TINY sizes: this run shows that everything runs, its figures mean nothing."
LIMIT_S = 600
"""For one command."""
OWN_LIMIT_S = 540.0
"""After so long a command ends measuring by itself: what it has by then is kept, judged and written."""
NO_CUDA = "there is no CUDA device here; `--device cpu --tiny` shows that the code runs"


# -- time -------------------------------------------------------------------------------------------------------------


class TimeUp(BaseException):
    """A command's own limit. No error of what is measured, which is caught in its place."""


@dataclass
class Bound:
    """Of what is measured."""

    was_reached: bool = False


@contextmanager
def bounded(limit_s: float | None = None) -> Iterator[Bound]:
    """Ends what is inside after so long (`OWN_LIMIT_S`), wherever it is by then; what follows goes on. For measuring
    that keeps its results as they come, on the main thread and without an event loop."""
    bound = Bound()

    def end(*_: object) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, OWN_LIMIT_S if limit_s is None else limit_s)
        yield bound
    except TimeUp:
        bound.was_reached = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- one check --------------------------------------------------------------------------------------------------------


class Report:
    """The rows of one command. `ok` of a row: true, false, or null where this run cannot judge it."""

    def __init__(self, given: Namespace) -> None:
        self._given = given
        self.rows: list[dict[str, Any]] = []

    @property
    def ok(self) -> bool:
        return all(row["ok"] is not False for row in self.rows)

    def at_most(self, name: str, value: Any, most: float) -> None:
        """A figure of speed or memory; None or an {"error": ...} for one that could not be had."""
        is_there = isinstance(value, int | float)
        judged = self._given.device.type == "cuda" and not self._given.tiny
        self._add(name, value, f"<= {most:g}", (is_there and value <= most) if judged else None)

    def equals(self, name: str, value: Any, wanted: object) -> None:
        """Something that is right or wrong at every size."""
        self._add(name, value, f"= {wanted}", value == wanted)

    def shows(self, name: str, value: Any) -> None:
        """A figure that nothing is asked of."""
        self._add(name, value, "shown", None)

    def in_time(self, bound: Bound) -> None:
        """A row where not all was measured."""
        if bound.was_reached:
            self.equals("measured", f"what went into {OWN_LIMIT_S:g} s", "all")

    def _add(self, name: str, value: Any, bound: str, ok: bool | None) -> None:
        shown = value.get("error", "failed") if isinstance(value, Mapping) else value
        self.rows.append({"check": name, "value": shown, "passes": bound, "ok": ok})

    def finish(self, series: Sequence[str] = (), labels: Sequence[str] = (RANDOM,), **facts: Any) -> None:
        """Prints the rows and the document, and exits with 1 where one is not ok."""
        given = self._given
        document = {
            "ok": self.ok,
            "checks": self.rows,
            "labels": [*labels, *([TINY] if given.tiny else [])],
            "device": str(given.device),
            "device_name": name_of(given.device),
            "tiny": given.tiny,
            **facts,
            "machine": machine_facts(),
        }
        print_rows(given.program, [{**row, "ok": _word(row["ok"])} for row in self.rows])
        finish(given.program, document, series)
        if not self.ok:
            sys.exit(1)


def name_of(device: torch.device) -> str:
    """As documents say it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _word(ok: bool | None) -> str:
    return {True: "yes", False: "NO", None: "not judged"}[ok]


def make_gpu_parser(program: str, words: str | None, **flags: Any) -> ArgumentParser:
    """`make_parser` with what all programs for a GPU take."""
    where = ("cuda", "cuda, cuda:1, or cpu together with --tiny")
    parser = make_parser(program, words or "", device=where, tiny=(False, "to see that everything runs"), **flags)
    parser.set_defaults(program=program)
    return parser


def parse_device(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """The command line, with a device that is there; this thread works on it, as the engine does."""
    given = parser.parse_args(argv)
    given.device = torch.device(given.device)
    if given.device.type != "cuda":
        if not given.tiny:
            parser.error("full-size models need a GPU; on a CPU add --tiny")
        torch.set_num_threads(1)
        return given
    if not torch.cuda.is_available():
        parser.error(NO_CUDA)
    from slipstream.engine.loading import open_device  # seconds of imports, which `gpu-check` itself does without

    try:
        given.device = open_device(str(given.device))
    except ModelNotUsable as error:
        parser.error(str(error))
    return given


# -- all of them ------------------------------------------------------------------------------------------------------

_TABLES, _LOGS = "{folder}/tables", "{folder}/logs"
_METHODS = ("autoregressive", "sd", "parallelvlm", "slipstream", "slipstream_tree")
COMMANDS: Mapping[str, Sequence[str]] = {
    "gpu-serve": ("--logs", _LOGS),
    "gpu-graph": (),
    "gpu-kernels": (),
    "gpu-vision": (),
    "gpu-fault": (),
    "gpu": ("--video-tokens", "25000", "--repeats", "10", "--tables", _TABLES),
    "methods": ("--dtype", "float32", "--clips", "1", "--frames", "64", "--minutes", "9", "--methods", *_METHODS),
    "replay": ("--clips", "1", "--tokens", "48", "--tables", _TABLES),
}
"""In the order of what is to be shown; `gpu` makes the tables that the last one replays, which needs no GPU."""
TINY_OPTIONS: Mapping[str, Sequence[str]] = {
    "gpu-serve": ("--tiny", "--logs", _LOGS),
    "gpu": ("--tiny", "--video-tokens", "64", "--repeats", "1", "--dtype", "float32", "--tables", _TABLES),
    "methods": ("--clips", "1", "--frames", "8", "--max-new-tokens", "8", "--methods", "autoregressive", "slipstream"),
    "replay": ("--clips", "1", "--tokens", "8", "--frames", "8", "--tables", _TABLES),
}


def run_all(
    names: Sequence[str], device: str, folder: Path, *, tiny: bool, device_name: str = ""
) -> list[dict[str, Any]]:
    """A row a command; each one's document goes to `folder`. A command that fails, or takes too long, ends no other."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        options = TINY_OPTIONS.get(name, ("--tiny",)) if tiny else COMMANDS[name]
        where, told = ((), {}) if name == "replay" else (("--device", device), {"device_name": device_name})
        argv = [sys.executable, "-m", "bench", name, *where, *(word.format(folder=folder) for word in options)]
        say(f"gpu-check: {' '.join(argv[1:])}")
        rows.append({"command": name, **run_one(argv, folder / f"{name}.json", tiny=tiny, told=told)})
        say(f"gpu-check: {rows[-1]}")
    return rows


def run_one(
    argv: Sequence[str], kept: Path, *, tiny: bool = False, told: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """How a command ended. What it prints goes to a file beside `kept` as it is printed, also that of a command which
    is killed; its document goes to `kept`, with what is `told` where it does not say that itself."""
    began, printed = time.monotonic(), kept.with_suffix(".txt")
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    try:
        with printed.open("w") as output:
            status = subprocess.run(argv, cwd=ROOT, stdout=output, env=environ, timeout=LIMIT_S, check=False).returncode
        failed = _read_document(printed, kept, told, status, tiny=tiny)
    except subprocess.TimeoutExpired:
        failed = f"it took longer than {LIMIT_S} s"
    return {"ok": not failed, "failed": failed, "minutes": round((time.monotonic() - began) / 60, 1)}


def _read_document(printed: Path, kept: Path, told: Mapping[str, Any], status: int, *, tiny: bool) -> str:
    """What is not as it should be; empty where all is."""
    try:
        document = {**told, **kept_document(printed)}
        kept.write_text(json.dumps(document) + "\n")
        failed = "; ".join(failures(document, tiny=tiny))
    except (LookupError, TypeError, ValueError, OSError):
        return f"it ended with exit status {status} and without a document"
    return failed or (f"it ended with exit status {status}" if status else "")


def failures(document: Mapping[str, Any], *, tiny: bool = False) -> list[str]:
    """What a document says is not as it should be; of a tiny run without its speed."""
    rows = [*document.get("methods", ()), *(row for table in document.get("tables", ()) for row in table["methods"])]
    texts = [row.get("name") or row["method"] for row in rows if _is_changed(row)]
    errors = [model["name"] for model in document.get("models", ()) if '"error"' in json.dumps(model["sizes"])]
    return [
        *(row["check"] for row in document.get("checks", ()) if row["ok"] is False),
        *(["the time was up before all was measured"] if document.get("unfinished") else []),
        *(note for note in document.get("notes", ()) if NO_TIME in note),
        *(f"{name}: text is not plain's" for name in texts),
        *(f"{row['method']}: later than its table" for row in rows if row.get("late") and not tiny),
        *(f"{name}: something has an error in its place" for name in errors),
    ]


def _is_changed(row: Mapping[str, Any]) -> bool:
    """Whether a method that promises plain decoding's text has written another one. transformers promises nothing."""
    return not row.get("lossy") and row.get("family") != "outside" and row.get("identical") not in (None, 1.0)


def main(argv: Sequence[str]) -> None:
    folder = (ROOT / ".cache" / "bench" / "gpu", "where documents and tables go")
    parser = make_gpu_parser("gpu-check", "All checks for one GPU, in order.", folder=folder)
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), default=list(COMMANDS), metavar="NAME")
    given = parse_device(parser, argv)
    device_name = name_of(given.device)
    rows = run_all(given.only, str(given.device), given.folder, tiny=given.tiny, device_name=device_name)
    print_rows("gpu-check", [{**row, "ok": _word(row["ok"]), "failed": None} for row in rows])
    print("\n".join(f"{row['command']}: {row['failed']}" for row in rows if row["failed"]))
    ok = all(row["ok"] for row in rows)
    finish("gpu-check", {"ok": ok, "commands": rows, "tiny": given.tiny, "folder": str(given.folder)})
    sys.exit(0 if ok else 1)
