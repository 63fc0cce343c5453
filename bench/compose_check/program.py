"""Builds the image by compose.yaml, brings the stack up, breaks it under a batch, and tears it down.

Needs a Docker daemon that answers, with its compose plugin, on this machine: processes of containers are killed by
their ids here.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from bench.common import machine_facts, say
from bench.compose_check.checks import (
    Batch,
    check_batch,
    check_command_line,
    check_hardening,
    check_scaled,
    render_videos,
)
from bench.compose_check.stack import CheckFailed, Stack, Steps, run
from bench.output import finish

LEAST_VIDEOS = 6
"""A batch of fewer is over before anything is broken."""


def check(steps: Steps, work: Path, num_videos: int) -> dict[str, Any]:
    """Everything, from the build to torn down. Raises `CheckFailed`."""
    _require_docker()
    with ExitStack() as exits:
        with steps.step("render the videos"):
            names = render_videos(work / "videos", num_videos)
        stack = Stack(work / "videos")
        with steps.step("build the image"):
            stack.build()
        exits.callback(_tear_down, steps, stack)
        batch = exits.enter_context(contextlib.closing(Batch(stack.address, "compose-check", names)))
        with steps.step("up, still without a draft"):
            stack.up("redis", "target", "gateway")
        with steps.step("up, all"):
            stack.up()
        with steps.step("look at the containers"):
            users = check_hardening(stack)
        counts = check_batch(steps, stack, batch, num_videos)
        with steps.step("the command line, in a container") as row:
            row |= check_command_line(stack, num_videos)
        with steps.step("two targets and two drafts") as row:
            few = names[:LEAST_VIDEOS]
            shorter = exits.enter_context(contextlib.closing(Batch(stack.address, "scaled", few, 64)))
            row["sessions"] = check_scaled(stack, shorter, len(few))
    return {"batch": counts, "users": users}


def _require_docker() -> None:
    try:
        run(["docker", "compose", "version"], timeout_s=30)
        run(["docker", "info"], timeout_s=30)
    except (OSError, CheckFailed) as error:
        raise CheckFailed(f"compose-check needs a running Docker with its compose plugin: {error}") from None


def _tear_down(steps: Steps, stack: Stack) -> None:
    with steps.step("down"):
        stack.down()


def main(argv: Sequence[str]) -> None:
    """Exit status 1 if any step fails."""
    parser = argparse.ArgumentParser(prog="python -m bench compose-check", description="Does the compose stack hold?")
    parser.add_argument("--videos", type=int, default=24, help=f"clips of the batch, at least {LEAST_VIDEOS}")
    given = parser.parse_args(argv)
    if given.videos < LEAST_VIDEOS:
        parser.error(f"--videos: a batch of fewer than {LEAST_VIDEOS} is over before anything is broken")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is torn down
    steps, report = Steps(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="slipstream-compose-") as folder:
        Path(folder).chmod(0o755)
        try:
            report = check(steps, Path(folder), given.videos)
        except (CheckFailed, OSError, grpc.RpcError) as error:
            say(f"failed: {error}")
            report["failed"] = str(error).splitlines()[0]
    ok = "failed" not in report
    seconds = round(sum(row["seconds"] for row in steps.rows), 1)
    finish("compose-check", {"ok": ok, **report, "seconds": seconds, "steps": steps.rows, "machine": machine_facts()})
    sys.exit(0 if ok else 1)
