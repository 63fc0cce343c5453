"""Decodes videos in child processes, several at once. A file may crash, hang or bloat its decoder, never the service.

A decoder gets open descriptors, never a path; it cannot write files, use the network or exceed its memory. It sees
videos of one owner only, and is replaced when it was lost or cancelled, and after a number of jobs.
"""

import math
import os
import stat
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import BinaryIO, TypeVar

from slipstream import metrics
from slipstream.budget import Admission
from slipstream.errors import InvalidRequest, LimitExceeded, ServiceUnavailable, SlipstreamError
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.logs import get_logger
from slipstream.video.decoder_process import (
    Decoder,
    DecoderLost,
    DecoderSpec,
    OnProgress,
    ProtectionWatch,
    Read,
    Reaping,
    read_planned,
    read_sampled,
    read_windows,
)
from slipstream.video.files import FileThreads
from slipstream.video.messages import DecodeLimits, DecodeRequest, Planned, SampledVideo, Window
from slipstream.video.ranged_film import RangedFilm, served

ResultT = TypeVar("ResultT")

DEFAULT_MEMORY_BYTES = 2 * 1024**3
DEFAULT_MAX_JOBS = 500
OnConfined = Callable[[dict[str, bool]], None]
Source = BinaryIO | int | RangedFilm
"""An open regular file, its descriptor, or a film that is elsewhere."""


class DecodePool:
    """`num_workers` decoders; further callers wait for their turns, the archive's behind people's. Lives on one event
    loop."""

    def __init__(
        self,
        num_workers: int,
        limits: DecodeLimits,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        max_jobs: int = DEFAULT_MAX_JOBS,
        module: str = "slipstream.video.child",
        on_confined: OnConfined = lambda confined: None,
    ) -> None:
        """`memory_bytes` bounds what one decoder allocates, frames apart. Starts nothing yet.

        `on_confined` is told which of `slipstream.video.confine.PROTECTIONS` decoders have, when that is new.
        """
        frames_bytes = DecodeRequest(limits.max_frames_sampled, limits).frames_bytes
        cpu_s = math.ceil((limits.timeout_s + 2) * limits.decoder_threads) * max_jobs
        self._spec = DecoderSpec(memory_bytes + frames_bytes, cpu_s, limits.decoder_threads, module)
        self._num_workers, self._limits, self._max_jobs = num_workers, limits, max_jobs
        self._turns = Admission(
            budget_bytes=0, max_sessions=num_workers, max_queued=sys.maxsize, queue_timeout_s=math.inf, what="decoder"
        )
        self._turns.on_admitted = metrics.WAIT_SECONDS.labels("decoder").observe
        self._files = FileThreads()
        self._idle: list[Decoder] = []
        """Longest idle first."""
        self._decoders: set[Decoder] = set()
        self._num_spares = 0
        """One from the first change of owners on, which hides the start of the next decoder."""
        self._on_ready = ProtectionWatch("decoder", on_confined)
        self._reaping = Reaping()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that run now."""
        return [decoder.process.pid for decoder in self._decoders]

    def prepare(self) -> None:
        """Starts the decoders ahead of the first video; they get ready by themselves."""
        while len(self._decoders) < self._num_workers + self._num_spares and not self._is_closed:
            self._idle.append(self._start())

    async def sample(
        self,
        source: Source,
        num_frames: int,
        *,
        fps: float = 0.0,
        size: FrameSize = ANY_SIZE,
        owner: str = "",
        in_background: bool = False,
        on_progress: OnProgress | None = None,
        files: FileThreads | None = None,
    ) -> SampledVideo:
        """What `sample_video` gives for an open regular file, from a process that has seen videos of `owner` only.

        The file is read from its start whatever its position, and may be closed as soon as this returns or raises;
        `files` are the threads that may touch it here, `size` is that of the frames that are wanted.
        `on_progress(frames_so_far, frames_expected)` is called on the event loop. Cancelling ends the work at once.

        Raises InvalidRequest, UnreadableVideo or LimitExceeded about the file, ServiceUnavailable about the pool.
        """
        request = DecodeRequest(num_frames, self._limits, size, fps=fps)
        return await self._run(source, request, read_sampled, owner, in_background, files, on_progress)

    async def sample_windows(
        self,
        source: Source,
        num_frames: int,
        windows: Sequence[Window],
        *,
        fps: float = 0.0,
        size: FrameSize = ANY_SIZE,
        owner: str = "",
        in_background: bool = False,
        film: str = "",
        files: FileThreads | None = None,
    ) -> Sequence[SampledVideo | SlipstreamError]:
        """The same of each window, as `slipstream.video.film_windows` gives it; `film` is that of `DecodeRequest`."""
        request = DecodeRequest(num_frames, self._limits, size, tuple(windows), film=film, fps=fps)
        return await self._run(source, request, partial(read_windows, request), owner, in_background, files)

    async def plan_segments(
        self,
        source: Source,
        cut_s: float,
        *,
        piece: Window | None = None,
        owner: str = "",
        in_background: bool = False,
        film: str = "",
        files: FileThreads | None = None,
    ) -> Planned:
        """Where the file is cut every `cut_s` seconds, as `slipstream.video.film_windows.plan_segments` says; or where
        shots begin in a piece of it, as `plan_shots` does behind a shot that began at `cut_s`. Raises what `sample`
        does."""
        request = DecodeRequest(1, self._limits, FrameSize(1, 1), (piece,) if piece else (), cut_s, film)
        return await self._run(source, request, read_planned, owner, in_background, files)

    async def _run(
        self,
        source: Source,
        request: DecodeRequest,
        read: Read[ResultT],
        owner: str,
        in_background: bool,
        files: FileThreads | None,
        on_progress: OnProgress | None = None,
    ) -> ResultT:
        if not 1 <= request.most_frames <= self._limits.max_frames_sampled:
            most = self._limits.max_frames_sampled
            raise InvalidRequest(f"num_frames is {request.most_frames}; ask for 1 to {most}")
        size = request.size
        if size.height * size.width > self._limits.max_frame_pixels:
            raise LimitExceeded(
                f"the model takes frames of {size.width} x {size.height} pixels, and this server gives at most"
                f" {self._limits.max_frame_pixels}; raise --max-frame-pixels"
            )
        async with _own_descriptor(source, files or self._files) as video:
            async with self._turns.admitted(0, in_background=in_background) as turn:
                decoded = await self._sample(video, request, owner, on_progress, read)
            turn.release()
            return decoded

    def close(self) -> None:
        """Ends all decoders; whoever waits for one gets ServiceUnavailable."""
        self._is_closed = True
        for decoder in self._idle:
            decoder.kill()
        for decoder in self._decoders:
            decoder.process.kill()
            decoder.reap()
        self._reaping.finish()
        self._idle.clear()

    async def _sample(
        self,
        video: int | RangedFilm,
        request: DecodeRequest,
        owner: str,
        on_progress: OnProgress | None,
        read: Read[ResultT],
    ) -> ResultT:
        is_last_try = False
        while True:
            decoder = await self._take(owner)
            try:
                if not isinstance(video, RangedFilm):
                    return await decoder.run(video, request, on_progress, read)
                async with served(video, request.limits.timeout_s) as descriptor:
                    return await decoder.run(descriptor, request, on_progress, read)
            except DecoderLost as loss:
                if self._is_closed:
                    raise _closed() from None
                if is_last_try or not loss.may_retry:
                    raise loss.error from None
                get_logger().info("decoder.retried")
                while self._idle:  # whoever killed one may have killed all, and their ends are seen late
                    self._discard(self._idle.pop())
            finally:
                self._give_back(decoder)
            is_last_try = True

    async def _take(self, owner: str) -> Decoder:
        """A decoder that is ready and has seen no other owner's videos; one may be started: the caller has a turn."""
        for decoder in [decoder for decoder in self._idle if not decoder.is_alive]:
            self._idle.remove(decoder)
            self._discard(decoder)
        decoder = self._pick(owner)
        decoder.owner = owner
        self._keep_spare()
        try:
            await decoder.wait_ready()
        except BaseException:
            self._give_back(decoder)
            raise
        return decoder

    def _pick(self, owner: str) -> Decoder:
        found = next((decoder for of in (owner, None) for decoder in self._idle if decoder.owner == of), None)
        if found is not None:
            self._idle.remove(found)
        elif self._idle:  # all have seen others' videos
            self._num_spares = 1
            self._discard(self._idle.pop(0))
        return found or self._start()

    def _keep_spare(self) -> None:
        """Once owners have changed, an unused decoder is always ahead, in the place of the one unused for longest."""
        if self._num_spares and all(decoder.owner is not None for decoder in self._idle):
            if self._idle and len(self._decoders) == self._num_workers + self._num_spares:
                self._discard(self._idle.pop(0))
            self._replace()

    def _start(self) -> Decoder:
        if self._is_closed:
            raise _closed()
        try:
            decoder = Decoder(self._spec, self._on_ready)
        except OSError as failure:
            get_logger().error("decoder.not_started", reason=str(failure))
            raise ServiceUnavailable("no video decoder can be started now; try again later") from None
        self._decoders.add(decoder)
        return decoder

    def _give_back(self, decoder: Decoder) -> None:
        if decoder.is_alive and decoder.num_jobs < self._max_jobs and not self._is_closed:
            self._idle.append(decoder)
            return
        self._discard(decoder)
        if not self._is_closed:
            self._replace()

    def _replace(self) -> None:
        """Starts the successor now, so that the next video does not wait for it; failing that, the next one tries."""
        try:
            self.prepare()
        except ServiceUnavailable as error:
            get_logger().warning("decoder.not_replaced", reason=str(error))

    def _discard(self, decoder: Decoder) -> None:
        if not self._is_closed:
            cause = "lost" if decoder.process.returncode is not None else "stopped" if decoder.is_killed else "worn"
            metrics.DECODER_RESTARTS.labels(cause).inc()
        decoder.kill()
        self._decoders.discard(decoder)
        self._reaping.add(decoder)


@asynccontextmanager
async def _own_descriptor(source: Source, files: FileThreads) -> AsyncIterator[int | RangedFilm]:
    """A read-only descriptor of the same file with a position of its own, for a process that is not to be trusted."""
    if isinstance(source, RangedFilm):
        yield source
        return
    own = await files.run(_reopened, source if isinstance(source, int) else source.fileno())
    try:
        yield own.fileno()
    finally:
        files.close(own)


def _reopened(given: int) -> BinaryIO:
    if not stat.S_ISREG(os.fstat(given).st_mode):
        raise InvalidRequest("the video is a folder, pipe or device; give a regular file")
    try:
        descriptor = os.open(f"/proc/self/fd/{given}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # opened by other rights than this process has now
        descriptor = os.dup(given)
    return os.fdopen(descriptor, "rb", buffering=0)


def _closed() -> ServiceUnavailable:
    return ServiceUnavailable("the server is shutting down; no video is decoded any more")
