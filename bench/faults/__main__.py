"""`python -m bench.faults`: harms the archive in every way that its promises speak of. The last line is JSON.

Parts, each on processes of its own:

- `drain`: two gateways drain a batch while gateway, target, draft and Redis are killed and frozen in turn.
- `poison`: a job whose gateway dies whenever it runs.
- `redis`: the store runs out of disk, is killed, is frozen; batches are handed in meanwhile.
- `overload`: three times the captions that the stack can make.
- `stop`: `slipstream up` gets Ctrl-C and SIGTERM, idle and busy; it has to end in time.
- `requests`, `files`: mutated messages to the services, mutated videos to the decoder.

Exit status 1 if a promise was broken.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from bench.faults.drain import run_drain
from bench.faults.mutated_files import mutated_files
from bench.faults.mutated_requests import run_mutated_requests
from bench.faults.overload import run_overload
from bench.faults.poison import run_poison
from bench.faults.redis_faults import run_redis_faults
from bench.faults.stop import run_stop
from bench.machine import machine_facts
from bench.running import run_to_end, say

PARTS = ("drain", "poison", "redis", "overload", "stop", "requests", "files")
Part = Callable[[], Awaitable[dict[str, Any]]]


def _parts(given: argparse.Namespace) -> dict[str, Part]:
    return {
        "drain": lambda: run_drain(given.jobs, given.seed),
        "poison": run_poison,
        "redis": run_redis_faults,
        "overload": lambda: run_overload(given.seed),
        "stop": run_stop,
        "requests": lambda: run_mutated_requests(given.requests, given.seed),
        "files": lambda: mutated_files(given.files, given.seed),
    }


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
    """The figures that the promises name, first."""
    drain, poison = found.get("drain", {}), found.get("poison", {})
    named = ("jobs", "terminal_once", "committed_once", "identical", "stale_commits_refused", "rerun_within_s")
    return {
        **{name: drain.get(name) for name in named},
        "poison_dead_lettered": poison.get("passed"),
        "goodput_at_3x": found.get("overload", {}).get("goodput_at_3x"),
        "mutated_requests": found.get("requests", {}).get("requests"),
        "mutated_files": found.get("files", {}).get("files"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description="Does the archive keep its promises?")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of the part `drain`")
    parser.add_argument("--requests", type=int, default=10_000, help="messages of the part `requests`")
    parser.add_argument("--files", type=int, default=2_000, help="videos of the part `files`")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    found = run_to_end(_run(given))
    ok = all(part["passed"] for part in found.values())
    document = {
        **_summary(found),
        "ok": ok,
        "seed": given.seed,
        "wall_s": round(time.monotonic() - began),
        "parts": found,
        "machine": machine_facts(),
    }
    print(json.dumps(document))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
