"""From a request to sampled frames: an upload, a path or an address becomes a file, and a child process decodes it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

from services.gateway.config import GatewayConfig
from services.gateway.fetch import Fetcher
from services.gateway.media_upload import VideoBuffer
from slipstream.errors import ProtocolViolation, VideoNotFound
from slipstream.rpc.v1 import gateway_pb2
from slipstream.video.limits import DecodeLimits
from slipstream.video.paths import open_video_path
from slipstream.video.pool import DecodePool
from slipstream.video.sampled import SampledVideo


class Media:
    """Receives and decodes videos for all captions of this gateway. Sampling needs no model, so it can run ahead."""

    def __init__(self, config: GatewayConfig, fetcher: Fetcher | None = None) -> None:
        self._config = config
        self._fetcher = fetcher or Fetcher(config.allowed_hosts, config.max_video_bytes, config.url_timeout_s)
        limits = DecodeLimits(
            max_bytes=config.max_video_bytes,
            timeout_s=config.decode_timeout_s,
            max_frames_sampled=config.max_frames,
        )
        self._pool = DecodePool(config.decode_workers, limits, memory_bytes=config.decode_memory_mb * 1024**2)

    def prepare(self) -> None:
        """Starts the decoders ahead of the first video."""
        self._pool.prepare()

    @contextlib.asynccontextmanager
    async def open(self, path: str, requests: AsyncIterator[gateway_pb2.CaptionRequest]) -> AsyncIterator[BinaryIO]:
        """The video file: below an allowed root if a path was given, else received from the stream."""
        self._pool.prepare()
        if path:
            with self._open_path(path) as source:
                yield source
            return
        with VideoBuffer(self._config.max_video_bytes) as upload:
            async for message in requests:
                if message.WhichOneof("message") != "video":
                    raise ProtocolViolation("after `options` a caption takes `video` chunks only")
                upload.write(message.video)
            yield upload.finished()

    @contextlib.asynccontextmanager
    async def open_source(self, source: str) -> AsyncIterator[BinaryIO]:
        """The video file of an archive item: a path below an allowed root, or an https address of an allowed host.

        Raises what `open_video_path` and `Fetcher.fetch` raise.
        """
        self._pool.prepare()
        if "://" not in source:
            with self._open_path(source) as file:
                yield file
            return
        with VideoBuffer(self._config.max_video_bytes) as download:
            await self._fetcher.fetch(source, download)
            yield download.finished()

    async def sample(
        self, source: BinaryIO, num_frames: int, on_progress: Callable[[int, int], None], *, digest: bool = False
    ) -> SampledVideo:
        """The sampled frames, with the file's SHA-256 and size if asked for. Cancelled, the decoder is ended at once.

        The frames are freed with the last reference to them.
        """
        return await self._pool.sample(source, num_frames, on_progress=on_progress, with_digest=digest)

    def close(self) -> None:
        """Ends the decoders."""
        self._pool.close()

    def _open_path(self, path: str) -> BinaryIO:
        if not self._config.roots:
            raise VideoNotFound("this gateway opens no paths; upload the file, or start it with --video-roots")
        return open_video_path(path, self._config.roots)
