"""From a request to sampled frames: an upload, a path or an address becomes a file, and a child process decodes it."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import BinaryIO, cast

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.fetch import Fetcher
from slipstream.errors import LimitExceeded, Overloaded, SessionIdle, VideoNotFound
from slipstream.rpc.guards import IdleLimit
from slipstream.rpc.security import Places
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.paths import open_video_path
from slipstream.video.pool import DecodePool

# -- media upload -----------------------------------------------------------------------------------------------------

# Holds a video while it arrives. There is always a descriptor to hand to a decoder.

IN_MEMORY_BYTES = 32 * 1024**2
"""A video beyond this goes to a temporary file."""


class VideoBuffer:
    """A file without a name: in memory at first, on disk when it grows. Gone when closed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._in_memory = True
        self.file: BinaryIO = os.fdopen(os.memfd_create("video"), "w+b")
        """What has arrived; `write` may replace it."""

    def __enter__(self) -> "VideoBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what is still buffered has no place to go
            self.file.close()

    def write(self, data: bytes) -> None:
        """Appends. Raises LimitExceeded for a video that is too large, Overloaded when the disk or memory is full."""
        self._size += len(data)
        if self._size > self._max_bytes:
            raise LimitExceeded(f"the video is larger than this server's limit of {self._max_bytes} bytes")
        try:
            if self._in_memory and self._size > IN_MEMORY_BYTES:
                self._move_to_disk()
            self.file.write(data)
        except OSError:
            raise Overloaded("the server has no room for the video now; try again later") from None

    def finished(self) -> BinaryIO:
        """The whole file, at its start. Raises Overloaded."""
        try:
            self.file.seek(0)
        except OSError:
            raise Overloaded("the server has no room for the video now; try again later") from None
        return self.file

    def _move_to_disk(self) -> None:
        disk = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 (closed with this object)
        self.file.seek(0)
        shutil.copyfileobj(self.file, disk)
        self.file.close()
        self.file, self._in_memory = disk, False


async def _steady(chunks: AsyncIterator[bytes], idle_s: float, least_rate: float) -> AsyncIterator[bytes]:
    """The chunks of an upload that goes on. Raises `SessionIdle` after a pause of `idle_s`, or when they come with less
    than `least_rate` bytes a second; time counts only while the next is awaited."""
    clock = asyncio.get_running_loop().time
    patient = IdleLimit(chunks, idle_s, "the upload was ended; send it in smaller chunks, or raise --upload-idle-s")
    waited_s, num_bytes = 0.0, 0
    while True:
        since = clock()
        chunk = await anext(patient, None)
        if chunk is None:
            return
        waited_s += clock() - since
        num_bytes += len(chunk)
        if num_bytes < least_rate * (waited_s - idle_s):
            raise SessionIdle(
                f"{num_bytes} bytes of the video came in {waited_s:.0f} s, and this server ends an upload of less than"
                f" {least_rate:g} bytes a second (--min-upload-rate)"
            )
        yield chunk


# -- media ------------------------------------------------------------------------------------------------------------


class Media:
    """Receives and decodes videos for all captions of this gateway. Sampling needs no model, so it can run ahead.

    `ceilings`: how much may be uploaded at once.
    """

    def __init__(self, config: GatewayConfig, fetcher: Fetcher | None = None) -> None:
        self._config = config
        self._fetcher = fetcher or Fetcher(config.allowed_hosts, config.max_video_bytes, config.url_timeout_s)
        limits = DecodeLimits(
            max_bytes=config.max_video_bytes,
            timeout_s=config.decode_timeout_s,
            max_frames_sampled=config.max_frames,
        )
        self._uploads = Places("uploads", config.max_uploads, config.owner_share)
        self._upload_bytes = Places(
            "upload_bytes",
            config.max_upload_bytes,
            config.owner_share,
            least=config.max_video_bytes,
            are="wait to be decoded",
        )
        self.ceilings = (self._uploads, self._upload_bytes)
        self._pool = DecodePool(config.decode_workers, limits, memory_bytes=config.decode_memory_mb * 1024**2)

    def prepare(self) -> None:
        """Starts the decoders ahead of the first video."""
        self._pool.prepare()

    @contextlib.asynccontextmanager
    async def open(self, path: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[BinaryIO]:
        """The video file: below an allowed root if a path was given, else received chunk by chunk."""
        self._pool.prepare()
        if path:
            with self._open_path(path) as source:
                yield source
            return
        largest = min(self._config.max_video_bytes, self._config.max_upload_bytes)
        with self._upload_bytes.held(0) as take, VideoBuffer(largest) as upload:
            with self._uploads.held():
                async for chunk in _steady(chunks, self._config.upload_idle_s, self._config.min_upload_rate):
                    take(len(chunk))
                    upload.write(chunk)
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
