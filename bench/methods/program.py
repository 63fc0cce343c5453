"""Every method on the same clips in one run, clip by clip in rotating order.

Each model process has one core. While transformers runs (in its own process, on the target's core) the stacks are
idle, and the other way round. A run ends within `--minutes`: clips that have no time are left out, and the document
says so.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.common import MODELS, Budget, Task, held_out_clips, make_parser, run_to_end, say
from bench.methods.comparison import Comparison, start_processes
from bench.methods.document import make_document
from bench.methods.listing import BenchMethod, methods, variations
from bench.output import finish
from bench.report.page import show, write


@dataclass(frozen=True)
class Plan:
    methods: tuple[BenchMethod, ...]
    clips: tuple[Path, ...]
    minutes: float
    device: str
    report: Path | None
    """Folder for the page, its plots and the document."""
    template: Task
    """All but the clip."""
    command: str


async def measure(plan: Plan) -> dict[str, Any]:
    started, budget = datetime.now(UTC), Budget(60 * plan.minutes)
    async with start_processes(plan.template.target, plan.template.draft, plan.device) as processes:
        template = replace(plan.template, prompt=processes.default_prompt)
        comparison = Comparison(processes, plan.methods, plan.clips, template, budget)
        await comparison.warm_up()
        await comparison.run()
    say("comparing with theory")
    run = {
        "command": plan.command,
        "started": started.isoformat(timespec="seconds"),
        "wall_s": budget.spent_s,
        "minutes": plan.minutes,
        "device": plan.device,
    }
    return make_document(comparison.findings, plan.methods, template, plan.clips, run)


def parse_plan(argv: Sequence[str]) -> Plan:
    flags = {"clips": (6, "at most; fewer where the time is short"), "frames": 128, "max_new_tokens": 320, **MODELS}
    flags |= {"side_clips": (2, "clips for transformers and lossy methods"), "minutes": (27.0, "that it may take")}
    parser = make_parser("methods", "Every method on the same clips.", **flags, device=("cpu", "of target and draft"))
    parser.add_argument(
        "--vary", nargs="+", default=[], metavar="OPTION=VALUES", help="more rows of slipstream, as alpha=0,0.5,0.9"
    )
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="rows to measure; without it, all")
    parser.add_argument("--report", type=Path, help="write results.md, results.json and the plots into this folder")
    given = parser.parse_args(argv)
    try:
        compared = (*methods(given.side_clips), *variations(given.vary, given.side_clips))
    except ValueError as error:
        parser.error(f"--vary: {error}")
    unknown = set(given.methods or ()) - {method.name for method in compared}
    if unknown:
        parser.error(f"--methods: there is no {', '.join(sorted(unknown))}")
    compared = tuple(method for method in compared if not given.methods or method.name in given.methods)
    clips = tuple(held_out_clips(given.clips))
    template = Task(clips[0], given.frames, "", given.max_new_tokens, given.target, given.draft)
    command = shlex.join(["python", "-m", "bench", "methods", *argv])
    return Plan(compared, clips, given.minutes, given.device, given.report, template, command)


def main(argv: Sequence[str]) -> None:
    plan = parse_plan(argv)
    document = run_to_end(measure(plan))
    show(document)
    if plan.report is not None:
        say(f"wrote {write(document, plan.report)}")
    brief = ("name", "n", "tokens_per_s", "speedup", "end_to_end_speedup", "identical", "tau", "M")
    table = [{key: row[key] for key in brief} for row in document["methods"]]
    series = ("methods", "samples", "timelines", "kept", "prediction")
    finish("methods", {**document, "table": table}, series)
