"""Confined processes as their parent sees them: how one is started, heard and ended, and why it ended; and the decoder,
which is given one job at a time.

A process is never tried again here; pools do that, `slipstream.video.pool` and `slipstream.documents.pool`.
"""

import asyncio
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

import slipstream
from slipstream.errors import LimitExceeded, ServiceUnavailable, SlipstreamError, UnreadableVideo
from slipstream.logs import get_logger, heard
from slipstream.video.confine import PROTECTIONS
from slipstream.video.messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    BadAnswer,
    DecodeRequest,
    Planned,
    Progress,
    Ready,
    Refused,
    Sampled,
    SampledVideo,
    SampledWindows,
    Started,
    parse_answer,
)
from slipstream.video.printed_output import PrintedOutput

ResultT = TypeVar("ResultT")

# -- confined process -------------------------------------------------------------------------------------------------

START_S = 60.0
"""A process that is not ready by then is broken."""
KILL_SLACK_S = 1.0
"""How much longer than its limit a process may take to notice the limit by itself."""
_EXIT_S = 5.0
"""How long a process that hung up may take to exit. On a busy machine one that was killed takes its time, too, and its
status is what tells that from a crash, after which its file is not tried again."""
SENT_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that decoding never causes by itself. The kernel sends SIGKILL when the machine lacks memory."""
OnReady = Callable[[tuple[str, ...]], None]
"""Told once what was taken from a process, some of `slipstream.video.confine.PROTECTIONS`."""


class ConfinedProcess(ABC):
    """A running child that reads what strangers send, and the socket to it."""

    def __init__(
        self, kind: str, module: str, limits: Sequence[int], on_ready: OnReady, environment: Mapping[str, str] = {}
    ) -> None:
        """Starts the process. Call from the event loop's own thread: the process dies with the thread that made it.

        Args:
            kind: "decoder" or "reader", of which its log events are.
            module: what it runs, told the socket's number, the `limits` and this process's id.
            environment: more than `child_environment`.
        """
        self.is_killed = False
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        read_end, write_end = os.pipe()
        try:
            numbers = map(str, (theirs.fileno(), *limits, os.getpid()))
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-m", module, *numbers],
                cwd="/",
                env={**child_environment(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                pass_fds=[theirs.fileno()],
            )
        except OSError:
            os.close(read_end)
            self._connection.close()
            raise
        finally:
            os.close(write_end)
            theirs.close()
        self._output = PrintedOutput(read_end, self.process.pid, kind)
        self._loop = asyncio.get_running_loop()
        self._starting = heard(self._loop.create_task(self._start(on_ready)))

    @property
    def is_alive(self) -> bool:
        """Whether it may take a job; it can still end before it does."""
        return not self.is_killed and self.process.poll() is None

    async def wait_ready(self) -> None:
        """Returns when the process waits for work. Raises ServiceUnavailable when it does not come to that."""
        await asyncio.shield(self._starting)

    def kill(self) -> None:
        """Ends the process at once; `reap` must follow. May be called again."""
        if not self.is_killed:
            self.is_killed = True
            self._starting.cancel()
            self.process.kill()
            self._output.close()
            if not self._loop.is_closed():
                self._loop.remove_reader(self._connection)  # before another descriptor gets its number
            self._connection.close()

    def reap(self) -> int:
        """Waits for the end of a killed process and returns its exit status. Blocks for some milliseconds."""
        return self.process.wait()

    @abstractmethod
    async def _start(self, on_ready: OnReady) -> None:
        """Waits until it says that it is ready, and tells `on_ready`. Raises ServiceUnavailable."""

    async def _receive(self, max_bytes: int) -> bytes:
        """The next message, or one byte more than it may have; none when the process has hung up."""
        try:
            return await self._loop.sock_recv(self._connection, max_bytes + 1)
        except OSError:
            return b""

    async def _end(self) -> tuple[int, str]:
        """How the process ended after it hung up: its exit status, and that in words. One that lives on is killed and
        counts as failed."""
        status = await asyncio.to_thread(self._exit_status)
        return status, signal.Signals(-status).name if status < 0 else f"exit status {status}"

    def _exit_status(self) -> int:
        try:
            return self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return 1


class Reaping:
    """Killed processes that are not known to be gone. A thread waits for each."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[int], ConfinedProcess] = {}

    def add(self, process: ConfinedProcess) -> None:
        """Waits for its end off the event loop."""
        task = asyncio.create_task(asyncio.to_thread(process.reap))
        self._tasks[task] = process
        task.add_done_callback(self._tasks.pop)

    def finish(self) -> None:
        """Waits for all, as an event loop that ends would leave them."""
        for process in self._tasks.values():
            process.reap()


class ProtectionWatch:
    """`OnReady` of all processes of a pool: tells what they are confined by when that is new; logs what is missing."""

    def __init__(self, kind: str, on_confined: Callable[[dict[str, bool]], None]) -> None:
        self._kind = kind
        self._on_confined = on_confined
        self._confined: tuple[str, ...] | None = None

    def __call__(self, confined: tuple[str, ...]) -> None:
        if confined == self._confined:
            return
        self._confined = confined
        self._on_confined({name: name in confined for name in PROTECTIONS})
        if missing := [name for name in PROTECTIONS if name not in confined]:
            get_logger().warning(f"{self._kind}.unprotected", missing=missing)


# -- decoder ----------------------------------------------------------------------------------------------------------

OnProgress = Callable[[int, int], None]
Read = Callable[[Answer, int], ResultT]
"""Makes what the caller wants of an answer and the memory for frames. Raises BadAnswer for one to another question."""


@dataclass(frozen=True)
class DecoderSpec:
    """How decoders are started."""

    memory_bytes: int
    """Address space on top of what a fresh decoder has mapped, frames included."""
    cpu_s: int
    """CPU time of one decoder's life."""
    threads: int = 1
    """Threads that decode; with one, a decoder can start no other."""
    module: str = "slipstream.video.child"
    """What to run; tests put a misbehaving one here."""


class DecoderLost(Exception):
    """The process ended before it answered."""

    def __init__(self, error: SlipstreamError, *, may_retry: bool) -> None:
        super().__init__(str(error))
        self.error = error
        """What to tell the caller if this was the last try."""
        self.may_retry = may_retry
        """Whether the file is probably not to blame."""


class Decoder(ConfinedProcess):
    """A running decoder. Once it was lost, timed out, talked nonsense or was cancelled, `is_alive` is False."""

    def __init__(self, spec: DecoderSpec, on_ready: OnReady = lambda confined: None) -> None:
        """See `ConfinedProcess`."""
        self.owner: str | None = None
        """Whose videos it has seen; None: nobody's yet."""
        self.num_jobs = 0
        super().__init__("decoder", spec.module, (spec.memory_bytes, spec.cpu_s, spec.threads), on_ready)

    async def _start(self, on_ready: OnReady) -> None:
        try:
            async with asyncio.timeout(START_S):
                answer = parse_answer(await self._hear(), None)
        except (TimeoutError, BadAnswer) as failure:
            self.process.kill()
            get_logger().error("decoder.not_started", decoder=self.process.pid, reason=repr(failure))
            raise ServiceUnavailable("the video decoder does not start; the server's log says why") from None
        confined = answer.confined if isinstance(answer, Ready) else ()
        get_logger().debug("decoder.started", decoder=self.process.pid, confined=confined)
        on_ready(confined)

    async def run(
        self, video: int, request: DecodeRequest, on_progress: OnProgress | None, read: Read[ResultT]
    ) -> ResultT:
        """What comes of the file behind the descriptor `video`. Frames lie in memory shared with the process.

        Raises UnreadableVideo, LimitExceeded or InvalidRequest about the file, and DecoderLost.
        """
        self.num_jobs += 1
        frames = sealed_memory(request.frames_bytes)
        try:
            async with asyncio.timeout(request.limits.timeout_s + KILL_SLACK_S):
                answer = await self._ask(video, frames, request, on_progress)
            if not isinstance(answer, Refused):
                return read(answer, frames)
        except TimeoutError:
            self.kill()
            get_logger().warning("decoder.timed_out", decoder=self.process.pid)
            raise _took_too_long(request) from None
        except BadAnswer as failure:
            self.kill()
            get_logger().error("decoder.bad_answer", decoder=self.process.pid, reason=str(failure))
            raise UnreadableVideo("the decoder broke on this file; it is damaged, export it again") from None
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(frames)
        raise answer.exception()

    async def _ask(self, video: int, frames: int, request: DecodeRequest, on_progress: OnProgress | None) -> Answer:
        """Its last answer; what it refuses is one too."""
        has_started, num_reports = False, 0
        try:
            socket.send_fds(self._connection, [request.encode()], [video, frames])
        except OSError:
            raise await self._lost(request, has_started) from None
        while True:
            message = await self._hear()
            if not message:
                raise await self._lost(request, has_started)
            answer = parse_answer(message, request)
            if not isinstance(answer, Ready | Started | Progress):
                return answer
            num_reports += 1
            if isinstance(answer, Ready) or num_reports > 1 + 2 * request.most_frames:
                raise BadAnswer("it reports more than there is")
            has_started = True
            if isinstance(answer, Progress) and on_progress is not None:
                on_progress(answer.done, answer.total)

    async def _hear(self) -> bytes:
        """The next message; none when the process has hung up."""
        message = await self._receive(MAX_MESSAGE_BYTES)
        if len(message) > MAX_MESSAGE_BYTES:
            raise BadAnswer("an answer is too long")
        return message

    async def _lost(self, request: DecodeRequest, has_started: bool) -> DecoderLost:
        status, cause = await self._end()
        get_logger().warning("decoder.lost", decoder=self.process.pid, cause=cause, in_job=has_started)
        if not has_started:
            error: SlipstreamError = ServiceUnavailable("the video decoder ended before it began; try again")
            return DecoderLost(error, may_retry=True)
        if -status in SENT_FROM_OUTSIDE:
            message = f"the decoder was killed twice on this file ({cause}), perhaps for want of memory; scale it down"
            return DecoderLost(UnreadableVideo(message), may_retry=True)
        if -status == signal.SIGXCPU:
            return DecoderLost(_took_too_long(request), may_retry=False)
        message = f"the decoder crashed on this file ({cause}); it is damaged or made to do harm, export it again"
        return DecoderLost(UnreadableVideo(message), may_retry=False)


def child_environment() -> dict[str, str]:
    """What a confined process needs to find its code, and the packages that ours was shown the way to; no token or key
    of the service is handed on."""
    libraries = os.environ.get("LD_LIBRARY_PATH")
    shown = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path).is_absolute()]
    return {
        "PYTHONPATH": os.pathsep.join([str(Path(slipstream.__file__).parents[1]), *shown]),
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "LC_ALL": "C.UTF-8",
        **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
    }


def sealed_memory(num_bytes: int) -> int:
    """Descriptor of memory for frames or pictures. No one can resize it, so reading it is safe; untouched pages cost
    nothing."""
    memory = os.memfd_create("frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, num_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _took_too_long(request: DecodeRequest) -> LimitExceeded:
    return LimitExceeded(
        f"decoding took longer than {request.limits.timeout_s:g} s; send a shorter or smaller video, or raise timeout_s"
    )


# -- answers ----------------------------------------------------------------------------------------------------------

# What a decoder's answers become here: arrays over the memory which both share, read-only.


def read_sampled(answer: Answer, memory: int) -> SampledVideo:
    """The frames of a whole clip. Raises BadAnswer for an answer to another question."""
    if not isinstance(answer, Sampled):
        raise BadAnswer("a clip was asked for")
    mapping = mmap.mmap(memory, _num_bytes(answer), prot=mmap.PROT_READ)
    return _video(answer, mapping, 0)


def read_windows(request: DecodeRequest, answer: Answer, memory: int) -> Sequence[SampledVideo | SlipstreamError]:
    """The frames of each window, or why there are none. Raises BadAnswer for an answer to another question."""
    if not isinstance(answer, SampledWindows):
        raise BadAnswer("windows were asked for")
    mapping = mmap.mmap(memory, request.frames_bytes, prot=mmap.PROT_READ)
    return [
        _video(window, mapping, number * request.window_bytes) if isinstance(window, Sampled) else window.exception()
        for number, window in enumerate(answer.windows)
    ]


def read_planned(answer: Answer, memory: int) -> Planned:
    """Where the clip is cut. Raises BadAnswer for an answer to another question."""
    if not isinstance(answer, Planned):
        raise BadAnswer("segments were asked for")
    return answer


def _num_bytes(answer: Sampled) -> int:
    return int(np.prod((*answer.shape, 3)))


def _video(answer: Sampled, mapping: mmap.mmap, offset: int) -> SampledVideo:
    frames = np.frombuffer(mapping, dtype=np.uint8, count=_num_bytes(answer), offset=offset)
    return SampledVideo(
        frames.reshape((*answer.shape, 3)),
        answer.timestamps_s,
        answer.duration_s,
        answer.source_width,
        answer.source_height,
        answer.codec,
        answer.rotation,
        answer.warnings,
    )
