"""Decodes videos in child processes, several at once. A file may crash, hang or bloat its decoder, never the service.

A decoder gets open descriptors, never a path; it cannot write files, use the network or exceed its memory. It is
replaced when it was lost or cancelled, and after a number of jobs.
"""

import asyncio
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from slipstream import metrics
from slipstream.errors import InvalidRequest, ServiceUnavailable
from slipstream.logs import get_logger
from slipstream.video.decoder_process import Decoder, DecoderLost, DecoderSpec, OnProgress
from slipstream.video.messages import DecodeLimits, DecodeRequest, SampledVideo

DEFAULT_MEMORY_BYTES = 2 * 1024**3
DEFAULT_MAX_JOBS = 500


class DecodePool:
    """`num_workers` decoders; further callers wait their turn, first come, first served. Lives on one event loop."""

    def __init__(
        self,
        num_workers: int,
        limits: DecodeLimits,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        max_jobs: int = DEFAULT_MAX_JOBS,
        module: str = "slipstream.video.child",
    ) -> None:
        """`memory_bytes` bounds what one decoder allocates, frames apart. Starts nothing yet."""
        frames_bytes = DecodeRequest(limits.max_frames_sampled, limits).frames_bytes
        cpu_s = math.ceil((limits.timeout_s + 2) * limits.decoder_threads) * max_jobs
        self._spec = DecoderSpec(memory_bytes + frames_bytes, cpu_s, module)
        self._num_workers = num_workers
        self._limits = limits
        self._max_jobs = max_jobs
        self._turns = asyncio.Semaphore(num_workers)
        self._idle: list[Decoder] = []
        self._decoders: set[Decoder] = set()
        self._reaping: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the decoders that run now."""
        return [decoder.process.pid for decoder in self._decoders]

    def prepare(self) -> None:
        """Starts the decoders ahead of the first video; they get ready by themselves."""
        while len(self._decoders) < self._num_workers and not self._is_closed:
            self._idle.append(self._start())

    async def sample(
        self,
        source: BinaryIO | int,
        num_frames: int,
        *,
        on_progress: OnProgress | None = None,
        with_digest: bool = False,
    ) -> SampledVideo:
        """What `sample_video` gives for an open regular file, from another process; `with_digest` also hashes it.

        The file is read from its start whatever its position, and may be closed as soon as this returns or raises.
        `on_progress(frames_so_far, frames_expected)` is called on the event loop. Cancelling ends the work at once.

        Raises InvalidRequest, UnreadableVideo or LimitExceeded about the file, ServiceUnavailable about the pool.
        """
        if not 1 <= num_frames <= self._limits.max_frames_sampled:
            raise InvalidRequest(f"num_frames is {num_frames}; ask for 1 to {self._limits.max_frames_sampled}")
        request = DecodeRequest(num_frames, self._limits, with_digest)
        with _own_descriptor(source) as video:
            asked = asyncio.get_running_loop().time()
            async with self._turns:
                metrics.WAIT_SECONDS.labels("decoder").observe(asyncio.get_running_loop().time() - asked)
                return await self._sample(video, request, on_progress)

    def close(self) -> None:
        """Ends all decoders; whoever waits for one gets ServiceUnavailable."""
        self._is_closed = True
        for decoder in self._idle:
            decoder.kill()
        for decoder in self._decoders:
            decoder.process.kill()
            decoder.reap()
        self._idle.clear()

    async def _sample(self, video: int, request: DecodeRequest, on_progress: OnProgress | None) -> SampledVideo:
        is_last_try = False
        while True:
            decoder = await self._take()
            try:
                return await decoder.sample(video, request, on_progress)
            except DecoderLost as loss:
                if self._is_closed:
                    raise _closed() from None
                if is_last_try or not loss.may_retry:
                    raise loss.error from None
                get_logger().info("decoder.retried")
            finally:
                self._give_back(decoder)
            is_last_try = True

    async def _take(self) -> Decoder:
        """A decoder that is ready; the caller has a turn, so one may be started."""
        while self._idle:
            decoder = self._idle.pop(0)
            if decoder.is_alive:
                break
            self._discard(decoder)
        else:
            decoder = self._start()
        try:
            await decoder.wait_ready()
        except BaseException:
            self._give_back(decoder)
            raise
        return decoder

    def _start(self) -> Decoder:
        if self._is_closed:
            raise _closed()
        try:
            decoder = Decoder(self._spec)
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
            has_ended = decoder.process.returncode is not None
            cause = "lost" if has_ended else "stopped" if decoder.is_killed else "worn"
            metrics.DECODER_RESTARTS.labels(cause).inc()
        decoder.kill()
        self._decoders.discard(decoder)
        task = asyncio.create_task(_reap(decoder))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)


async def _reap(decoder: Decoder) -> None:
    await asyncio.to_thread(decoder.reap)


@contextmanager
def _own_descriptor(source: BinaryIO | int) -> Iterator[int]:
    """A read-only descriptor of the same file with a position of its own, for a process that is not to be trusted."""
    given = source if isinstance(source, int) else source.fileno()
    if not stat.S_ISREG(os.fstat(given).st_mode):
        raise InvalidRequest("the video is a folder, pipe or device; give a regular file")
    try:
        descriptor = os.open(f"/proc/self/fd/{given}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # opened by other rights than this process has now
        descriptor = os.dup(given)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _closed() -> ServiceUnavailable:
    return ServiceUnavailable("the server is shutting down; no video is decoded any more")
