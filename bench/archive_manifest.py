"""The part `manifest`: a very long manifest with bad lines of several kinds, read and handed in.

Read: all of it goes through the reader of `slipstream archive submit --skip-bad`, in a process whose memory is watched.
Handed in: a shorter one goes through the gateway's intake, a real Redis with less room than the jobs need, feeder,
worker and compactor. Whoever hands in is killed at random moments and begins again, as the same command would, and the
feeder is killed, which goes on from its cursor. In the end the results are listed: one for each good line.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import forget_peak, peak_bytes, say
from bench.spill_roles import Given
from slipstream.archive.intake import Submission, batch_id_of
from slipstream.archive.messages import BatchItem, BatchOptions
from slipstream.archive.queue import BatchRecord, JobState, UnknownBatch
from slipstream.captioning.config import GatewayConfig
from slipstream.cli.archive.sources import Sources
from slipstream.logs import configure_logs
from slipstream.stack.redis_server import EmbeddedServer

KEY = "manifest"
BATCH_ID = batch_id_of("", KEY)
CONFIG = GatewayConfig(listen="", target="none:1", max_batch_items=100_000_000)
LONG_LINES, LONG_BYTES = 20, 5_000_000
EACH_PER_MILLE = 2
"""Of the lines, for every other kind."""
AGAIN_S, RESTART_S, PAGE = 0.2, 0.5, 500
TIMEOUT_S = 3600.0
BROKEN: Mapping[str, tuple[str, str]] = {
    "broken JSON": ('{"source": "videos/%d.mp4", "custom_id"', "not a JSON object in UTF-8"),
    "not UTF-8": ('{"source": "videos/%d\udcff.mp4"}', "not a JSON object in UTF-8"),
    "no source": ('{"custom_id": "%d"}', "give exactly one of source, path and url"),
    "unknown key": ('{"source": "videos/%d.mp4", "colour": "red"}', "unknown key 'colour'"),
    "bad option": ('{"source": "videos/%d.mp4", "num_frames": "many"}', "num_frames"),
}
"""By kind: the line of a number, and what the reader says of it."""
LONG = "5 MB"
REASONS = {kind: said for kind, (_, said) in BROKEN.items()} | {LONG: "longer than"}
AGAIN, OTHER = "again", "again, with another source"
KINDS = (*BROKEN, AGAIN, OTHER)

# -- manifest ---------------------------------------------------------------------------------------------------------


def kinds_of(num_lines: int, seed: int) -> Iterator[str]:
    """What each line is: "" a good one, or of the kinds that are planted."""
    chance = random.Random(seed)
    long = frozenset(chance.sample(range(num_lines), min(LONG_LINES, num_lines)))
    bad_share = len(KINDS) * EACH_PER_MILLE / 1000
    for number in range(num_lines):
        drawn = chance.random()
        if number in long:
            yield LONG
        else:
            yield KINDS[int(drawn / bad_share * len(KINDS))] if number and drawn < bad_share else ""


def write_manifest(path: Path, num_lines: int, seed: int) -> Counter[str]:
    """How many there are of each kind. A line that comes again is one that was good before."""
    planted: Counter[str] = Counter()
    good = 0
    with path.open("wb", buffering=1 << 20) as lines:
        for number, kind in enumerate(kinds_of(num_lines, seed)):
            planted[kind] += 1
            if kind == LONG:
                line = b'{"source": "' + b"x" * LONG_BYTES + b'"}'
            elif kind in BROKEN:
                line = (BROKEN[kind][0] % number).encode(errors="surrogateescape")
            else:
                named = number if not kind else good
                folder = "other" if kind == OTHER else "videos"
                line = b'{"source": "%s/%08d.mp4", "custom_id": "%08d"}' % (folder.encode(), named, named)
                good = number if not kind else good
            lines.write(line + b"\n")
    return planted


@dataclass
class Reader:
    """Goes through a manifest as `submit --skip-bad` does, and holds what is said of lines against what they are."""

    path: Path
    num_lines: int
    seed: int
    told: Counter[str] = field(default_factory=Counter)
    """Bad lines of each kind that it heard of, with the reason that is theirs."""
    missing: int = 0
    wrong: int = 0
    """Lines told twice, or with another's reason, or that are good."""

    def __post_init__(self) -> None:
        self._kinds = enumerate(kinds_of(self.num_lines, self.seed), start=1)

    def items(self) -> Iterator[BatchItem]:
        """The good ones."""
        with Sources([str(self.path)], skip=self._hear, skip_bad=True) as found:
            found.check()
            yield from found
        self.missing += sum(kind in REASONS for _, kind in self._kinds)

    def _hear(self, where: str, reason: str) -> None:
        number = int(where.rpartition(" ")[2])
        for at, kind in self._kinds:
            if at == number and kind in REASONS and REASONS[kind] in reason:
                self.told[kind] += 1
                return
            if at == number:
                break
            self.missing += kind in REASONS
        self.wrong += 1


def differing(planted: Counter[str], said: Mapping[str, Any]) -> int:
    """By how many lines what was said of bad ones differs from what was planted."""
    counts: Counter[str] = Counter(said["told"])
    return int(said["missing"] + said["wrong"]) + sum(abs(planted[kind] - counts[kind]) for kind in REASONS)


# -- roles ------------------------------------------------------------------------------------------------------------


def read(reader: Reader) -> dict[str, Any]:
    """All of it, and nothing else."""
    forget_peak(os.getpid())
    began, began_mb = time.monotonic(), _peak_mb()
    num_items = sum(1 for _ in reader.items())
    seconds = time.monotonic() - began
    return _told(reader) | {"items": num_items, "seconds": seconds, "growth_mb": _peak_mb() - began_mb}


async def hand_in(reader: Reader, given: Given) -> dict[str, Any]:
    """As the gateway takes the same command's items, in one call."""
    queue = given.queue()
    submission = Submission(queue, CONFIG, "", BatchOptions(KEY), CONFIG.max_batch_items)
    for item in reader.items():
        await submission.add(item)
    said = await submission.end()
    await queue.close()
    return _told(reader) | {"added": said.num_added, "known": said.num_known, "conflicts": said.num_conflicts}


def _told(reader: Reader) -> dict[str, Any]:
    return {"told": reader.told, "missing": reader.missing, "wrong": reader.wrong, "peak_mb": _peak_mb()}


def _peak_mb() -> float:
    return peak_bytes(os.getpid()) / 1e6


# -- run --------------------------------------------------------------------------------------------------------------


async def run_manifest(args: argparse.Namespace) -> dict[str, Any]:
    """The part."""
    with tempfile.TemporaryDirectory(prefix="slipstream-manifest-") as name:
        folder = Path(name)
        whole, part = folder / "whole.jsonl", folder / "part.jsonl"
        planted = write_manifest(whole, args.manifest_lines, args.seed)
        say(f"{args.manifest_lines:,} lines written, {whole.stat().st_size / 1e6:,.0f} MB: {dict(planted)}")
        found = await _output_of(await _start("read", str(whole), args.manifest_lines, args.seed))
        say(f"read in {found['seconds']:.0f} s")
        whole.unlink()
        good = planted[""] + planted[AGAIN] + planted[OTHER]
        report = {
            "lines": args.manifest_lines,
            "planted": dict(planted),
            "told": found["told"],
            "lines_per_s": round(args.manifest_lines / found["seconds"]),
            "read_peak_mb": round(found["peak_mb"], 1),
            "read_growth_mb": round(found["growth_mb"], 1),
            "items_wrong": abs(found["items"] - good),
            "bad_wrong": differing(planted, found),
        }
        planted = write_manifest(part, args.manifest_jobs, args.seed + 1)
        async with EmbeddedServer(folder / "redis") as server:
            given = Given(server.url, f"file://{folder / 'results'}", args.manifest_queue_mb << 20, 8 << 20)
            run = _Run(args, given, part, random.Random(args.seed))
            async with asyncio.timeout(TIMEOUT_S), _roles(run):
                said = await _hand_in_disturbed(run)
                return report | _handed_in(planted, said, await _results(run), run)


@dataclass
class _Run:
    """Of the manifest that is handed in."""

    args: argparse.Namespace
    given: Given
    path: Path
    chance: random.Random
    roles: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def words(self) -> tuple[str, ...]:
        """Of a role's command line."""
        given = self.given
        return given.redis, given.folder, str(given.queue_bytes), str(given.file_bytes)

    async def start_role(self, name: str) -> None:
        """One of those of the part `spill`."""
        words = "-m", "bench.spill_roles", name, *self.words
        self.roles[name] = await asyncio.create_subprocess_exec(sys.executable, *words)

    async def start_hand_in(self) -> asyncio.subprocess.Process:
        """From its first line on, as ever."""
        return await _start("hand_in", str(self.path), self.args.manifest_jobs, self.args.seed + 1, *self.words)

    async def batch(self) -> BatchRecord | None:
        """How it stands; None while nothing was handed in."""
        queue = self.given.queue()
        try:
            return await queue.get_batch(BATCH_ID)
        except UnknownBatch:
            return None
        finally:
            await queue.close()

    async def num_undone(self) -> int:
        """Of what was handed in."""
        batch = await self.batch()
        assert batch is not None, "something was handed in"
        return batch.total - batch.counts[JobState.DONE]

    async def num_handed_in(self) -> int:
        """So far."""
        batch = await self.batch()
        return batch.total if batch is not None else 0


@contextlib.asynccontextmanager
async def _roles(run: _Run) -> AsyncIterator[None]:
    try:
        for name in ("compact", "feed", "work"):
            await run.start_role(name)
        yield
    finally:
        for process in run.roles.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _hand_in_disturbed(run: _Run) -> dict[str, Any]:
    """What the last of those who hand in says: the first that is not killed."""
    began, kills = time.monotonic(), run.args.manifest_kills
    for number in range(kills):
        process = await run.start_hand_in()
        due = (number + run.chance.random()) * run.args.manifest_jobs / kills
        while process.returncode is None and await run.num_handed_in() < due:  # noqa: ASYNC110 (in another process)
            await asyncio.sleep(AGAIN_S)
        if process.returncode is None:
            process.kill()
            run.deaths["hand_in"] += 1
        await process.wait()
        run.roles["feed"].kill()
        await run.roles["feed"].wait()
        run.deaths["feed"] += 1
        await asyncio.sleep(RESTART_S)
        await run.start_role("feed")
        say(f"killed once {due:,.0f} were handed in")
    said = await _output_of(await run.start_hand_in())
    run.seconds = time.monotonic() - began
    return said


async def _results(run: _Run) -> Counter[str]:
    """By name, as a listing has them that goes over files and Redis, once all are done."""
    while await run.num_undone():  # noqa: ASYNC110 (they are done in another process)
        await asyncio.sleep(AGAIN_S)
    found: Counter[str] = Counter()
    queue, after = run.given.queue(), 0
    try:
        while True:
            jobs, after = await queue.list_jobs(BATCH_ID, frozenset({JobState.DONE}), after, PAGE)
            found.update(job.custom_id for job in jobs if job.result)
            if not after:
                return found
    finally:
        await queue.close()


def _handed_in(planted: Counter[str], said: Mapping[str, Any], results: Counter[str], run: _Run) -> dict[str, Any]:
    """What came of the manifest that was handed in."""
    return {
        "jobs_lines": run.args.manifest_jobs,
        "jobs_planted": dict(planted),
        "deaths": dict(run.deaths),
        "jobs_s": round(run.seconds, 1),
        "jobs_told": said["told"],
        "hand_in_peak_mb": round(said["peak_mb"], 1),
        "results": len(results),
        "results_missing": max(planted[""] - len(results), 0),
        "results_doubled": results.total() - len(results),
        "results_invented": max(len(results) - planted[""], 0),
        "jobs_bad_wrong": differing(planted, said),
        "conflicts_wrong": abs(said["conflicts"] - planted[OTHER]),
        "known_wrong": abs(said["added"] + said["known"] - planted[""] - planted[AGAIN]),
    }


async def _start(role: str, *words: str | int) -> asyncio.subprocess.Process:
    program = sys.executable, "-m", "bench.archive_manifest", role, *map(str, words)
    return await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)


async def _output_of(process: asyncio.subprocess.Process) -> dict[str, Any]:
    said, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"a process of the part ended with {process.returncode}")
    told: dict[str, Any] = json.loads(said)
    return told


def _main(role: str, path: str, num_lines: str, seed: str, *words: str) -> None:
    configure_logs(role, "warning")
    reader = Reader(Path(path), int(num_lines), int(seed))
    if role == "read":
        told = read(reader)
    else:
        redis, folder, queue_bytes, file_bytes = words
        told = asyncio.run(hand_in(reader, Given(redis, folder, int(queue_bytes), int(file_bytes))))
    print(json.dumps(told))


if __name__ == "__main__":
    _main(*sys.argv[1:])
