"""Harms the archive in every way that its promises speak of.

Parts, each on processes of its own:

- `drain`: two gateways drain a batch while gateway, target, draft and Redis are killed and frozen in turn.
- `poison`: a job whose gateway dies whenever it runs.
- `redis`: the store runs out of disk, is killed, is frozen; batches are handed in meanwhile.
- `overload`: three times the captions that the stack can make.
- `rogue-draft`: a draft that lies in every way there is, beside a plain caption.
- `resume`: target and gateway are killed in the middle of captions, which go on.
- `ranks`: a target on two processes, of which one is killed or frozen in the middle of captions.
- `memory`: large captions, finished or hung up; nothing of them may be left a second later.
- `admission`: thousands watch health, and uploads stall, while somebody else wants a caption.
- `owners`: one tenant hands in hundreds of jobs, another a few.
- `sandbox`: a captured decoder tries every known way out, and then random system calls.
- `stop`: `slipstream up` gets Ctrl-C and SIGTERM, idle and busy; it has to end in time.
- `requests`, `files`, `old-files`: the tests that damage messages to the services and videos of modern and of old
  formats, with more examples.
- `fuzz`: the test of every parser of what strangers send, for `--fuzz` seconds.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.common import machine_facts, make_parser, run_test, run_to_end, say
from bench.faults.admission import run_admission
from bench.faults.damaged import TESTS, run_damage
from bench.faults.drain import run_drain, run_poison
from bench.faults.overload import run_overload
from bench.faults.owners import run_owners
from bench.faults.ranks import run_ranks
from bench.faults.redis_faults import run_redis_faults
from bench.faults.resume import run_resume
from bench.faults.rogue import run_rogue
from bench.faults.stop import run_stop
from bench.output import finish
from bench.soak import run_memory
from tests.support.escapes import find_escapes
from tests.support.fuzzing import CALLS

COMPOSE, LEAST_VIDEOS = "tests/e2e/test_compose_stack.py", 6
PARTS = (
    "drain",
    "poison",
    "redis",
    "overload",
    "owners",
    "rogue-draft",
    "resume",
    "ranks",
    "memory",
    "admission",
    "sandbox",
    "stop",
    *TESTS,
)
ROUND = 500
"""Examples of one parser before the clock is looked at."""
Part = Callable[[], Awaitable[dict[str, Any]]]


def _parts(given: argparse.Namespace) -> dict[str, Part]:
    return {
        "drain": lambda: run_drain(given.jobs, given.seed),
        "poison": run_poison,
        "redis": run_redis_faults,
        "overload": lambda: run_overload(given.seed),
        "rogue-draft": run_rogue,
        "resume": lambda: run_resume(given.seed),
        "ranks": run_ranks,
        "memory": run_memory,
        "admission": run_admission,
        "owners": run_owners,
        "sandbox": lambda: _sandbox(given.seed),
        "stop": run_stop,
        "requests": lambda: run_damage("requests", given.seed, -(-given.requests // CALLS)),
        "files": lambda: run_damage("files", given.seed, given.files),
        "old-files": lambda: run_damage("old-files", given.seed, given.files),
        "fuzz": lambda: run_damage("fuzz", given.seed, ROUND, given.fuzz),
    }


async def _sandbox(seed: int) -> dict[str, Any]:
    return (await find_escapes(seed)).findings


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
        "resumed_identical": found.get("resume", {}).get("resumed_identical"),
        "goodput_at_3x": found.get("overload", {}).get("goodput_at_3x"),
        "rogue_draft_max_slowdown": found.get("rogue-draft", {}).get("max_slowdown"),
        "lost_rank_gone_s": found.get("ranks", {}).get("slowest_gone_s"),
        "held_by_idle_mb": found.get("memory", {}).get("held_by_idle_mb"),
        **{name: found.get("admission", {}).get(name) for name in ("watch_flood_ok", "upload_stall_ok")},
        "owners_share": found.get("owners", {}).get("owners_share"),
        "sandbox_bypasses": found.get("sandbox", {}).get("sandbox_bypasses"),
        "mutated_requests": found.get("requests", {}).get("requests"),
        "mutated_files": found.get("files", {}).get("files"),
        "mutated_old_files": found.get("old-files", {}).get("files"),
        "fuzzed": found.get("fuzz", {}).get("examples"),
    }


def main(argv: Sequence[str]) -> None:
    counts = {
        "jobs": (200, "of `drain`"),
        "requests": (10_000, "of that part"),
        "files": (2_000, "of that part, and as many of `old-files`"),
    }
    counts["fuzz"] = (120, "seconds of that part")
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


def main_compose(argv: Sequence[str]) -> None:
    """The containers of compose.yaml, harmed under a batch by a test, which needs a Docker daemon that answers, with
    its compose plugin, on this machine. Exit status 1 if any step fails."""
    parser = make_parser("compose-check", "Does the compose stack hold?", videos=(24, "clips of the batch"))
    given = parser.parse_args(argv)
    if given.videos < LEAST_VIDEOS:
        parser.error(f"--videos: a batch of fewer than {LEAST_VIDEOS} is over before anything is broken")
    found = run_to_end(run_test(COMPOSE, "compose", {"SLIPSTREAM_COMPOSE_VIDEOS": str(given.videos)}, "--capture=no"))
    ok = found.pop("passed")
    finish("compose-check", {"ok": ok, **found, "machine": machine_facts()})
    sys.exit(0 if ok else 1)
