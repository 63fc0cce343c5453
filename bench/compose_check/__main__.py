"""`python -m bench.compose_check`: builds the image, brings the stack up, breaks it under a batch, tears it down.

Uses the Docker daemon that answers, or starts a private one, as root on Debian 12 from nothing. Exit status 1 if any
step fails; the last line is JSON.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from bench.compose_check.batch import Batch, render_videos
from bench.compose_check.checks import check_batch, check_command_line, check_hardening, check_scaled
from bench.compose_check.engine import has_daemon, mounts_below, private_engine
from bench.compose_check.images import (
    PYTHON_BASE,
    REDIS_BASE,
    build_context,
    build_image,
    image_sizes,
    provide_bases,
)
from bench.compose_check.stack import IMAGE, Stack
from bench.compose_check.steps import CheckFailed, Steps
from bench.machine import machine_facts
from bench.running import say

LEAST_FREE_GB = 8


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compose_check", description="Does the compose stack hold?")
    parser.add_argument("--videos", type=int, default=24, help="clips of the batch, at least 6")
    parser.add_argument("--keep", action="store_true", help="keep the work folder, with all logs")
    given = parser.parse_args()
    if given.videos < 6:
        parser.error("--videos: a batch of fewer than 6 is over before anything is broken")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is torn down
    steps, report = Steps(), {}
    work = Path(tempfile.mkdtemp(prefix="slipstream-compose-"))
    work.chmod(0o755)
    try:
        report = check(steps, work, given.videos)
    except (CheckFailed, OSError, grpc.RpcError) as error:
        say(f"failed: {error}")
        report["failed"] = str(error).splitlines()[0]
    finally:
        if given.keep or "failed" in report:
            say(f"logs are in {work}")
        if not given.keep:
            _remove(work, logs="failed" in report)
    ok = "failed" not in report
    seconds = round(sum(row["seconds"] for row in steps.rows), 1)
    print(json.dumps({"ok": ok, **report, "seconds": seconds, "steps": steps.rows, "machine": machine_facts()}))
    sys.exit(0 if ok else 1)


def check(steps: Steps, work: Path, num_videos: int) -> dict[str, Any]:
    """Everything, from nothing to torn down."""
    if shutil.disk_usage(work).free < LEAST_FREE_GB * 10**9:
        raise CheckFailed(f"{work} has less than {LEAST_FREE_GB} GB free; set TMPDIR to a folder that has")
    with ExitStack() as exits:
        own_engine = not has_daemon()
        environ: Mapping[str, str] = {}
        if own_engine:
            environ = exits.enter_context(private_engine(steps, work))
        stand_ins = provide_bases(steps, work, environ, may_build=own_engine)
        with steps.step("render the videos"):
            names = render_videos(work / "videos", num_videos)
        stack = Stack(work / "context", work / "videos", environ)
        build_context(steps, stack.folder)
        build_image(steps, work, stack.folder, stack.environ)
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
            shorter = exits.enter_context(contextlib.closing(Batch(stack.address, "scaled", names[:6], 64)))
            row["sessions"] = check_scaled(stack, shorter, 6)
        images = image_sizes((PYTHON_BASE, REDIS_BASE, IMAGE), environ)
    return {"batch": counts, "images_mb": images, "users": users, "own_engine": own_engine, "stand_ins": stand_ins}


def _tear_down(steps: Steps, stack: Stack) -> None:
    with steps.step("down"):
        (stack.folder.parent / "stack.log").write_text(stack.compose("logs", "--no-color", timeout_s=60))
        stack.down()


def _remove(work: Path, *, logs: bool) -> None:
    """The work folder; with `logs`, all but those. Never what is mounted there."""
    if mounts_below(work):
        say(f"{work} is left as it is: something is still mounted there")
        return
    if not logs:
        shutil.rmtree(work, ignore_errors=True)
        return
    for entry in os.scandir(work):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif not entry.name.endswith(".log"):
            os.unlink(entry.path)


if __name__ == "__main__":
    main()
