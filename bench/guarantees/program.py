"""Measures every guarantee of `docs/algorithms.md`, part by part.

Exit status 1 when one of them did not hold; `broken` names it.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.common import ROOT, Task, held_out_clips, is_whole, machine_facts, make_parser, run_parts, run_to_end
from bench.guarantees.acceptance import PAIRS, joint_chi2, measure_positions, pocket_acceptance
from bench.guarantees.draft_faults import measure_coupled
from bench.guarantees.gate import measure_gate
from bench.guarantees.identity import plan_settings
from bench.guarantees.identity import run as compare_with_transformers
from bench.guarantees.sessions import measure_cold, measure_prefix_reuse, measure_sessions
from bench.guarantees.strict import measure_strict
from bench.output import finish

LEAST_P_VALUE = 1e-4
"""Of 72 tests of a true sampler, the smallest p-value is below this in 0.7% of the runs."""
QWEN_CLIPS, QWEN_SETTINGS = 6, 5


def measure_sampling() -> dict[str, Any]:
    """Joint distributions in a toy world, and acceptance on the pocket pair."""
    return {"joint_chi2": joint_chi2(), "acceptance": pocket_acceptance()}


def measure_qwen() -> dict[str, Any]:
    """Texts of the Qwen2.5-VL pair through the whole stack that equal `transformers.generate`."""
    folder, num_scenes = PAIRS["qwen2_5_vl"]
    pair = ROOT / folder
    clips = held_out_clips(QWEN_CLIPS, num_scenes)
    tasks = [Task(clip, 16, "", 200, pair / "target", pair / "draft") for clip in clips]
    document = run_to_end(compare_with_transformers(tasks, plan_settings([QWEN_SETTINGS] * QWEN_CLIPS, seed=0)))
    same, total = document["comparisons_identical"], document["comparisons"]
    return {"qwen_identical": f"{same}/{total}", "qwen_differences": document["differences"]}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampling": measure_sampling,
    "coupled": lambda: run_to_end(measure_coupled()),
    "qwen": measure_qwen,
    "positions": lambda: {"positions": measure_positions()},
    "sessions": lambda: {"sessions": run_to_end(measure_sessions()), "sessions_cold": run_to_end(measure_cold())},
    "prefix_reuse": lambda: {"prefix_reuse": run_to_end(measure_prefix_reuse())},
    "gate": lambda: {"gate": run_to_end(measure_gate())},
    "strict": lambda: {"strict": run_to_end(measure_strict())},
}
HOLDS: dict[str, Callable[[Any], bool]] = {
    "joint_chi2": lambda found: min(found["coupled"], found["rejection"]) > LEAST_P_VALUE,
    "coupled_identical": is_whole,
    "qwen_identical": is_whole,
    "sessions": lambda found: bool(found["all_identical"] and found["rises"]),
    "sessions_cold": lambda found: bool(found["all_identical"]),
    "prefix_reuse": lambda found: bool(found["identical"]),
    "gate": lambda found: bool(found["identical"] and found["within_limit"]),
    "strict": lambda found: found["strict"]["differ"].startswith("0/"),
}


def main(argv: Sequence[str]) -> None:
    parser = make_parser("guarantees", "Do the guarantees hold?")
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), default=list(PARTS), help="parts to measure")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    document: dict[str, Any] = {}
    for found in run_parts(given.only, lambda name: PARTS[name]()).values():
        document |= found
    broken = [name for name, holds in HOLDS.items() if name in document and not holds(document[name])]
    finish("guarantees", document | {"broken": broken, "machine": machine_facts()})
    sys.exit(1 if broken else 0)
