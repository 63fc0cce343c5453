"""Every method on the same clips in one run, clip by clip in rotating order.

Each model process has one core. While transformers runs (in its own process, on the target's core) the stacks are
idle, and the other way round. A run ends within `--minutes`: clips that have no time are left out, and the document
says so.
"""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.common import MODELS, Budget, Task, held_out_clips, make_parser, run_to_end, say
from bench.methods.comparison import Comparison, start_processes
from bench.methods.document import make_document
from bench.methods.listing import BenchMethod, Place, methods, pruning_with, variations
from bench.output import finish
from bench.report.page import show, write
from slipstream import CaptionOptions
from slipstream.speculation.methods import PRUNERS

SEED = 1
"""Of sampled captions."""


async def measure(given: Namespace, compared: Sequence[BenchMethod], command: str) -> dict[str, Any]:
    """Starts the processes, measures, and ends them."""
    started, budget, clips = datetime.now(UTC), Budget(60 * given.minutes), held_out_clips(given.clips)
    async with start_processes(given.target, given.draft, given.device, given.dtype) as processes:
        prompt = processes.default_prompt
        template = Task(clips[0], given.frames, prompt, given.max_new_tokens, given.target, given.draft)
        comparison = Comparison(processes, compared, clips, template, budget, kept_to(given))
        await comparison.warm_up()
        await comparison.run()
    say("comparing with theory")
    run = {"command": command, "started": started.isoformat(timespec="seconds"), "wall_s": budget.spent_s}
    run |= {"minutes": given.minutes, "device": given.device, "temperature": given.temperature, "pruner": given.pruner}
    run["json_schema"] = given.json_schema.name if given.json_schema else ""
    return make_document(comparison.findings, compared, template, clips, run)


def kept_to(given: Namespace) -> CaptionOptions:
    """What all captions are chosen by."""
    drawn = CaptionOptions(temperature=given.temperature, seed=SEED) if given.temperature else CaptionOptions()
    if not given.json_schema:
        return drawn
    return CaptionOptions(json_schema=given.json_schema.read_text()).over(drawn)


def parse_work(argv: Sequence[str]) -> tuple[Namespace, list[BenchMethod]]:
    """The command line, and the rows to measure."""
    flags = {"clips": (6, "at most; fewer where the time is short"), "frames": 128, "max_new_tokens": 320, **MODELS}
    flags |= {"side_clips": (2, "clips for transformers and lossy methods"), "minutes": (27.0, "that it may take")}
    flags |= {"device": ("cpu", "of target and draft"), "dtype": ("auto", "of their weights")}
    flags["temperature"] = (0.0, "of all captions; above 0 transformers and lossy methods are left out")
    parser = make_parser("methods", "Every method on the same clips.", ("side_clips",), **flags)
    parser.add_argument(
        "--vary", nargs="+", default=[], metavar="OPTION=VALUES", help="more rows of slipstream, as alpha=0,0.5,0.9"
    )
    parser.add_argument("--pruner", choices=PRUNERS, help="of all drafts that see the video; without it, their own")
    parser.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="of all captions; transformers and lossy methods are left out"
    )
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="rows to measure; without it, all")
    parser.add_argument("--report", type=Path, help="write results.md, results.json and the plots into this folder")
    given = parser.parse_args(argv)
    try:
        compared = [*methods(given.side_clips), *variations(given.vary, given.side_clips)]
    except ValueError as error:
        parser.error(f"--vary: {error}")
    if given.pruner:
        compared = pruning_with(given.pruner, compared)
    unknown = set(given.methods or ()) - {method.name for method in compared}
    if unknown:
        parser.error(f"--methods: there is no {', '.join(sorted(unknown))}")
    if given.temperature or given.json_schema:
        compared = [method for method in compared if not method.lossy and method.place is not Place.OUTSIDE]
    return given, [method for method in compared if not given.methods or method.name in given.methods]


def main(argv: Sequence[str]) -> None:
    given, compared = parse_work(argv)
    command = shlex.join(["python", "-m", "bench", "methods", *argv])
    document = run_to_end(measure(given, compared, command))
    show(document)
    if given.report is not None:
        say(f"wrote {write(document, given.report)}")
    brief = ("name", "n", "tokens_per_s", "speedup", "end_to_end_speedup", "identical", "tau", "M")
    table = [{key: row[key] for key in brief} for row in document["methods"]]
    series = ("methods", "samples", "timelines", "kept", "prediction")
    finish("methods", {**document, "table": table}, series)
