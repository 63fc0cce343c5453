"""How many examples a fuzzing test tries: few in `make test`, many in `make faults`, which reads what they found.

`SLIPSTREAM_FUZZ_EXAMPLES` is the number, `SLIPSTREAM_FUZZ_REPORT` a folder for the findings as JSON.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

EXAMPLES_VARIABLE = "SLIPSTREAM_FUZZ_EXAMPLES"
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


def report_findings(name: str, findings: Mapping[str, Any]) -> None:
    """Keeps what was found where `make faults` looks for it."""
    folder = os.environ.get(REPORT_VARIABLE)
    if folder:
        Path(folder, f"{name}.json").write_text(json.dumps(findings))


def found_in(folder: str, name: str) -> dict[str, Any]:
    """What a test of that name reported; {} if it failed before."""
    path = Path(folder, f"{name}.json")
    return dict(json.loads(path.read_text())) if path.exists() else {}
