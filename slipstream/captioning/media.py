"""From a request to sampled frames: an upload, a path or an address becomes a file, and a child process decodes it."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

from slipstream.budget import Admission, Countdown, MemoryUse, host_budget
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.fetch import CountedSink, Fetcher, Sink
from slipstream.captioning.object_sources import ObjectSources
from slipstream.errors import LimitExceeded, SlipstreamError, UnreadableVideo, VideoNotFound
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.objects.store import is_file_url, is_remote_object, path_at
from slipstream.rpc.callers import Places
from slipstream.rpc.message_limits import steady
from slipstream.video.files import FileThreads, VideoBuffer, VideoFile
from slipstream.video.film_cuts import SHOT_PIECE_S, Cut, FoundShots, warn_short
from slipstream.video.messages import MAX_MESSAGE_BYTES, DecodeLimits, DecodeRequest, Planned, SampledVideo, Window
from slipstream.video.paths import open_video_path, root_of
from slipstream.video.pool import DecodePool, OnConfined
from slipstream.video.ranged_film import RangedFilm

FRAMES_SHARE = 0.25
"""Of the memory that is left at start, how much frames may take when nobody said."""
FILM_SHARE = 0.1
"""Of that, how much the segments of one film may take that are decoded together."""
SEGMENT_BYTES, TIME_BYTES = 800, 24
"""Of a decoder's answer, which is one message: what it says of a segment, with warnings, and of each of its frames."""
PATIENCE_S = 2.0
"""For a place among uploads: of many callers that come at once most have sent all in a moment."""
_DIGEST_BYTES = 16 * 1024**2


class Media:
    """Receives and decodes videos for all captions of this gateway. Sampling needs no model, so it can run ahead.

    No call to a file system is made on the event loop. Each root has threads of its own for them, and so has the
    folder of temporary files. `ceilings`: how much may be uploaded at once.
    """

    def __init__(
        self,
        config: GatewayConfig,
        fetcher: Fetcher | None = None,
        on_confined: OnConfined = lambda confined: None,
    ) -> None:
        """`on_confined` is told which protections decoders have; see `DecodePool`."""
        self._config = config
        self._fetcher = fetcher or Fetcher(config.allowed_hosts, config.max_video_bytes, config.url_timeout_s)
        self._objects = ObjectSources(config)
        self.frames = Admission(
            budget_bytes=host_budget(config.frames_budget_mb, FRAMES_SHARE),
            max_sessions=config.max_held_videos,
            max_queued=config.max_held_videos,
            queue_timeout_s=config.frames_timeout_s,
            what="gateway",
            of=MemoryUse.FRAMES,
        )
        self._limits = DecodeLimits(
            max_bytes=config.max_video_bytes,
            max_ranged_bytes=config.max_ranged_bytes,
            timeout_s=config.decode_timeout_s,
            formats=config.formats,
            max_frames_sampled=config.max_frames,
            max_frame_pixels=config.max_frame_pixels,
        )
        memory_bytes = config.decode_memory_mb * 1024**2
        self._pool = DecodePool(config.decode_workers, self._limits, memory_bytes=memory_bytes, on_confined=on_confined)
        self._roots = {root: FileThreads(config.file_timeout_s) for root in config.roots}
        self._temporary = FileThreads(config.file_timeout_s)
        self._uploads = Places("uploads", config.max_uploads, config.owner_share)
        self._upload_bytes = Places(
            "upload_bytes",
            config.max_upload_bytes,
            config.owner_share,
            least=config.max_video_bytes,
            are="wait to be decoded",
        )
        self.ceilings = (self._uploads, self._upload_bytes)

    def prepare(self) -> None:
        """Starts the decoders ahead of the first video."""
        self._pool.prepare()

    @contextlib.asynccontextmanager
    async def open(self, path: str, chunks: AsyncIterator[bytes], *, owner: str = "") -> AsyncIterator[VideoFile]:
        """The video file: below one of the owner's roots if a path was given, else received chunk by chunk."""
        self._pool.prepare()
        if path and is_remote_object(path):
            async with self._delivered(path, owner, counts=True) as source:
                yield source
            return
        if path:
            async with self._open_path(path, owner) as source:
                yield source
            return
        largest = min(self._config.max_video_bytes, self._config.max_upload_bytes)
        await self._uploads.wait(PATIENCE_S)
        with self._upload_bytes.held(0) as take, VideoBuffer(largest, self._temporary) as upload:
            with self._uploads.held():
                async for chunk in steady(chunks, self._config.upload_idle_s, self._config.min_upload_rate):
                    take(len(chunk))
                    await upload.write(chunk)
            yield await upload.finished()

    @contextlib.asynccontextmanager
    async def open_source(
        self, source: str, *, owner: str = "", whole: bool = False, most_bytes: int = 0, counts: bool = False
    ) -> AsyncIterator[VideoFile]:
        """The file of an archive item: a path below one of its owner's roots, an https address of an allowed host, or
        an object, which is read by ranges where that is possible and not all of it is needed (`whole`).

        `most_bytes`: that are fetched; 0: as many as a video may have. `counts`: among what its owner uploads, as what
        is fetched for a caller who waits does; the archive's own places bound what is fetched for its jobs.

        Raises what `open_video_path`, `Fetcher.fetch` and `ObjectSources.open` raise, ServiceUnavailable when a file
        system hangs, and Overloaded for more than is taken of one owner, or of all.
        """
        self._pool.prepare()
        is_path = "://" not in source or is_file_url(source)
        delivered = partial(self._delivered, whole=whole, most_bytes=most_bytes, counts=counts)
        async with self._open_path(source, owner) if is_path else delivered(source, owner) as file:
            yield file

    async def sample(
        self,
        source: VideoFile,
        num_frames: int,
        on_progress: Callable[[int, int], None],
        *,
        fps: float = 0.0,
        size: FrameSize = ANY_SIZE,
        owner: str = "",
        in_background: bool = False,
        on_queued: Callable[[int], None] = lambda num_ahead: None,
        digest: bool = False,
    ) -> SampledVideo:
        """The sampled frames in the `size` that a model wants, within this gateway's limit, with the file's SHA-256 and
        size if asked for. Cancelled, the decoder is ended at once.

        A decoder sees videos of one owner only, and what it says of a file is believed for that file only: the digest
        is computed here. The frames count in the gateway's budget until the video is closed, which is the caller's to
        do. Before one is decoded there must be room for the most that it can become; `on_queued` hears how many wait
        ahead meanwhile.

        Raises:
            LimitExceeded, Overloaded: so many frames never have room here, or had none in time.
        """
        size = size.within(self._limits.max_frame_pixels)
        most_bytes = DecodeRequest(num_frames, self._limits, size).frames_bytes
        async with self.frames.admitted(most_bytes, on_queued, in_background=in_background) as place:
            video = await self._pool.sample(
                source.file,
                num_frames,
                fps=fps,
                size=size,
                owner=owner,
                in_background=in_background,
                on_progress=on_progress,
                files=source.files,
            )
            if digest:
                video.sha256, video.num_bytes = await _digest(source)
            place.shrink(video.frames.nbytes)
        video.on_close = place.release
        return video

    async def plan_segments(
        self, source: VideoFile, cut: Cut, *, owner: str = "", in_background: bool = False
    ) -> Planned:
        """Where a film is cut. Shots are looked for piece by piece, as a job of a decoder is bounded and a film is not;
        a piece that cannot be looked at is a segment of its own. Raises what `DecodePool.plan_segments` does."""
        plan = partial(
            self._pool.plan_segments,
            source.file,
            owner=owner,
            in_background=in_background,
            film=source.name,
            files=source.files,
        )
        planned = await plan(cut.stride_s or SHOT_PIECE_S)
        if cut.stride_s:
            warnings = (*planned.warnings, *warn_short(planned.bounds, cut.stride_s))
            return replace(planned, warnings=warnings)
        shots, clock = FoundShots(planned.bounds), asyncio.get_running_loop().time
        for piece in shots.pieces:
            began_s = clock()
            try:
                shots.add((await plan(shots.starts_s[-1], piece=piece)).bounds)
            except (UnreadableVideo, LimitExceeded) as error:
                shots.skip(piece, error, clock() - began_s)
        return replace(planned, bounds=shots.bounds(), warnings=(*planned.warnings, *shots.warnings()))

    def windows_at_once(self, num_frames: int, size: FrameSize) -> int:
        """Segments of so many frames that are decoded together: two such groups have room beside other captions, and
        what is said of a group has room in a message."""
        window_bytes = DecodeRequest(num_frames, self._limits, size.within(self._limits.max_frame_pixels)).frames_bytes
        in_budget = int(self.frames.budget_bytes * FILM_SHARE) // window_bytes
        in_message = MAX_MESSAGE_BYTES // (SEGMENT_BYTES + TIME_BYTES * num_frames)
        return max(1, min(self._limits.max_frames_sampled // num_frames, in_budget, in_message))

    async def sample_windows(
        self,
        source: VideoFile,
        num_frames: int,
        windows: Sequence[Window],
        *,
        fps: float = 0.0,
        size: FrameSize = ANY_SIZE,
        owner: str = "",
        in_background: bool = False,
    ) -> Sequence[SampledVideo | SlipstreamError]:
        """Of each segment what `sample` gives for a video, or why there is nothing. Its frames count in the budget
        until the last of the segments is closed. Raises what `sample` does."""
        size = size.within(self._limits.max_frame_pixels)
        most_bytes = DecodeRequest(num_frames, self._limits, size, tuple(windows)).frames_bytes
        async with self.frames.admitted(most_bytes, in_background=in_background) as place:
            found = await self._pool.sample_windows(
                source.file,
                num_frames,
                windows,
                fps=fps,
                size=size,
                owner=owner,
                in_background=in_background,
                film=source.name,
                files=source.files,
            )
            videos = [video for video in found if isinstance(video, SampledVideo)]
            place.shrink(sum(video.frames.nbytes for video in videos))
        held = Countdown(len(videos), place.release)
        for video in videos:
            video.on_close = held
        return found

    async def digest(self, source: VideoFile) -> tuple[str, int]:
        """SHA-256 and size of the file; of one that is read by ranges what stands for the former."""
        return await _digest(source)

    def close(self) -> None:
        """Ends the decoders."""
        self._pool.close()

    @contextlib.asynccontextmanager
    async def _open_path(self, path: str, owner: str) -> AsyncIterator[VideoFile]:
        roots = {root: files for each, files in self._roots.items() if (root := root_of(each, owner)) is not None}
        if not roots:
            raise VideoNotFound("this gateway opens no paths for you; upload the file, or start it with --video-roots")
        source = await _find(path_at(path), roots)
        try:
            yield source
        finally:
            source.files.close(source)

    @contextlib.asynccontextmanager
    async def _delivered(
        self, source: str, owner: str, *, whole: bool = False, most_bytes: int = 0, counts: bool = False
    ) -> AsyncIterator[VideoFile]:
        """See `open_source`. What counts holds its place among uploads until it is fetched, a film that is read by
        ranges to its end."""
        most_bytes = most_bytes or self._config.max_video_bytes
        if counts:
            await self._uploads.wait(PATIENCE_S)
        with VideoBuffer(most_bytes, self._temporary) as download, contextlib.ExitStack() as held:
            sink: Sink = download
            film = None
            uploading = held.enter_context(contextlib.ExitStack())
            if counts:
                sink = CountedSink(download, held.enter_context(self._upload_bytes.held(0)))
                uploading.enter_context(self._uploads.held())
            if is_remote_object(source):
                film = await self._objects.open(source, owner, sink, whole=whole, most_bytes=most_bytes)
            else:
                await self._fetcher.fetch(source, sink)
            if film is None:
                uploading.close()  # it is there as a whole
            yield VideoFile(film, film.num_bytes, self._temporary) if film else await download.finished()


async def _find(path: str, roots: Mapping[Path, FileThreads]) -> VideoFile:
    """Below the first root that has it. A root that the path names is asked first: others may hang."""
    *others, last = sorted(roots, key=lambda root: not Path(path).is_relative_to(root))
    for root in others:
        with contextlib.suppress(VideoNotFound):
            return await roots[root].run(_open_readable, path, root, roots[root])
    return await roots[last].run(_open_readable, path, last, roots[last])


def _open_readable(path: str, root: Path, files: FileThreads) -> VideoFile:
    """Its first byte is read here, so that a disk which hangs keeps no decoder waiting."""
    file = open_video_path(path, [root])
    with contextlib.suppress(OSError):  # the decoder will find that too, and say it
        os.pread(file.fileno(), 1, 0)
    return VideoFile(file, os.fstat(file.fileno()).st_size, files)


async def _digest(source: VideoFile) -> tuple[str, int]:
    """SHA-256 and size of the file; in pieces, each with its own limit of time."""
    if isinstance(source.file, RangedFilm):
        return source.file.identity, source.num_bytes
    digest, num_bytes = hashlib.sha256(), 0
    while size := await source.files.run(_update, digest, source.file, num_bytes):
        num_bytes += size
    return digest.hexdigest(), num_bytes


def _update(digest: "hashlib._Hash", file: BinaryIO, offset: int) -> int:
    """Hashes the next piece and says how long it is; 0 at the end. Whoever reads the file too is not disturbed."""
    try:
        data = os.pread(file.fileno(), _DIGEST_BYTES, offset)
    except OSError as failure:
        raise UnreadableVideo(f"the video cannot be read to its end: {failure.strerror}") from None
    digest.update(data)
    return len(data)
