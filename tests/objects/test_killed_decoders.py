"""A film in a bucket whose decoder is killed in the middle of its reads: each segment once, its text the same."""

import os
import signal
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from slipstream.archive.messages import BatchItem, BatchOptions, JobPart
from slipstream.archive.queue import JobState
from slipstream.stack.local import Stack
from slipstream.stack.process import ServiceProcess
from slipstream.stack.redis_server import EmbeddedServer
from tests.support.archive_gateways import ArchiveGateways
from tests.support.films import make_noise_film
from tests.support.object_store import ObjectServer, object_server
from tests.support.processes import STOP_S, eventually, logged
from tests.support.variants import some

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEGMENTS, SECONDS = 8, 4
CAPTION = {"num_frames": 4, "max_new_tokens": 16, "segments": f"fixed:{SECONDS}s"}
DECODER = "slipstream.video.child"


class Run(ArchiveGateways):
    """A gateway of an archive that reads from a bucket."""

    def __init__(self, *given: object, objects: ObjectServer, film: bytes) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.objects, self.film = objects, film
        self.num_films = 0

    async def hand_in(self, gateway: ServiceProcess) -> str:
        """The film as an object that no cache has; returns its batch."""
        self.num_films += 1
        name = f"{self.num_films}.mp4"
        address = self.objects.put(f"shown/{name}", self.film + bytes(8 * self.num_films))
        async with self.client(gateway) as client:
            return (await client.submit(BatchOptions(caption=CAPTION), [BatchItem(name, address)])).batch_id

    def decoders(self, gateway: ServiceProcess) -> list[int]:
        """Process ids."""
        return [child.pid for child in psutil.Process(gateway.pid).children() if DECODER in child.cmdline()]


@pytest.fixture(scope="module")
def film() -> bytes:
    """Of many bytes a second."""
    return make_noise_film(25 * SEGMENTS * SECONDS, size=(160, 128))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def run(stack: Stack, film: bytes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Run]:
    folder = tmp_path_factory.mktemp("killed")
    async with object_server() as objects, EmbeddedServer(folder / "redis") as redis:
        made = Run(folder, redis.url, stack.processes["target"], objects=objects, film=film)
        try:
            yield made
        finally:
            for process in made.processes:
                await process.stop(STOP_S)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(run: Run) -> ServiceProcess:
    return await run.start_gateway("--object-roots", "s3://films/shown", **run.objects.environment)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(run: Run, gateway: ServiceProcess) -> tuple[list[str], int]:
    """Texts, and the bytes that were read for them."""
    before = run.objects.given
    _, parts = await run.ended(gateway, await run.hand_in(gateway))
    return texts_of(parts), run.objects.given - before


def texts_of(parts: list[JobPart]) -> list[str]:
    assert [part.number for part in parts] == list(range(SEGMENTS))
    return [part.caption.text if part.caption else f"error: {part.error}" for part in parts]


@pytest.mark.parametrize("share", some([0.1, 0.5, 0.8], keep=(0.5,)))
async def test_a_decoder_killed_in_the_middle_of_its_reads_costs_nothing(
    run: Run, gateway: ServiceProcess, undisturbed: tuple[list[str], int], share: float
) -> None:
    texts, num_bytes = undisturbed
    assert all(texts) and num_bytes > 1_000_000
    run.objects.pause_after = round(share * num_bytes)
    lost_before = len(logged(gateway.log_path, "decoder.lost", in_job=True))
    batch_id = await run.hand_in(gateway)
    try:
        await run.objects.paused()
        for pid in run.decoders(gateway):
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: len(logged(gateway.log_path, "decoder.lost", in_job=True)) > lost_before, STOP_S)
    finally:
        run.objects.resume()
    job, parts = await run.ended(gateway, batch_id)
    assert job.state is JobState.DONE and texts_of(parts) == texts
    assert logged(gateway.log_path, "decoder.retried")
    opened = [name[1] for name in run.names_of(job.job_id)]
    assert sorted(opened) == sorted({f"s{number}" for number in range(SEGMENTS)}), "each was captioned once"
