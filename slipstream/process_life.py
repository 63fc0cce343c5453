"""A process's life: it ends with the one that started it, says so before it runs out of file descriptors, and has its
threads for itself while names lead nowhere."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import InvalidConfig, machine_lacks
from slipstream.logs import get_logger, heard

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


# -- event loop -------------------------------------------------------------------------------------------------------


MOST_LOOKUPS = 64
"""Threads that wait for answers at once: addresses of media may have names without end."""
LACKS_S = 10.0
"""Between two lines that say that connections cannot be taken."""


class ServiceLoop(asyncio.SelectorEventLoop):
    """Fills no log, and looks names up on threads of their own, one for each question however often it is asked.

    Where no server of names answers, a look-up takes its thread for a minute, though whoever asked has given up long
    before. The loop's own threads, six on two cores, are for work that must go on meanwhile, and its end waits for
    them."""

    def __init__(self) -> None:
        super().__init__()
        self._lookups: dict[tuple[Any, ...], asyncio.Future[Any]] = {}
        self._silent_until = 0.0

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Of a connection that finds no descriptor left Python tells as often as others may wait behind it, each second
        anew."""
        error = context.get("exception")
        if "socket" in context and error is not None and machine_lacks(error):
            if self.time() < self._silent_until:
                return
            self._silent_until = self.time() + LACKS_S
        super().call_exception_handler(context)

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        question = (host, port, family, type, proto, flags)
        if question not in self._lookups:
            if len(self._lookups) >= MOST_LOOKUPS:
                raise socket.gaierror(socket.EAI_AGAIN, f"{MOST_LOOKUPS} other names wait for an answer")
            answer = self._lookups[question] = heard(self.create_future())
            answer.add_done_callback(lambda _: self._lookups.pop(question))
            threading.Thread(target=self._look_up, args=(question, answer), name="names", daemon=True).start()
        return await asyncio.shield(self._lookups[question])

    def _look_up(self, question: tuple[Any, ...], answer: asyncio.Future[Any]) -> None:
        outcome: tuple[Any, ...]
        try:
            outcome = answer.set_result, socket.getaddrinfo(*question)
        except Exception as error:
            outcome = answer.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.call_soon_threadsafe(*outcome)
