"""The part `releases` of scale-check: two releases of Slipstream on one queue, rolled forward and back under a batch.

All begins as the older release. In the middle of a batch targets and drafts move to this one, then the gateways, one by
one; films of a form that the older gateways do not know are handed in while one of those is left, and again when this
release is about to go; all moves back in the other order. At last one target, its draft and its gateway come forward
again, with the older pair in use beside them. Every job must be done once with the text of plain decoding, none may
count as an attempt or a crash, and a film that an older gateway took must have been given back.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import say
from bench.faults.batches import archive_of, list_jobs, submit, wait_ended
from bench.faults.drain import LEASE_S, Harmed, harm_batch, judge, longest_pause_s, undisturbed_texts
from slipstream import RemotePath
from slipstream.archive.messages import BatchItem, Job
from slipstream.archive.queue import JobState, Priority
from tests.support.archive_faults.history import Kind
from tests.support.archive_faults.injector import FaultInjector
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.films import frame_times, make_film
from tests.support.processes import logged
from tests.support.releases import PAIRS, ReleaseCluster, checkout
from tests.support.workload import make_workload

OLDER = "f21a9ef8eb165ace5d847bb3d99f93ad3029977c"
"""Before a gateway could have several targets, and before films of version 4."""
NUM_TOKENS = 60
LAST_JOBS, FILMS = 16, 6
"""Plain jobs of the last step; films of each of the two batches of films."""
SCENES, STEP_S = [16] * 3, 0.125
FILM = {"segments": "fixed:2s", "num_frames": 4, "max_new_tokens": 48, "gate": False}
PATIENCE_S, POLL_S = 300.0, 0.1
ONE_AT_A_TIME = {"target": ("--max-sessions", "1")}
"""So that a gateway with two captions needs both targets."""
MODELS = [f"{service}-{number}" for number in range(PAIRS) for service in ("target", "draft")]
GATEWAYS = FIRST_GATEWAY, LAST_GATEWAY = [f"gateway-{number}" for number in range(PAIRS)]
FORWARD = [*MODELS, *GATEWAYS]
BACK = FORWARD[::-1]
MOVES = len(FORWARD) + len(BACK)
LAST = ["target-0", "draft-0", "gateway-0"]


class _Rolling(FaultInjector):
    """Moves services between releases, and remembers when, for the checker."""

    def __init__(self, cluster: ReleaseCluster, films: Sequence[Sequence[BatchItem]]) -> None:
        super().__init__(cluster, say)
        self.film_batches: list[str] = []
        self.given_back: list[int] = []
        """Runs of films of each batch that an older gateway gave back before the roll went on."""
        self._releases = cluster
        self._films = films

    async def there_and_back(self, instalments: Sequence[Sequence[BatchItem]]) -> str:
        """All services, one by one; each while an instalment of one batch is worked on, whose id it returns when all of
        it has ended."""
        batch = ""
        for (name, release), items in zip(self.steps(), instalments, strict=True):
            if (name, release) == (LAST_GATEWAY, self._releases.newer):
                await self._hand_in_films()
                await self._wait_given_back()
            batch = await self._hand_in(items)
            if (name, release) == (FIRST_GATEWAY, self._releases.older):
                await self._hand_in_films()
            await self.move(name, release)
            if (name, release) == (FIRST_GATEWAY, self._releases.older):
                await self._wait_given_back()
        async with self._releases.captioner(FIRST_GATEWAY) as captioner:
            await wait_ended([captioner], batch, PATIENCE_S)
        return batch

    def steps(self) -> list[tuple[str, Path]]:
        """Who moves to which release, in order."""
        cluster = self._releases
        return [(name, cluster.newer) for name in FORWARD] + [(name, cluster.older) for name in BACK]

    async def _hand_in(self, items: Sequence[BatchItem]) -> str:
        """Returns when somebody works on the batch."""
        async with self._releases.captioner(FIRST_GATEWAY) as captioner, asyncio.timeout(PATIENCE_S):
            batch, archive = await submit(captioner, "rolled", items), await archive_of(captioner)
            while not (await archive.get(batch)).counts.running:  # noqa: ASYNC110 (others work)
                await asyncio.sleep(POLL_S)
        return batch

    async def move(self, name: str, release: Path) -> None:
        """Returns when the service serves from that checkout."""
        began = time.time()
        say(f"{name} moves to {'this' if release == self._releases.newer else 'the older'} release")
        await self._releases.move(name, release)
        self._remember("drain", name if name in GATEWAYS else name.partition("-")[0], began)

    async def _hand_in_films(self) -> None:
        """At the one gateway that knows them."""
        number = len(self.film_batches)
        async with self._releases.captioner(FIRST_GATEWAY) as captioner:
            films = self._films[number]
            self.film_batches.append(await submit(captioner, f"films-{number}", films, priority=Priority.HIGH))

    async def _wait_given_back(self) -> None:
        """Until the last gateway, of the older release then, has given one of these films back, or none is left."""
        batch = self.film_batches[-1]
        async with self._releases.captioner(LAST_GATEWAY) as captioner, asyncio.timeout(PATIENCE_S):
            ids = {job.job_id for job in await list_jobs(captioner, batch)}
            archive = await archive_of(captioner)
            while not (self._num_given_back(ids) or (await archive.get(batch)).is_ended):  # noqa: ASYNC110 (others work)
                await asyncio.sleep(POLL_S)
        self.given_back.append(self._num_given_back(ids))

    def _num_given_back(self, ids: set[str]) -> int:
        entries = logged(self._releases.log(LAST_GATEWAY), "job.retried", cause="RetryLater", counted=False)
        return sum(entry["job_id"] in ids for entry in entries)


async def run_releases(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part."""
    with tempfile.TemporaryDirectory(prefix="slipstream-releases-") as name:
        folder = Path(name)
        try:
            older = checkout(given.older, folder / "older")
        except OSError as error:
            return {"missing": str(error)}
        workload = make_workload(folder / "work", given.release_jobs * MOVES + LAST_JOBS, num_tokens=NUM_TOKENS)
        films = _make_films(workload.video_root)
        options = ClusterOptions(
            workload.pair.target, workload.pair.draft, workload.video_root, PAIRS, lease_s=LEASE_S, flags=ONE_AT_A_TIME
        )
        async with Cluster(replace(options, flags={}), say) as cluster:
            say(f"{len(workload.items)} plain captions and {len(films)} films undisturbed, for comparison")
            expected = await undisturbed_texts(cluster, [_plain(item) for item in workload.items])
            film_texts = await _undisturbed_films(cluster, films)
        async with ReleaseCluster(options, older, say) as releases:
            rolling = _Rolling(releases, (films[:FILMS], films[FILMS:]))
            found = await _roll(releases, rolling, workload.items[:-LAST_JOBS], expected)
            found |= await _come_forward_again(releases, rolling, workload.items[-LAST_JOBS:], expected)
            return report_of(found, await _ended_films(releases, rolling), film_texts) | {"older": given.older}


async def _roll(
    cluster: ReleaseCluster, rolling: _Rolling, items: Sequence[BatchItem], expected: Mapping[str, str]
) -> dict[str, Any]:
    """The batch under which all moves there and back, until it has ended."""
    began, moves = time.monotonic(), len(rolling.steps())
    batch = await rolling.there_and_back([items[number::moves] for number in range(moves)])
    rolled = await judge(cluster, batch, items, expected, rolling)
    wall_s = round(time.monotonic() - began, 1)
    async with cluster.captioner(LAST_GATEWAY) as captioner:
        films = await list_jobs(captioner, rolling.film_batches[-1])
    runs = [run for own in rolled.history.runs().values() for run in own]
    return {
        "rolled": rolled,
        "moves": len(rolling.acts),
        "moves_under_jobs": sum(
            any(run.began <= act.at < (run.ended or act.at) for run in runs) for act in rolling.acts
        ),
        "films_given_back": rolling.given_back,
        "films_that_waited": sum(film.state is not JobState.DONE for film in films),
        "longest_pause_s": longest_pause_s(rolled),
        "wall_s": wall_s,
    }


async def _come_forward_again(
    cluster: ReleaseCluster, rolling: _Rolling, items: Sequence[BatchItem], expected: Mapping[str, str]
) -> dict[str, Any]:
    """Half of all, and a batch for it: a gateway of this release has models of both then."""
    for name in LAST:
        await rolling.move(name, cluster.newer)
    mixed = await harm_batch(cluster, "mixed", items, expected, lambda _: asyncio.sleep(0), rolling)
    taken = [event for event in mixed.history.events if (event.kind, event.process) == (Kind.TAKEN, FIRST_GATEWAY)]
    at_older = {entry["request_id"] for entry in logged(cluster.log("target-1"), "session.opened")}
    return {
        "mixed": mixed,
        "taken_by_this_release": len(taken),
        "of_them_at_the_older_target": sum(f"{event.job_id}-{event.epoch}" in at_older for event in taken),
    }


async def _ended_films(cluster: ReleaseCluster, rolling: _Rolling) -> list[tuple[Job, list[str]]]:
    """All films, when they have ended, and the texts of their segments."""
    found = []
    async with cluster.captioner(FIRST_GATEWAY) as captioner:
        archive = await archive_of(captioner)
        for batch in rolling.film_batches:
            await wait_ended([captioner], batch, PATIENCE_S)
            for job in await list_jobs(captioner, batch):
                parts = [part async for part in archive.parts(batch, job)]
                found.append((job, [part.caption.text for part in parts if part.caption]))
    return found


def report_of(
    found: Mapping[str, Any], films: Sequence[tuple[Job, list[str]]], film_texts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    batches: dict[str, Harmed] = {name: found[name] for name in ("rolled", "mixed")}
    verdicts = [batch.verdict for batch in batches.values()]
    jobs = [job for batch in batches.values() for job in batch.jobs] + [job for job, _ in films]
    report = {name: value for name, value in found.items() if name not in batches} | {
        "jobs": sum(verdict.jobs for verdict in verdicts),
        "committed_once": sum(verdict.committed_once for verdict in verdicts),
        "identical": sum(verdict.identical for verdict in verdicts),
        "films": len(films),
        "films_done": sum(job.state is JobState.DONE for job, _ in films),
        "films_identical": sum(texts == film_texts[job.custom_id] for job, texts in films),
        "counted": sum(job.attempts + job.crashes for job in jobs),
        "reruns": sum(verdict.reruns for verdict in verdicts),
        "stale_commits_refused": sum(verdict.stale_commits_refused for verdict in verdicts),
        "violations": [fault for verdict in verdicts for fault in verdict.violations],
    }
    # A move that nobody noticed, or a roll whose older gateways had no film to leave to others, has shown nothing.
    shown = report["moves_under_jobs"] == MOVES
    shown = shown and all(report["films_given_back"]) and report["films_that_waited"] > 0
    whole = report["films_done"] == report["films_identical"] == 2 * FILMS
    whole = whole and report["identical"] == report["committed_once"] == report["jobs"]
    kept = not report["violations"] and report["counted"] == 0
    return report | {"passed": shown and whole and kept and report["of_them_at_the_older_target"] > 0}


def _make_films(folder: Path) -> list[BatchItem]:
    """Of one film each with a prompt of its own, so that all texts differ."""
    path = folder / "film.mkv"
    path.write_bytes(make_film(SCENES, frame_times(SCENES, STEP_S), codec="ffv1").data)
    prompts = [f"What happens? {number}" for number in range(2 * FILMS)]
    return [BatchItem(f"film-{i}", str(path), {**FILM, "prompt": prompt}) for i, prompt in enumerate(prompts)]


def _plain(item: BatchItem) -> BatchItem:
    return replace(item, caption={**item.caption, "method": "autoregressive"})


async def _undisturbed_films(cluster: Cluster, films: Sequence[BatchItem]) -> dict[str, list[str]]:
    """Texts of the segments by plain decoding, by custom id."""
    async with cluster.captioner() as captioner:
        return {
            film.custom_id: [
                part.text async for part in captioner.caption_segments(RemotePath(film.source), **_plain(film).caption)
            ]
            for film in films
        }
