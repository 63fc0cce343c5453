"""A process's life: it ends with the one that started it, and says so before it runs out of file descriptors."""

import asyncio
import os
import resource
from collections.abc import Mapping, Sequence

from slipstream.errors import InvalidConfig
from slipstream.logs import get_logger

# -- end --------------------------------------------------------------------------------------------------------------

PARENT_PID_VARIABLE = "SLIPSTREAM_PARENT_PID"
"""Set by whoever starts a service that must not outlive it."""
PARENT_CHECK_S = 0.5


def parent_pid(environ: Mapping[str, str]) -> int | None:
    """The process that this one must not outlive, if there is one. Raises `InvalidConfig`."""
    text = environ.get(PARENT_PID_VARIABLE, "")
    if text and not text.isdecimal():
        raise InvalidConfig(f"{PARENT_PID_VARIABLE}: {text!r} is no process id")
    return int(text) if text else None


async def wait_for_end(ends: Sequence[asyncio.Event], parent: int | None) -> None:
    """Returns when one of the events is set, or when the parent is no more."""
    waiting = [asyncio.create_task(event.wait()) for event in ends]
    try:
        while not any(end.done() for end in waiting):
            timeout_s = PARENT_CHECK_S if parent else None
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if parent and os.getppid() != parent:
                return
    finally:
        for end in waiting:
            end.cancel()


# -- file descriptors -------------------------------------------------------------------------------------------------

# Connections, videos and frames are descriptors. Without one left a service neither accepts nor opens anything.

MAX_DESCRIPTORS = 65_536
"""More than any service holds, where the system would grant a billion: others size tables by this limit."""
LOW_SHARE = 0.8
LOOK_S = 2.0


def raise_descriptor_limit() -> None:
    """Lets this process hold as many descriptors as the system grants it. A terminal grants 1024 unless asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Descriptors:
    """Those that this process holds; says so in the log before there are no more."""

    what = "descriptors"

    def __init__(self) -> None:
        self.used = 0
        self._is_low = False

    @property
    def limit(self) -> int:
        """May be changed from outside while the process runs."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look(_num_descriptors())
            await asyncio.sleep(LOOK_S)

    def look(self, used: int | None) -> None:
        """`used`: how many there are; None where there was not even one left for counting them."""
        self.used = self.limit if used is None else used
        is_low = self.used >= LOW_SHARE * self.limit
        if is_low and not self._is_low:
            get_logger().error("descriptors.low", used=self.used, limit=self.limit)
        elif self._is_low and not is_low:
            get_logger().info("descriptors.regained", used=self.used, limit=self.limit)
        self._is_low = is_low


def _num_descriptors() -> int | None:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None
