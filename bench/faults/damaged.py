"""The tests that try damaged input, with more examples than they have in `make test`, or for some time."""

from typing import Any

from bench.common import run_test
from tests.support.fuzzing import EXAMPLES_VARIABLE, SECONDS_VARIABLE, SEED_VARIABLE

MUTATED_FILES = "tests/video/test_mutated_files.py::test_damaged_files_give_frames_or_a_documented_error"
TESTS = {
    "requests": "tests/faults/test_mutated_requests.py",
    "files": f"{MUTATED_FILES}[files]",
    "old-files": f"{MUTATED_FILES}[old-files]",
    "fuzz": "tests/faults/test_fuzzed_parsers.py",
}


async def run_damage(name: str, seed: int, examples: int, seconds: int = 0) -> dict[str, Any]:
    """The test of this name: whether it `passed`, and what it found. It tries so many examples, and goes on for so
    long."""
    asked = {EXAMPLES_VARIABLE: examples, SECONDS_VARIABLE: seconds, SEED_VARIABLE: seed}
    return await run_test(
        TESTS[name], name, {key: str(value) for key, value in asked.items()}, f"--hypothesis-seed={seed}"
    )
