"""The containers of compose.yaml, harmed under a batch: runs `tests/e2e/test_compose_stack.py`, which needs a Docker
daemon that answers, with its compose plugin, on this machine."""

import sys
from collections.abc import Sequence

from bench.common import machine_facts, make_parser, run_test, run_to_end
from bench.output import finish

TEST = "tests/e2e/test_compose_stack.py"
LEAST_VIDEOS = 6


def main(argv: Sequence[str]) -> None:
    """Exit status 1 if any step fails."""
    parser = make_parser("compose-check", "Does the compose stack hold?", videos=(24, "clips of the batch"))
    given = parser.parse_args(argv)
    if given.videos < LEAST_VIDEOS:
        parser.error(f"--videos: a batch of fewer than {LEAST_VIDEOS} is over before anything is broken")
    found = run_to_end(run_test(TEST, "compose", {"SLIPSTREAM_COMPOSE_VIDEOS": str(given.videos)}, "--capture=no"))
    ok = found.pop("passed")
    finish("compose-check", {"ok": ok, **found, "machine": machine_facts()})
    sys.exit(0 if ok else 1)
