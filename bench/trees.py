"""This checkout beside another one, such as an older commit's worktree: is it as fast, and are the texts the same?

Both run their own stack, started by their own command line in this environment, and caption by turns; nothing of the
other checkout is imported here. Every caption samples another number of frames, so that no prefill is used twice.
"""

import asyncio
import itertools
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import ROOT, held_out_clips, machine_facts, make_parser, run_to_end, say
from bench.output import finish
from bench.tables import print_rows

METHODS = ("autoregressive", "slipstream")
START_S = 120.0
TIMES = {"generate": lambda told: told["timings"]["generate_s"] / told["num_tokens"]} | {
    name: lambda told, key=f"{name}_s": told["timings"][key] for name in ("first_token", "total")
}
"""Seconds of a caption by what it says of itself; `generate` is of one token."""


def _command(tree: Path) -> tuple[str, ...]:
    """The checkout's own `slipstream`, by whatever name its package has it."""
    script = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"]["slipstream"]
    module, _, function = script.partition(":")
    return sys.executable, "-c", f"from {module} import {function} as main; main()"


async def _start(tree: Path, *words: str, **pipes: Any) -> asyncio.subprocess.Process:
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    return await asyncio.create_subprocess_exec(*_command(tree), *words, cwd=tree, env=environ, **pipes)


@asynccontextmanager
async def _serving(tree: Path, address: str) -> AsyncIterator[None]:
    words = ("up", "--no-archive", "--pin", "--listen", address)
    process = await _start(tree, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    assert process.stdout is not None, "it was asked for"
    try:
        async with asyncio.timeout(START_S):
            while b"gateway: " not in (line := await process.stdout.readline()):
                if not line:
                    sys.exit(f"the stack of {tree} did not start; run its `slipstream up` to see why")
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def _caption(tree: Path, address: str, clip: Path, method: str, frames: int, tokens: int) -> dict[str, Any]:
    asked = {"--method": method, "--frames": frames, "--max-new-tokens": tokens, "--gateway": address}
    words = [str(word) for pair in asked.items() for word in pair]
    process = await _start(tree, "caption", "--json", *words, str(clip), stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    if process.returncode:
        sys.exit(f"{tree} did not caption {clip} by {method}: exit status {process.returncode}")
    told: dict[str, Any] = json.loads(said)
    return told


async def _run(trees: Sequence[Path], clips: Sequence[Path], rounds: int, frames: int, tokens: int) -> list[dict]:
    """Rows of one caption by each tree, in an order that turns round."""
    rows = []
    async with AsyncExitStack() as exits:
        folder = exits.enter_context(tempfile.TemporaryDirectory(prefix="slipstream-trees-"))
        addresses = [f"unix:{folder}/{number}.sock" for number in range(len(trees))]
        for tree, address in zip(trees, addresses, strict=True):
            await exits.enter_async_context(_serving(tree, address))
        served = list(zip(trees, addresses, strict=True))
        for number, (_, clip, method) in enumerate(itertools.product(range(rounds), clips, METHODS)):
            order = served if number // len(METHODS) % 2 == 0 else served[::-1]
            told = {tree: await _caption(tree, at, clip, method, frames + number, tokens) for tree, at in order}
            other, this = (told[tree] for tree in trees)
            times = {name: round(time(this) / time(other), 3) for name, time in TIMES.items()}
            rows.append({"clip": clip.stem, "method": method, "identical": this["text"] == other["text"], **times})
            say(f"{rows[-1]}")
    return rows


def main(argv: Sequence[str]) -> None:
    counts = {"clips": 3, "rounds": 3, "frames": 64, "max_new_tokens": 192}
    parser = make_parser("trees", "Is this checkout as fast as another one, and are its texts the same?", **counts)
    parser.add_argument("other", type=Path, help="the other checkout, for example of `git worktree add`")
    given = parser.parse_args(argv)
    trees = (given.other.resolve(), ROOT)
    try:
        _command(trees[0])
    except (OSError, ValueError, KeyError):
        parser.error(f"{trees[0]} is no checkout of this project: its pyproject.toml names no command `slipstream`")
    clips = held_out_clips(given.clips)
    rows = run_to_end(_run(trees, clips, given.rounds, given.frames, given.max_new_tokens))
    of = {method: [row for row in rows if row["method"] == method] for method in METHODS}
    ratios = [
        {"method": method, **{name: round(median(row[name] for row in of[method]), 3) for name in TIMES}}
        for method in METHODS
    ]
    print_rows("time in this checkout over time in the other one (medians)", ratios)
    identical = all(row["identical"] for row in rows)
    finish("trees", {"identical": identical, "ratios": ratios, "rows": rows, "machine": machine_facts()}, ("rows",))
    sys.exit(0 if identical else 1)
