"""What text that is already there is worth as a draft, part by part.

Exit status 1 when a text was not plain decoding's, or a part stayed below what is promised of it; `broken` names it.
A part that fails ends no other. `not_shown` says what could not be measured here, as there is no checkpoint, no OCR or
no folder of scans; `missed`, what is aimed at and was not reached.
"""

import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import MODELS, is_whole, machine_facts, make_parser, run_to_end, say
from bench.documents.alignment import LEAST_RATIO, measure_alignment, measure_identity
from bench.documents.reader_faults import are_faults_survived, measure_faults
from bench.documents.reading import is_kept, measure_reading
from bench.documents.recaption import is_recaption_kept, measure_recaption
from bench.documents.resubmitted import newer_checkpoint
from bench.documents.scans import are_scans_kept, measure_scans
from bench.documents.stages import are_stages_kept, measure_stages
from bench.documents.whole import PAGE_TOKENS, is_whole_kept, measure_live, measure_replayed
from bench.output import finish
from bench.replay.rows import TABLES
from bench.tables import print_rows
from slipstream.logs import configure_logs
from slipstream.stack.local import POCKET_READER

PARTS: dict[str, Callable[[Namespace], dict[str, Any]]] = {
    "identity": lambda given: measure_identity(given.schedules, given.seed),
    "alignment": lambda given: measure_alignment(given.pages),
    "recaption": lambda given: run_to_end(
        measure_recaption(given.clips, given.frames, given.rounds, newer=_newer(given), older=given.older)
    ),
    "faults": lambda given: run_to_end(measure_faults(given.reader_model, given.read_pages)),
    "reading": lambda given: run_to_end(measure_reading(given.reader_model, given.read_pages, given.rounds)),
    "live": lambda given: run_to_end(measure_live(given.reader_model, given.whole_pages, given.rounds)),
    "replayed": lambda given: run_to_end(
        measure_replayed(given.reader_model, given.table, given.page_tokens, given.whole_pages, 1)
    ),
    "scans": lambda given: run_to_end(measure_scans(given.folder, given.reader_model, given.timed_files)),
    "stages": lambda given: run_to_end(measure_stages(given.reader_model, given.stage_pages, given.rounds)),
}
FAILED = "failed"
"""Of a part: why it came to no end."""
HOLDS: dict[str, Callable[[Any], bool]] = {
    "identity": lambda found: is_whole(found["identical"]),
    "alignment": lambda found: bool(found["least_ratio"] >= LEAST_RATIO),
    "faults": are_faults_survived,
    "reading": is_kept,
    "live": is_whole_kept,
    "replayed": is_whole_kept,
    "scans": are_scans_kept,
    "stages": are_stages_kept,
    "recaption": is_recaption_kept,
}


def main(argv: Sequence[str]) -> None:
    counts = {"schedules": (10_000, "of hints, in the pure core"), "seed": 1, "pages": (12, "of the traces")}
    counts |= {"clips": (5, "that are captioned again"), "frames": 64, "rounds": 3}
    counts |= {"read_pages": (50, "that are read"), "reader_model": (POCKET_READER, "checkpoint that reads pages")}
    counts |= {"folder": ("", "of scans and manuals, for `scans`"), "timed_files": (16, "of those that can be read")}
    counts |= {"whole_pages": (28, "of `live` and `replayed`"), "table": (TABLES / "0.5b-7b.json", "of `replayed`")}
    counts |= {"page_tokens": (PAGE_TOKENS, "of a page's prompt in `replayed`; a prefill lasts in proportion")}
    counts |= {"stage_pages": (14, "that are read by regions, too")}
    counts |= {"newer": ("", "checkpoint that captions again; made here where none is named")}
    counts |= {"older": (MODELS["target"], "checkpoint of the same model whose captions are hints, too")}
    parser = make_parser("documents", "Text that is already there as a draft.", ("seed",), **counts)
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), default=list(PARTS), help="parts to measure")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    configure_logs("documents", "error")
    document: dict[str, Any] = {}
    for name in given.only:
        document[name] = _measured(name, given)
        say(f"{name}: {document[name]['part_s']:.0f} s")
        for table in ("rows", "noise", "kinds", "archive"):
            if rows := document[name].get(table):
                print_rows(name if table == "rows" else f"{name}, {table}", [_flat(row) for row in rows])
    told = verdict(document) | {"machine": machine_facts()}
    of_reading = {"reading_rows": document.get("reading", {}).pop("rows", [])}  # too many for the last line
    finish("documents", told | document | of_reading, series=[*of_reading])
    sys.exit(1 if told["broken"] else 0)


def _measured(name: str, given: Namespace) -> dict[str, Any]:
    """What a part found and how long it took. One that fails says so, and ends no other."""
    started = time.monotonic()
    try:
        found = PARTS[name](given)
    except Exception as failure:
        traceback.print_exc()
        found = {FAILED: f"{type(failure).__name__}: {failure}"}
    return found | {"part_s": round(time.monotonic() - started)}


def verdict(document: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of the parts that were asked for: which broke a promise or failed, which could not be shown here and why, and
    what each aims at and did not reach."""
    return {
        "broken": [name for name, found in document.items() if FAILED in found or not HOLDS[name](found)],
        "not_shown": {name: why for name, found in document.items() if (why := _why_not_shown(found))},
        "missed": {name: found["missed"] for name, found in document.items() if found.get("missed")},
    }


def _why_not_shown(found: Mapping[str, Any]) -> str:
    return "" if found.get("shown", True) else str(found["why"])


def _newer(given: Namespace) -> Path:
    return Path(given.newer) if given.newer else newer_checkpoint()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Nested figures beside the others."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name} {key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
