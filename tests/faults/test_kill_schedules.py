"""Three fixed schedules of `python -m bench.faults`: a gateway and the target killed in the middle of jobs, and a
gateway that wakes up and commits what is no longer its own."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from bench.faults.drain import Harmed, harm_batch, undisturbed_texts
from slipstream.archive.queue import JobState
from tests.support.archive_faults.injector import FaultInjector
from tests.support.cluster import Cluster, ClusterOptions
from tests.support.workload import Workload, make_workload

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEASE_S = 3.0
NUM_JOBS = 8
NUM_TOKENS = 40


@dataclass
class HarmedArchive:
    """Two gateways with one queue; every batch has jobs that none had before."""

    cluster: Cluster
    workload: Workload
    batches: int = 0

    async def drain(self, harm: Callable[[FaultInjector], Awaitable[None]]) -> Harmed:
        """A batch that is harmed once somebody works on it."""
        items = self.workload.items[self.batches * NUM_JOBS :][:NUM_JOBS]
        self.batches += 1
        expected = await undisturbed_texts(self.cluster, items)
        assert len(set(expected.values())) == NUM_JOBS

        async def once_busy(injector: FaultInjector) -> None:
            await injector.wait_busy()
            await harm(injector)

        harmed = await harm_batch(self.cluster, f"batch-{self.batches}", items, expected, once_busy)
        assert [(job.state, job.error) for job in harmed.history.entries if job.state is not JobState.DONE] == []
        # How soon a lost job runs again depends on the machine; `make faults` measures that.
        assert [fault for fault in harmed.verdict.violations if ": recovery: " not in fault] == []
        return harmed


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def archive(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HarmedArchive]:
    workload = make_workload(tmp_path_factory.mktemp("faults") / "work", 3 * NUM_JOBS, num_tokens=NUM_TOKENS)
    options = ClusterOptions(workload.pair.target, workload.pair.draft, workload.video_root, lease_s=LEASE_S)
    async with Cluster(options) as cluster:
        yield HarmedArchive(cluster, workload)


async def test_a_gateway_that_is_killed_loses_no_job(archive: HarmedArchive) -> None:
    async def kill_the_busiest(injector: FaultInjector) -> None:
        await injector.kill(await injector.wait_busy())

    harmed = await archive.drain(kill_the_busiest)
    assert harmed.verdict.lost_jobs > 0


@pytest.mark.long
async def test_a_target_that_is_killed_loses_no_job(archive: HarmedArchive) -> None:
    harmed = await archive.drain(lambda injector: injector.kill("target"))
    assert harmed.verdict.reruns > 0


@pytest.mark.long
async def test_a_gateway_that_wakes_up_cannot_commit_what_others_did_meanwhile(archive: HarmedArchive) -> None:
    harmed = await archive.drain(lambda injector: injector.make_zombie())
    assert harmed.verdict.stale_commits_refused > 0
