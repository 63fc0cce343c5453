"""`python -m bench.report [DOCUMENT.json]`: draws the results page again from a kept document."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.agreement import kept_tokens
from bench.clips import held_out_clips
from bench.reference import start_reference
from bench.report.terminal import make_console, show
from bench.report.writing import DOCS, write
from bench.tasks import Task
from slipstream.stack.local import POCKET_DIR

PROMPT = "Describe this video in detail."
PRUNERS = ("uv", "uv_spread", "uv_cosine", "attention", "attention_variation", "specvlm", "uniform")
NUM_FRAMES, ALPHA, GRID = 128, 0.9, (7, 7)
"""The last: tokens of a frame in the pocket pair, rows and columns."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description="Draws docs/results.md again.")
    parser.add_argument("document", nargs="?", type=Path, default=DOCS / "results.json")
    parser.add_argument("--folder", type=Path, default=DOCS, help="where results.md, results/ and results.json go")
    parser.add_argument("--png", action="store_true", help="plots as PNG beside the SVG, to look at")
    given = parser.parse_args(argv)
    document: dict[str, Any] = read_document(given.document)
    if not (document.get("kept") or {}).get("pruners"):
        document["kept"] = _measure_kept((document.get("setup") or {}).get("frames") or NUM_FRAMES)
    show(document)
    if given.png:
        write(document, given.folder, ".png")
    make_console().print(f"wrote {write(document, given.folder)}", highlight=False)


def read_document(path: Path) -> dict[str, Any]:
    """A kept document, or the output of a run, whose last line it is."""
    written = path.read_text()
    document: dict[str, Any] = json.loads(written if written.startswith("{") else written.splitlines()[-1])
    return document


def _measure_kept(frames: int) -> dict[str, Any]:
    """What pruners keep of the first clip, which is rendered if it is not there; in a process that then ends."""
    task = Task(held_out_clips(1)[0], frames, PROMPT, 1, POCKET_DIR / "target", POCKET_DIR / "draft")
    with start_reference() as child:
        kept = child.submit(kept_tokens, task, PRUNERS, ALPHA).result()
    return {"clip": str(task.video), "frames": frames, "grid": GRID, "alpha": ALPHA, "pruners": kept}


if __name__ == "__main__":
    main()
