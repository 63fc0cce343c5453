"""The part `audit`: altered results are found by `slipstream archive audit`, and nobody is accused who is innocent.

A batch of clips and a film is captioned by target and draft. Then texts are altered: in the store with every digest
that could give them away, in the store without, and in a segment of an export. The command makes results again by
another archive, whose target is a process of its own and has no draft.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import held_out_clips, say
from bench.faults.batches import list_jobs, submit, wait_ended
from slipstream.archive.messages import BatchItem, Job
from slipstream.archive.queue import JobState
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.films import frame_times, make_film
from tests.support.planted import forge, planted_text

KEY, FILM, PLANTED = "audited", "film.mkv", "A text that no model said."
SCENES, STEP_S = [40] * 4, 0.125
ALL, FEW = "100%", "1%"
TIMEOUT_S = 1800.0
ALTERED, DIFFERS = "altered", "differs"


@dataclass(frozen=True)
class Accused:
    """A text that an audit does not believe."""

    custom_id: str
    verdict: str
    where: str = ""


@dataclass(frozen=True)
class Audited:
    """What one audit said."""

    status: int
    accused: frozenset[Accused]
    replayed: int
    same: int


@dataclass(frozen=True)
class _Run:
    """An archive with the batch, and the other one."""

    cluster: Cluster
    replayer: Cluster
    folder: Path
    jobs: Sequence[Job]
    seed: int

    async def audit(self, batch: str, share: str) -> Audited:
        """By the command."""
        other = self.replayer.processes["gateway-0"].address
        words = (batch, "--share", share, "--seed", str(self.seed), "--json", "--replay-gateway", other)
        status, lines = await self.command("audit", *words)
        *findings, summary = map(json.loads, lines)
        accused = (Accused(one["custom_id"], one["verdict"], one["where"]) for one in findings)
        return Audited(status, frozenset(accused), summary["replayed"], summary["same"])

    async def command(self, *words: str) -> tuple[int, list[str]]:
        """Exit status and lines of one of `slipstream archive`."""
        gateway = self.cluster.processes["gateway-0"].address
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "slipstream.cli", "archive", *words, "--gateway", gateway),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
        return process.returncode or 0, said.decode().splitlines()


async def run_audit(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part."""
    async with _captioned(given) as run:
        sound = await run.audit(KEY, ALL)
        say(f"untouched: {sound.replayed} made again, {sound.same} texts the same")
        rounds = [await each for each in (_in_store(run), _without_receipt(run), _in_export(run))]
    return {
        "results": len(run.jobs),
        "untouched_replayed": sound.replayed,
        "untouched_texts": sound.same,
        "untouched_accused": len(sound.accused) + (sound.status != 0),
        "planted": len(rounds),
        **{name: sum(wrong(*each)[name] for each in rounds) for name in ("planted_missed", "others_accused")},
    }


def wrong(planted: Accused, audited: Audited) -> dict[str, int]:
    """Whether an altered text was missed, and how many others were accused."""
    missed = planted not in audited.accused or audited.status == 0
    return {"planted_missed": int(missed), "others_accused": len(audited.accused - {planted})}


@asynccontextmanager
async def _captioned(given: argparse.Namespace) -> AsyncIterator[_Run]:
    with tempfile.TemporaryDirectory(prefix="slipstream-audit-") as name:
        folder, asked = Path(name), {"num_frames": 8, "max_new_tokens": 48}
        clips = [shutil.copy(clip, folder) for clip in held_out_clips(given.audit_clips)]
        items = [BatchItem(Path(clip).name, str(clip), asked) for clip in clips]
        film = make_film(SCENES, frame_times(SCENES, STEP_S), codec="ffv1")
        (folder / FILM).write_bytes(film.data)
        items.append(BatchItem(FILM, str(folder / FILM), asked | {"segments": f"fixed:{SCENES[0] * STEP_S}s"}))
        async with AsyncExitStack() as exits:
            first, other = [
                await exits.enter_async_context(
                    Cluster(ClusterOptions(given.target, draft, folder, gateways=1, lease_s=15.0), say)
                )
                for draft in (given.draft, None)
            ]
            captioner = await exits.enter_async_context(first.captioner())
            batch = await submit(captioner, KEY, items)
            await wait_ended([captioner], batch, TIMEOUT_S)
            jobs = await list_jobs(captioner, batch)
            if bad := [job for job in jobs if job.state is not JobState.DONE]:
                raise SystemExit(f"{bad[0].custom_id}: {bad[0].error}")
            yield _Run(first, other, folder, jobs, given.seed)


async def _in_store(run: _Run) -> tuple[Accused, Audited]:
    """With every digest: only a replay can tell."""
    job = run.jobs[0]
    async with planted_text(run.cluster.redis_url, job.job_id, PLANTED):
        return Accused(job.custom_id, DIFFERS), await run.audit(KEY, ALL)


async def _without_receipt(run: _Run) -> tuple[Accused, Audited]:
    """Its receipt tells, whether it is in the sample or not."""
    job = run.jobs[1]
    async with planted_text(run.cluster.redis_url, job.job_id, PLANTED, with_receipt=False):
        found = await run.audit(KEY, FEW)
    as_replayed = Accused(job.custom_id, DIFFERS)  # it may be in the sample, too
    return Accused(job.custom_id, ALTERED), replace(found, accused=found.accused - {as_replayed})


async def _in_export(run: _Run) -> tuple[Accused, Audited]:
    """A segment of the film, with its digest, in a file that somebody handed on."""
    path = run.folder / "export.jsonl"
    await run.command("export", KEY, "--output", str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    (film,) = (record for record in records if record["custom_id"] == FILM)
    forge(film["parts"][2], PLANTED)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Accused(FILM, DIFFERS, "segment 2"), await run.audit(str(path), ALL)
