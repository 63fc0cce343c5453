"""A disk for the queue's store that can be filled up and freed: a small tmpfs, which needs root."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

SIZE_MB = 16
BALLAST = "ballast"
LEFT_BYTES = 48 * 1024
"""Room that is left when the disk is said to be full: for a few writes."""


def is_possible() -> bool:
    """Whether this process may mount."""
    return os.geteuid() == 0


@contextlib.asynccontextmanager
async def small_disk(folder: Path) -> AsyncIterator[Path]:
    """A new file system at `folder`, which exists; gone at the end."""
    await _run("mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        await _run("umount", "-l", str(folder))


def fill(folder: Path) -> None:
    """Leaves next to no room."""
    room = os.statvfs(folder)
    with (folder / BALLAST).open("wb") as ballast:
        ballast.write(bytes(max(0, room.f_bavail * room.f_frsize - LEFT_BYTES)))


def free(folder: Path) -> None:
    """Makes room again."""
    (folder / BALLAST).unlink()


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command)
    if await process.wait():
        raise OSError(f"{' '.join(command)} failed")
