"""`python -m bench`: every method on the same clips in one run, clip by clip in rotating order; the last line is JSON.

Each model process has one core. While transformers runs (in its own process, on the target's core) the stacks are
idle, and the other way round. A run ends within `--minutes`: clips and sweep points that have no time are left out,
and the document says so.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import report
from bench.budget import Budget
from bench.clips import CLIP_FOLDER, held_out_clips
from bench.comparison import Comparison
from bench.document import make_document
from bench.methods import methods
from bench.report.writing import write
from bench.running import run_to_end, say
from bench.stacks import start_processes
from bench.sweeps import sweep_points
from bench.tasks import Task
from slipstream.stack.local import POCKET_DIR

LATEST = CLIP_FOLDER / "latest.json"


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    clips: tuple[Path, ...]
    side_clips: int
    """Clips for methods beside the question."""
    minutes: float
    sweeps: bool
    report: Path | None
    """Folder for the page, its plots and the document."""
    template: Task
    """All but the clip."""


async def measure(plan: Plan) -> dict[str, Any]:
    """Starts the processes, measures, and ends them."""
    started, budget = datetime.now(UTC), Budget(60 * plan.minutes)
    compared = methods(plan.side_clips)
    async with start_processes(plan.template.target, plan.template.draft, sweeps=plan.sweeps) as processes:
        template = replace(plan.template, prompt=processes.default_prompt)
        comparison = Comparison(processes, compared, plan.clips, template, budget)
        await comparison.warm_up()
        await comparison.run(sweep_points(template.num_frames, processes.max_frames) if plan.sweeps else [])
    say("comparing with theory")
    run = {
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "started": started.isoformat(timespec="seconds"),
        "wall_s": budget.spent_s,
        "minutes": plan.minutes,
    }
    return make_document(comparison.findings, compared, template, plan.clips, run)


def parse_plan(argv: Sequence[str] | None = None) -> Plan:
    """From the command line; renders the clips."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measures every method on the same clips.")
    parser.add_argument("--clips", type=int, default=6, help="at most; fewer where the time is short")
    parser.add_argument("--side-clips", type=int, default=2, help="clips for transformers and lossy methods")
    parser.add_argument("--minutes", type=float, default=27.0, help="after which the run has ended")
    parser.add_argument("--no-sweeps", action="store_true", help="the table alone")
    parser.add_argument("--report", type=Path, help="write results.md, results.json and the plots into this folder")
    parser.add_argument("--frames", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=320)
    parser.add_argument("--target", type=Path, default=POCKET_DIR / "target")
    parser.add_argument("--draft", type=Path, default=POCKET_DIR / "draft")
    given = parser.parse_args(argv)
    clips = tuple(held_out_clips(given.clips))
    template = Task(clips[0], given.frames, "", given.max_new_tokens, given.target, given.draft)
    return Plan(clips, given.side_clips, given.minutes, not given.no_sweeps, given.report, template)


def main() -> None:
    plan = parse_plan()
    document = run_to_end(measure(plan))
    LATEST.write_text(json.dumps(document))
    report.show(document)
    if plan.report is not None:
        say(f"wrote {write(document, plan.report)}")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
