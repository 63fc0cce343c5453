"""A captured decoder of a gateway that is not root: walls are what a user namespace gives, if the kernel allows one."""

import ctypes
import os
import sys

from slipstream.video import child
from slipstream.video.confine import confine
from tests.support.captured_decoder import PR_SET_DUMPABLE, serve

USER = 10_001


def confine_as_user(memory_bytes: int, cpu_s: int, threads: int, parent_pid: int) -> tuple[str, ...]:
    """Gives root up first, as the start of a container does."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of user had undone it; a fresh program has it
    return confine(memory_bytes, cpu_s, threads, parent_pid)


if __name__ == "__main__":
    child._serve, child.confine = serve, confine_as_user  # type: ignore[attr-defined]
    child.main(*map(int, sys.argv[1:]))
