"""What the processes of a stack hold of captions that are over: resident memory, and frames that are still open."""

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil  # type: ignore[import-untyped]

from slipstream.stack.process import ServiceProcess
from tests.support.gateway_client import Captioned, caption
from tests.support.media import ClipSpec, even_times_ms, make_clip

SIDE = 448
"""Width and height of frames: the largest that a gateway keeps."""
MIB = 2**20
SLACK_BYTES = 20 * MIB
"""What a process may hold more than before: caches of allocators, the log's buffers."""
MOMENTS = ("decode", "sent", "encode", "prefill", "text")
"""When callers hang up. "sent": all is decoded, and the frames are on their way to the models."""
LOOK_S = 0.02


@dataclass(frozen=True)
class Held:
    """Of the services' own processes by name, and of all that they started."""

    resident: Mapping[str, int]
    """Bytes."""
    num_frame_memories: int
    """Memories of frames that are open or mapped, the decoders' among them."""

    def grown(self, before: "Held") -> dict[str, int]:
        """Bytes by process."""
        return {name: self.resident[name] - before.resident[name] for name in self.resident}

    def is_like(self, before: "Held") -> bool:
        """Nothing of what came in between is left."""
        return not self.num_frame_memories and max(self.grown(before).values()) <= SLACK_BYTES


def look(processes: Mapping[str, ServiceProcess]) -> Held:
    """What is held now."""
    own = {name: psutil.Process(process.pid) for name, process in processes.items()}
    family = [member for process in own.values() for member in (process, *process.children(recursive=True))]
    resident = {name: int(process.memory_info().rss) for name, process in own.items()}
    return Held(resident, sum(_frame_memories(member.pid) for member in family))


async def rested(processes: Mapping[str, ServiceProcess], before: Held, timeout_s: float) -> Held:
    """What is held once that is like before, or after so long."""
    held = look(processes)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not held.is_like(before):
                await asyncio.sleep(LOOK_S)
                held = look(processes)
    return held


def write_clip(folder: Path, num_frames: int) -> Path:
    """A clip with that many frames of full size."""
    path = folder / f"large-{num_frames}.mp4"
    spec = ClipSpec(even_times_ms(num_frames), width=SIDE, height=SIDE, codec_options={"preset": "ultrafast"})
    path.write_bytes(make_clip(spec))
    return path


async def finish_and_hang_up(
    channel: grpc.aio.Channel, clip: Path, num_frames: Sequence[int], max_new_tokens: int = 16
) -> None:
    """For each number of frames a caption that is finished, then one whose caller hangs up at the next moment."""
    moments = itertools.cycle(MOMENTS)
    for frames in num_frames:
        options: dict[str, Any] = {"num_frames": frames, "max_new_tokens": max_new_tokens}
        assert (await caption(channel, path=str(clip), **options)).summaries
        await hung_up(channel, clip, next(moments), **options)


async def hung_up(channel: grpc.aio.Channel, clip: Path, moment: str, **options: Any) -> None:
    """One caption whose caller leaves at this moment, or at the text where the moment does not come."""

    def has_come(captioned: Captioned) -> bool:
        stage = captioned.stages[-1]
        decoded = stage.stage == "decode" and 0 < stage.done == stage.total
        now = {"sent": decoded, "decode": stage.stage == "decode" and stage.done > 0}
        return now.get(moment, moment == stage.stage) or bool(captioned.token_ids)

    assert not (await caption(channel, path=str(clip), on_event=has_come, **options)).summaries


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """What goes within, goes with its last user."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _frame_memories(pid: int) -> int:
    """How many memories of frames a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add((str(link.readlink()), link.stat().st_ino))
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, _, _, inode, *name = line.split(maxsplit=5)
            found.add((name[0] if name else "", int(inode)))
    return len({inode for name, inode in found if name.startswith("/memfd:frames")})
