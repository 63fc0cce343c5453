"""Opens a container from untrusted bytes and gives its packets. Decodes nothing."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, NoReturn

import av
import av.logging
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition, Stream
from av.video.stream import VideoStream

from slipstream.errors import LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.video.damage import LACK_OF_MEMORY, LACKED_MEMORY, DamageCount
from slipstream.video.formats import CODECS, CONTAINERS, TIERS, refused
from slipstream.video.messages import DecodeLimits
from slipstream.video.ranged_reader import RangedReader

Source = BinaryIO | RangedReader
"""An open file, or one that is elsewhere."""

# -- running clock ----------------------------------------------------------------------------------------------------

# The clock of recordings that were joined as they are: within the file it begins anew, and is counted on from there.
# Whoever goes through the packets from the beginning sees the same times, each time.

JOINED = frozenset({"mpegts", "mpeg", "flv"})
"""Containers that can be joined by writing one file behind the other."""
LEAST_S = 1.0
"""How far back is taken for a new beginning."""
_NEVER = -(2**63)


class RunningClock:
    """Of one video, for one pass over its packets at a time."""

    def __init__(self, container: str, counts_on: bool) -> None:
        """Not `counts_on`: times stay as they are, and what goes back is counted alone."""
        self._may_restart = container in JOINED
        self._counts_on = counts_on
        self.begin()

    def begin(self) -> None:
        """A pass begins."""
        self.num_restarts = 0
        self.num_behind = 0
        """Packets that are shown before what came before a new beginning has ended."""
        self._last_ticks = _NEVER
        """When the packet before is decoded, as the file has it."""
        self._offset, self._end, self._end_before = 0, _NEVER, _NEVER

    def follow(self, packet: "Packet[VideoStream]") -> None:
        """Has a packet behind a new beginning shown behind all that came before, or counts it."""
        ticks = packet.pts if packet.pts is not None else packet.dts
        if ticks is None or not self._may_restart:
            return
        if packet.dts is not None:
            if (self._last_ticks - packet.dts) * float(packet.time_base or 0) > LEAST_S:
                self.num_restarts += 1
                self._offset, self._end_before = self._end - ticks if self._counts_on else 0, self._end
            self._last_ticks = packet.dts
        ticks += self._offset
        self.num_behind += ticks < self._end_before
        self._end = max(self._end, ticks + max(packet.duration or 0, 1))
        if self._offset:
            packet.pts = packet.pts + self._offset if packet.pts is not None else None
            packet.dts = packet.dts + self._offset if packet.dts is not None else None


# -- deadline ---------------------------------------------------------------------------------------------------------

# Stops a blocking decode: the deadline and the caller's wish, polled between packets and inside every read.


class DecodeCancelled(SlipstreamError):
    """The caller asked to stop; nobody waits for this result any more."""

    status: ClassVar[str] = "CANCELLED"


class Watch:
    """One call's deadline and stop request."""

    def __init__(self, timeout_s: float, should_stop: Callable[[], bool] | None) -> None:
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._should_stop = should_stop or (lambda: False)

    @property
    def expired(self) -> bool:
        """Whether `check` would raise."""
        return time.monotonic() >= self._deadline_s or self._should_stop()

    def check(self) -> None:
        """Raise DecodeCancelled or LimitExceeded when it is time to stop."""
        if self._should_stop():
            raise DecodeCancelled("decoding was cancelled")
        if time.monotonic() >= self._deadline_s:
            raise LimitExceeded(
                f"decoding took longer than {self._timeout_s:g} s; send a shorter or smaller video, or raise timeout_s"
            )


class WatchedReader:
    """The first `length` bytes of a file, for libav. It ends early instead of raising: the caller is C.

    After every call into libav, `check` tells why the file seemed to end.
    """

    def __init__(self, source: Source, length: int, watch: Watch) -> None:
        self.source = source
        self._length = length
        self._watch = watch
        self._failure: Exception | None = None

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end, after a failed read, or once the watch has expired."""
        if self._failure is not None or self._watch.expired:
            return b""
        try:
            return self.source.read(max(0, min(size, self._length - self.source.tell())))
        except Exception as failure:
            self._failure = failure
            return b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the read position; -1 when the source cannot."""
        try:
            if whence == os.SEEK_END:
                return self.source.seek(self._length + offset)
            return self.source.seek(offset, whence)
        except Exception:
            return -1

    def tell(self) -> int:
        """The read position in bytes."""
        return self.source.tell()

    @property
    def is_at_end(self) -> bool:
        """Whether nothing is left to be read."""
        return self.tell() >= self._length

    def check(self) -> None:
        """Raise what stopped the reading: DecodeCancelled, LimitExceeded or UnreadableVideo."""
        self._watch.check()
        if self._failure is not None:
            raise _not_read(self._failure) from self._failure


@contextmanager
def _read_by_us() -> Iterator[None]:
    """What is read beside libav, which a disk may fail in, too. Raises UnreadableVideo."""
    try:
        yield
    except OSError as failure:
        raise _not_read(failure) from failure


def _not_read(failure: Exception) -> UnreadableVideo:
    return UnreadableVideo(f"reading the video failed: {failure}")


# -- boxes ------------------------------------------------------------------------------------------------------------

# Walks the top-level boxes of an MP4 to see whether the file was cut off. Decodes and interprets nothing else.

_MAX_BOXES = 200_000


@dataclass(frozen=True)
class Extent:
    """How much of a file to read."""

    length: int
    """Bytes; less than the file when its last box is a half-written fragment header, which libav cannot stand."""
    is_cut: bool
    """Whether the last box is incomplete."""


def whole_extent(source: Source, watch: Watch) -> Extent:
    """Where the usable part of the file ends; the whole file when it is no MP4. Raises what `watch.check` raises."""
    size = source.seek(0, os.SEEK_END)
    position = 0
    for _ in range(_MAX_BOXES):
        watch.check()
        source.seek(position)
        header = source.read(16)
        if position == 0 and header[4:8] != b"ftyp":
            break
        box_size = _box_size(header, size - position)
        if box_size is None or position + box_size > size:
            if len(header) == 16 and not header[4:8].isalnum():  # no box, as some cameras write behind the last one
                break
            is_fragment_header = len(header) < 8 or header[4:8] == b"moof"
            return Extent(position if is_fragment_header and position else size, is_cut=True)
        position += box_size
        if position == size:
            break
    return Extent(size, is_cut=False)


def _box_size(header: bytes, rest: int) -> int | None:
    """Bytes of the box that starts with `header`; None when the header is incomplete or impossible."""
    if len(header) < 8:
        return None
    size = int.from_bytes(header[:4], "big")
    if size == 0:
        return rest
    if size == 1:
        size = int.from_bytes(header[8:16], "big")
    return size if size >= 8 else None


# -- container --------------------------------------------------------------------------------------------------------

_SNIFFED_BYTES = 512
_NOT_LISTED = "Format not on whitelist"
"""How libav says that it knows a container and may not open it."""

_ENDS_IN_AN_ERROR = {"gxf", "smjpeg"}
"""Demuxers that look for one more packet behind the last."""


@dataclass(frozen=True)
class OpenVideo:
    """An open container and the one video stream to look at."""

    container: InputContainer
    stream: VideoStream
    reader: WatchedReader
    is_cut: bool
    """Whether the file visibly ends too early."""
    clock: RunningClock
    """What the packets are shown by."""

    @property
    def stated_s(self) -> float:
        """How long the file says that it is; of the stream alone where it tells that, as sound may be longer."""
        stream, whole_s = self.stream, (self.container.duration or 0) / 1e6
        if stream.duration is None or stream.time_base is None:
            return whole_s
        return min(float(stream.duration * stream.time_base), whole_s)

    def packets(self, damage: DamageCount) -> Iterator["Packet[VideoStream]"]:
        """The stream's packets in decode order. An unreadable one is counted and reading goes on behind it."""
        self.clock.begin()
        while True:
            try:
                for packet in self.container.demux(self.stream):
                    self.reader.check()
                    if packet.size:
                        self.clock.follow(packet)
                        yield packet
            except SlipstreamError:
                raise
            except Exception as failure:  # demuxers of damaged files raise IndexError, AttributeError and more
                self.reader.check()
                if self.reader.is_at_end and self.container.format.name in _ENDS_IN_AN_ERROR:
                    return
                damage.add(failure)
            else:
                self.reader.check()
                return


@contextmanager
def open_video(source: Source, limits: DecodeLimits, watch: Watch, *, counts_on: bool = False) -> Iterator[OpenVideo]:
    """Open the container and pass its size, picture size and codec through the limits. With `counts_on` packets behind
    a new beginning of its clock are shown behind all others.

    Raises UnreadableVideo, LimitExceeded, or DecodeCancelled.
    """
    with _read_by_us():
        _check_size(source, limits)
        extent = whole_extent(source, watch)
        source.seek(0)
    reader = WatchedReader(source, extent.length, watch)
    options = {
        "format_whitelist": ",".join(CONTAINERS[limits.formats]),
        "protocol_whitelist": "file",
        "codec_whitelist": ",".join(sorted(CODECS[limits.formats])),
        "max_pixels": str(limits.max_pixels_source),
        **(source.opened() if isinstance(source, RangedReader) else {}),
    }
    try:
        container = _open_container(reader, options)
    except Exception as failure:
        reader.check()
        if isinstance(failure, LACK_OF_MEMORY):
            raise LimitExceeded(LACKED_MEMORY) from failure
        with _read_by_us():
            raise _why_not_opened(source, reader, options, limits.formats) from failure
    with container:
        reader.check()
        clock = RunningClock(container.format.name, counts_on)
        video = OpenVideo(container, _pick_stream(container, limits), reader, extent.is_cut, clock)
        if not isinstance(source, RangedReader) or source.has_index_for(video.stream.codec_context.name):
            yield video
            return
    with open_video(source, limits, watch, counts_on=counts_on) as video:
        yield video


def _is_attached(stream: Stream) -> bool:
    """Whether it is a picture that comes with the file, such as a cover."""
    return bool(stream.disposition & Disposition.attached_pic)


def _pick_stream(container: InputContainer, limits: DecodeLimits) -> VideoStream:
    streams = [s for s in container.streams.video if not _is_attached(s)]
    if not streams:
        kinds = ", ".join(sorted({"a picture" if _is_attached(s) else s.type for s in container.streams})) or "nothing"
        raise UnreadableVideo(f"the file has no video stream, only: {kinds}; send a file with pictures")
    stream = max(streams, key=lambda s: (bool(s.disposition & Disposition.default), -s.index))
    if stream.disposition & Disposition.dependent:  # each tile is a stream, and none of them is the picture
        raise UnreadableVideo("the file is a picture in tiles, such as a telephone's HEIC, and no video; send a video")
    codec = stream.codec_context.name if stream.codec_context else "unknown"
    if codec not in CODECS[limits.formats]:
        raise refused("codec", codec, limits.formats)
    check_picture_size(stream.codec_context.width, stream.codec_context.height, limits)
    return stream


def check_picture_size(width: int, height: int, limits: DecodeLimits) -> None:
    """Raise UnreadableVideo for a picture without size, LimitExceeded for one with too many pixels."""
    if width < 1 or height < 1:
        raise UnreadableVideo(
            f"the video stream states no picture size, or more than {limits.max_pixels_source} pixels a frame; "
            "the file is damaged, cut off, or too large"
        )
    if width * height > limits.max_pixels_source:
        raise LimitExceeded(
            f"the video is {width}x{height}, more than {limits.max_pixels_source} pixels a frame; scale it down"
        )


def _check_size(source: Source, limits: DecodeLimits) -> None:
    size = source.seek(0, os.SEEK_END)
    if size == 0:
        raise UnreadableVideo("the file is empty (0 bytes)")
    limit = limits.max_ranged_bytes if isinstance(source, RangedReader) else limits.max_bytes
    if size > limit:
        raise LimitExceeded(f"the video has {size} bytes, more than the {limit} served; compress or cut it")


def _refuse_second_file(url: str, flags: int, options: dict[str, str]) -> NoReturn:
    raise PermissionError("a video may not refer to another file or address")


def _why_not_opened(source: Source, reader: WatchedReader, options: dict[str, str], formats: str) -> UnreadableVideo:
    source.seek(0)
    head = source.read(_SNIFFED_BYTES)
    text = head.lstrip().lower()
    if text.startswith((b"#extm3u", b"ffconcat", b"<mpd", b"<?xml")):
        return UnreadableVideo(
            "the file is a playlist or manifest, which would fetch other files; send the video itself"
        )
    if text.startswith((b"<!doctype", b"<html")):
        return UnreadableVideo("the file is a web page (HTML), not a video; check the download")
    if head[4:8] == b"ftyp":
        return UnreadableVideo(
            "the MP4 index (moov) is missing or damaged; the recording or upload was cut off, send it again"
        )
    source.seek(0)
    name = _unlisted_container(reader, options)
    if name in CONTAINERS[list(TIERS)[-1]]:
        return refused("container", name, formats)
    served = ",".join(CONTAINERS[formats])
    return UnreadableVideo(
        f"the format is not recognised as one of {served}; the file is no video, damaged, or needs converting"
    )


def _unlisted_container(reader: WatchedReader, options: dict[str, str]) -> str:
    """Name of the demuxer that would open the file; empty for one that no demuxer claims. The name is in libav's log
    alone, which nobody listens to but here. The demuxer does not run."""
    av.logging.set_level(av.logging.ERROR)
    av.logging.set_skip_repeated(False)
    try:
        with av.logging.Capture() as logged, suppress(Exception):
            _open_container(reader, options).close()
    finally:
        av.logging.set_level(None)
    return next((name for _, name, message in logged if message.startswith(_NOT_LISTED)), "")


def _open_container(reader: WatchedReader, options: dict[str, str]) -> InputContainer:
    return av.open(reader, "r", options=dict(options), metadata_errors="replace", io_open=_refuse_second_file)
