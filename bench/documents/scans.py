"""Real scans and manuals through `slipstream read`: what becomes of each file, and pages an hour by documents at once.

Every file is read by the OCR alone and by a target with the OCR's hints; then some that can be read are read again by 1
to 4 documents at once, and by plain decoding, with which all texts are compared. docs/benchmarks.md says where files
come from.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import ROOT, TEST_TIMEOUT_S, is_whole, say
from bench.documents.reading import MAX_TOKENS, PLAIN, what_is_missing
from slipstream.archive.messages import DOCUMENT_EXTENSIONS
from slipstream.stack.local import FRESH, Stack, StackOptions

PAGES = "1"
"""Of each file: all of a manual would take hours here."""
SESSIONS = (1, 2, 3, 4)
MOST = SESSIONS[-1]
FLAGS = FRESH | {
    "gateway": ("--documents-at-once", str(MOST), *FRESH.get("gateway", ())),
    "reader": ("--max-documents", str(MOST), "--owner-share", "1"),
}
KNOWN_STATUS = range(120)
"""Of the command; above it are signals."""


@dataclass(frozen=True)
class CommandRun:
    """What one run of the command left."""

    seconds: float
    status: int
    texts: Mapping[str, tuple[str, ...]]
    """The pages of each file that was read; by an OCR alone without text."""
    said: Mapping[str, str]
    """Of the files that were refused."""
    is_broken: bool
    """A file is neither read nor refused, or something was raised that the command does not know."""

    @property
    def num_pages(self) -> int:
        return sum(map(len, self.texts.values()))


async def measure_scans(folder: str, model: Path, num_timed: int) -> dict[str, Any]:
    """All files of the folder; `num_timed` of those that can be read are timed."""
    if why := what_is_missing(model) or _why_no_folder(folder):
        return {"shown": False, "why": why}
    options = StackOptions(target_model=model, draft_model=None, reader=True, threads=1, extra_flags=FLAGS)
    with tempfile.TemporaryDirectory(prefix="slipstream-scans-") as made:
        files = _links(Path(folder), Path(made))
        by_ocr = await _read(files, "--ocr-only", jobs=2)
        say(f"scans, by the OCR alone: {len(by_ocr.texts)} of {len(files)} read in {by_ocr.seconds:.0f} s")
        say(f"scans, refused: {by_ocr.said}")
        async with Stack(options) as stack:
            here = ("--gateway", stack.gateway_address, "--surface", "lines", "--max-new-tokens", str(MAX_TOKENS))
            by_target = await _read(files, *here, jobs=MOST)
            say(f"scans, by the target: {len(by_target.texts)} of {len(files)} read in {by_target.seconds:.0f} s")
            say(f"scans, refused: {by_target.said}")
            readable = [path for path in files if path.stem in by_target.texts]
            timed = readable[:: max(len(readable) // num_timed, 1)][:num_timed]
            plain = await _read(timed, *here, "--method", PLAIN, jobs=1)
            runs = {jobs: await _read(timed, *here, jobs=jobs) for jobs in SESSIONS}
        rows = [_row(PLAIN, 1, plain, plain), *(_row("hints", jobs, run, plain) for jobs, run in runs.items())]
    return {
        "shown": True,
        "model": str(model),
        "files": len(files),
        "read_by_ocr": len(by_ocr.texts),
        "read_by_target": len(by_target.texts),
        "refused": {name: by_target.said.get(name, "") for name in sorted({*by_target.said, *by_ocr.said})},
        "broken_runs": sum(run.is_broken for run in (by_ocr, by_target, plain, *runs.values())),
        "rows": rows,
    }


def are_scans_kept(found: Mapping[str, Any]) -> bool:
    """Nothing crashed, and texts are plain decoding's. Without files nothing was shown, and nothing is broken."""
    return not found["shown"] or (not found["broken_runs"] and all(is_whole(row["identical"]) for row in found["rows"]))


def _why_no_folder(folder: str) -> str:
    if folder and any(path.suffix.lower() in DOCUMENT_EXTENSIONS for path in Path(folder).iterdir()):
        return ""
    kinds = ", ".join(DOCUMENT_EXTENSIONS)
    return f"--folder names no folder with {kinds} files: docs/benchmarks.md says where to get some"


def _links(folder: Path, made: Path) -> list[Path]:
    """The documents by names that differ before their suffix, as the command wants them."""
    links = []
    found = (path for path in sorted(folder.iterdir()) if path.suffix.lower() in DOCUMENT_EXTENSIONS)
    for number, path in enumerate(found):
        links.append(made / f"{number:03}-{path.stem}{path.suffix}")
        links[-1].symlink_to(path.resolve())
    return links


async def _read(files: Sequence[Path], *flags: str, jobs: int) -> CommandRun:
    """Runs the command over the files in a process of its own."""
    return await asyncio.to_thread(_run_command, files, ("--jobs", str(jobs), *flags))


def _run_command(files: Sequence[Path], flags: Sequence[str]) -> CommandRun:
    with tempfile.TemporaryDirectory(prefix="slipstream-read-") as output:
        words = ("-m", "slipstream.cli", "read", *map(str, files), "--output", output, "--pages", PAGES)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *words, *flags],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=TEST_TIMEOUT_S,
            check=False,
        )
        seconds = time.perf_counter() - began
        texts = {path.stem: _pages_of(path) for path in Path(output).glob("*.jsonl")}
    lines = done.stderr.splitlines()
    said = {path.stem: told for path in files if path.stem not in texts and (told := _said_of(path, lines))}
    is_broken = len(texts) + len(said) < len(files) or "Traceback" in done.stderr or done.returncode not in KNOWN_STATUS
    if is_broken:
        say(f"scans: the command ended with {done.returncode} and said {done.stderr[-2000:]}")
    return CommandRun(seconds, done.returncode, texts, said, is_broken)


def _pages_of(records: Path) -> tuple[str, ...]:
    return tuple(json.loads(line).get("text", "") for line in records.read_text().splitlines())


def _said_of(path: Path, lines: Sequence[str]) -> str:
    return next((line.partition(path.name)[2].strip(": ") for line in lines if path.name in line), "")


def _row(method: str, jobs: int, run: CommandRun, plain: CommandRun) -> dict[str, Any]:
    same = sum(run.texts.get(name) == pages for name, pages in plain.texts.items())
    return {
        "method": method,
        "documents_at_once": jobs,
        "pages": run.num_pages,
        "seconds": round(run.seconds, 1),
        "pages_an_hour": round(3600 * run.num_pages / run.seconds),
        "identical": f"{same}/{len(plain.texts)}",
    }
