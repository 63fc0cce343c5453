"""How many examples a fuzzing test tries: few in `make test`, many in `make faults`, which reads what they found.

`SLIPSTREAM_FUZZ_EXAMPLES` is the number, `SLIPSTREAM_FUZZ_REPORT` a folder for the findings as JSON. With
`SLIPSTREAM_FUZZ_S`, `fuzz` goes on for so many seconds, with other examples for another `SLIPSTREAM_FUZZ_SEED`.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

ExampleT = TypeVar("ExampleT")
EXAMPLES_VARIABLE = "SLIPSTREAM_FUZZ_EXAMPLES"
SECONDS_VARIABLE = "SLIPSTREAM_FUZZ_S"
SEED_VARIABLE = "SLIPSTREAM_FUZZ_SEED"
MOST_ROUNDS = 10**6
ROUND_EXAMPLES = 500
"""What Hypothesis keeps of its examples grows with their number, until the round is over."""
REPORT_VARIABLE = "SLIPSTREAM_FUZZ_REPORT"
CALLS = 8
"""Requests of one example, at the same time."""


def fuzzing(usual_examples: int) -> settings:
    """Settings of a test that has no time limit for one example. The usual examples are the same in every run."""
    asked = os.environ.get(EXAMPLES_VARIABLE)
    return settings(
        max_examples=int(asked) if asked else usual_examples,
        deadline=None,
        database=None,
        derandomize=not asked,
        suppress_health_check=list(HealthCheck),
    )


def fuzz(strategy: SearchStrategy[ExampleT], attack: Callable[[ExampleT], object], usual_examples: int) -> int:
    """Tries examples, in rounds of another seed each, until one makes `attack` raise, and shrinks that; how many were
    tried."""
    asked = fuzzing(usual_examples)
    num_tried, num_asked, until = 0, 0, time.monotonic() + float(os.environ.get(SECONDS_VARIABLE) or 0)
    first_seed = int(os.environ.get(SEED_VARIABLE) or 0) * MOST_ROUNDS

    def counted(example: ExampleT) -> None:
        nonlocal num_tried
        num_tried += 1
        attack(example)

    for number in itertools.count(first_seed):
        left = asked.max_examples - num_asked
        num_now = min(left if left > 0 else asked.max_examples, ROUND_EXAMPLES)
        seed(number)(settings(asked, max_examples=num_now)(given(strategy)(counted)))()
        num_asked += num_now
        if num_asked >= asked.max_examples and time.monotonic() >= until:
            break
    return num_tried


def report_findings(name: str, findings: Mapping[str, Any]) -> None:
    """Keeps what was found where `make faults` looks for it."""
    folder = os.environ.get(REPORT_VARIABLE)
    if folder:
        Path(folder, f"{name}.json").write_text(json.dumps(findings))


def found_in(folder: str, name: str) -> dict[str, Any]:
    """What a test of that name reported; {} if it failed before."""
    path = Path(folder, f"{name}.json")
    return dict(json.loads(path.read_text())) if path.exists() else {}
