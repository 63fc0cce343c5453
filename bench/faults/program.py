"""Harms the archive in every way that its promises speak of.

Parts, each on processes of its own:

- `drain`: two gateways drain a batch while gateway, target, draft and Redis are killed and frozen in turn.
- `poison`: a job whose gateway dies whenever it runs.
- `redis`: the store runs out of disk, is killed, is frozen; batches are handed in meanwhile.
- `overload`: three times the captions that the stack can make.
- `owners`: one tenant hands in hundreds of jobs, another a few.
- `stop`: `slipstream up` gets Ctrl-C and SIGTERM, idle and busy; it has to end in time.
- `requests`, `files`: the tests that damage messages to the services and videos, with more examples.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.common import machine_facts, make_parser, run_test, run_to_end, say
from bench.faults.drain import run_drain, run_poison
from bench.faults.overload import run_overload
from bench.faults.owners import run_owners
from bench.faults.redis_faults import run_redis_faults
from bench.faults.stop import run_stop
from bench.output import finish
from tests.support.fuzzing import CALLS, EXAMPLES_VARIABLE

PARTS = ("drain", "poison", "redis", "overload", "owners", "stop", "requests", "files")
TESTS = {"requests": "tests/faults/test_mutated_requests.py", "files": "tests/video/test_mutated_files.py"}
Part = Callable[[], Awaitable[dict[str, Any]]]


def _parts(given: argparse.Namespace) -> dict[str, Part]:
    return {
        "drain": lambda: run_drain(given.jobs, given.seed),
        "poison": run_poison,
        "redis": run_redis_faults,
        "overload": lambda: run_overload(given.seed),
        "owners": run_owners,
        "stop": run_stop,
        "requests": lambda: _fuzz("requests", -(-given.requests // CALLS), given.seed),
        "files": lambda: _fuzz("files", given.files, given.seed),
    }


async def _fuzz(name: str, examples: int, seed: int) -> dict[str, Any]:
    return await run_test(TESTS[name], name, {EXAMPLES_VARIABLE: str(examples)}, f"--hypothesis-seed={seed}")


async def _run(given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in _parts(given).items():
        if name not in given.only:
            continue
        began = time.monotonic()
        found[name] = await _outcome(part)
        say(json.dumps(found[name]))
        say(f"{name}: {'passed' if found[name]['passed'] else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return found


async def _outcome(part: Part) -> dict[str, Any]:
    """What the part found. One that could not be carried through has failed; the others go on."""
    try:
        return await part()
    except Exception as error:
        traceback.print_exception(error)
        return {"passed": False, "error": f"{type(error).__name__}: {error}"}


def _summary(found: dict[str, Any]) -> dict[str, Any]:
    drain, poison = found.get("drain", {}), found.get("poison", {})
    named = ("jobs", "terminal_once", "committed_once", "identical", "stale_commits_refused", "rerun_within_s")
    return {
        **{name: drain.get(name) for name in named},
        "poison_dead_lettered": poison.get("passed"),
        "goodput_at_3x": found.get("overload", {}).get("goodput_at_3x"),
        "owners_share": found.get("owners", {}).get("owners_share"),
        "mutated_requests": found.get("requests", {}).get("requests"),
        "mutated_files": found.get("files", {}).get("files"),
    }


def main(argv: Sequence[str]) -> None:
    counts = {"jobs": (200, "of `drain`"), "requests": (10_000, "of that part"), "files": (2_000, "of that part")}
    parser = make_parser("faults", "Does the archive keep its promises?", **counts, seed=0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    given = parser.parse_args(argv)
    began = time.monotonic()
    found = run_to_end(_run(given))
    ok = all(part["passed"] for part in found.values())
    document = {
        **_summary(found),
        "ok": ok,
        "seed": given.seed,
        "wall_s": round(time.monotonic() - began),
        "passed": {name: part["passed"] for name, part in found.items()},
        "parts": found,
        "machine": machine_facts(),
    }
    finish("faults", document, series=("parts",))
    sys.exit(0 if ok else 1)
