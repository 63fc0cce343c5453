"""A file system that hangs, as a disk of the network does whose server is gone: FUSE whose server never answers."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MNT_FORCE, MNT_DETACH = 1, 2
FUSE = Path("/dev/fuse")


def can_hang() -> bool:
    """Whether this process may mount one."""
    return os.geteuid() == 0 and os.access(FUSE, os.R_OK | os.W_OK)


@contextmanager
def hung_mount(folder: Path) -> Iterator[None]:
    """Whoever looks below the folder waits, until the end of this. Raises OSError where mounting is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open(FUSE, os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"hung", os.fsencode(folder), b"fuse", 0, options) != 0:
            raise OSError(ctypes.get_errno(), "mount")
        try:
            yield
        finally:
            libc.umount2(os.fsencode(folder), MNT_FORCE | MNT_DETACH)
    finally:
        os.close(device)  # those who wait are told that there is nobody
