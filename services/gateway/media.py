"""From a request to sampled frames: an upload or a path becomes a file, and a worker thread decodes it."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, cast

from services.gateway.config import GatewayConfig
from slipstream.errors import LimitExceeded, Overloaded, ProtocolViolation, VideoNotFound
from slipstream.rpc.v1 import gateway_pb2
from slipstream.video.decode import DecodeLimits, SampledVideo, open_video_path, sample_video

IN_MEMORY_BYTES = 32 * 1024**2
"""Uploads beyond this go to a temporary file."""


class Media:
    """Receives and decodes videos for all captions of this gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._limits = DecodeLimits(max_bytes=config.max_video_bytes, timeout_s=config.decode_timeout_s)
        self._workers = ThreadPoolExecutor(config.decode_workers, thread_name_prefix="decode")

    @contextlib.asynccontextmanager
    async def open(self, path: str, requests: AsyncIterator[gateway_pb2.CaptionRequest]) -> AsyncIterator[BinaryIO]:
        """The video file: below an allowed root if a path was given, else received from the stream."""
        if path:
            if not self._config.roots:
                raise VideoNotFound("this gateway opens no paths; upload the file, or start it with --video-roots")
            with open_video_path(path, self._config.roots) as source:
                yield source
            return
        with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as upload:
            await self._receive(upload, requests)
            yield cast(BinaryIO, upload)

    async def sample(self, source: BinaryIO, num_frames: int, on_progress: Callable[[int, int], None]) -> SampledVideo:
        """Samples the frames in a worker thread, which stops soon after the caller is cancelled."""
        loop, cancelled = asyncio.get_running_loop(), threading.Event()

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(on_progress, done, total)

        def work() -> SampledVideo:
            return sample_video(source, num_frames, self._limits, should_stop=cancelled.is_set, on_progress=progress)

        decoding = loop.run_in_executor(self._workers, work)
        try:
            return await asyncio.shield(decoding)
        except asyncio.CancelledError:
            cancelled.set()
            with contextlib.suppress(Exception):  # the file must stay open until the worker lets go of it
                await decoding
            raise

    def close(self) -> None:
        """Ends the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _receive(
        self,
        upload: "tempfile.SpooledTemporaryFile[bytes]",
        requests: AsyncIterator[gateway_pb2.CaptionRequest],
    ) -> None:
        received = 0
        async for message in requests:
            if message.WhichOneof("message") != "video":
                raise ProtocolViolation("after `options` a caption takes `video` chunks only")
            data = message.video
            received += len(data)
            if received > self._config.max_video_bytes:
                raise LimitExceeded(
                    f"the video is larger than this server's limit of {self._config.max_video_bytes} bytes"
                )
            try:
                upload.write(data)
            except OSError:
                raise Overloaded("the server has no room for the upload now; try again later") from None
        upload.seek(0)
