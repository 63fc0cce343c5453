"""The demo's archive: a few clips through the queue, against the captions that the same gateway gives directly."""

from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from rich import box
from rich.table import Table

from slipstream.cli.archive.client import ArchiveClient
from slipstream.cli.archive.figures import overall
from slipstream.cli.archive.records import NAMES
from slipstream.cli.archive.submit import Submitted, submit
from slipstream.cli.archive.watch import watch
from slipstream.cli.client import caption
from slipstream.errors import InvalidConfig
from slipstream.jobs.embedded import find_server
from slipstream.rpc.v1 import archive_pb2 as pb
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions

MAX_CLIPS = 4
MAX_FRAMES = 8
KEY = "demo"


@dataclass(frozen=True)
class ArchiveResult:
    """The batch at its end, its jobs, and by custom id the text that the Caption call gave for the same options."""

    batch: pb.Batch
    jobs: tuple[pb.Job, ...]
    direct: dict[str, str]

    @property
    def identical(self) -> bool:
        """Whether every clip has a caption in the archive, and it is the directly given one."""
        return {job.custom_id: job.summary.text for job in self.jobs if job.HasField("summary")} == self.direct

    def document(self) -> dict[str, Any]:
        """What the demo's JSON says of it."""
        return {
            "jobs": self.batch.counts.total,
            "done": self.batch.counts.done,
            "identical": self.identical,
            "videos_per_hour": overall(self.batch).videos_per_h,
        }

    def table(self) -> Table:
        """One row a job."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
        table.title = "the same gateway's archive"
        for name in ("clip", "state", "tokens", "first token", "runs", "identical"):
            table.add_column(name, justify="left" if name in ("clip", "state") else "right", no_wrap=True)
        for job in self.jobs:
            same = job.summary.text == self.direct[job.custom_id]
            first = f"{job.summary.timings.first_token_s:.2f} s"
            row = str(job.summary.num_tokens), first, str(job.receipt.runs), "yes" if same else "NO"
            table.add_row(job.custom_id, NAMES.get(job.state), *row)
        return table


def has_queue_server() -> bool:
    """Whether a server for the queue is at hand; the demo has no archive without one."""
    try:
        find_server()
    except InvalidConfig:
        return False
    return True


async def archive_clips(
    channel: grpc.aio.Channel, videos: Sequence[Path], frames: int, max_new_tokens: int
) -> ArchiveResult:
    """Captions the first clips directly, then hands them to the archive and waits for it."""
    options = CaptionOptions(num_frames=min(frames, MAX_FRAMES), max_new_tokens=max_new_tokens)
    chosen = videos[:MAX_CLIPS]
    direct = {video.stem: await _text(channel, video, options) for video in chosen}
    client = ArchiveClient(channel)
    items = [pb.BatchItem(custom_id=video.stem, source=str(video.resolve())) for video in chosen]
    submitted = Submitted()
    await submit(client, pb.BatchOptions(key=KEY, caption=options), items, submitted, lambda handed_in, obstacle: None)
    batch = await watch(client, submitted.batch_id, nullcontext(lambda snapshot: None))
    async with aclosing(client.jobs(submitted.batch_id)) as jobs:
        return ArchiveResult(batch, tuple([job async for job in jobs]), direct)


async def _text(channel: grpc.aio.Channel, video: Path, options: CaptionOptions) -> str:
    text = ""
    async with aclosing(caption(channel, video, options)) as events:
        async for event in events:
            text = event.summary.text
    return text
