"""Samples frames of one video by time: index the packets, plan, decode only what the wanted frames need.

Policy for damage: a packet that cannot be read or decoded is skipped, up to a bound; the frame before it stands in.
Whatever was skipped, missing or contradictory is said in `warnings`. No usable frame at all is an error.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest, LimitExceeded, UnreadableVideo
from slipstream.frame_size import ANY_SIZE, FrameSize, fit
from slipstream.video.container import (
    OpenVideo,
    Source,
    Watch,
    check_picture_size,
    open_video,
)
from slipstream.video.damage import DamageCount
from slipstream.video.frame_times import (
    TIME_TOLERANCE_S,
    DecodeRun,
    FramePicker,
    PacketTimes,
    num_sampled,
    plan_all,
    plan_runs,
    sample_times,
)
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.packet_times import read_packet_times
from slipstream.video.pictures import HDR_PIXELS, HDR_TRANSFERS, orientation, shown_size, to_sdr, upper_field
from slipstream.video.ranged_reader import RangedReader

# -- frames -----------------------------------------------------------------------------------------------------------

# Turns decoded pictures into upright RGB arrays of bounded size.

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
"""Gives memory for frames of the shape [most frames, height, width, 3]."""


LARGEST_SHOWN = 4096 * 2160
"""Most pixels to which stretching pixels may enlarge a picture."""


def on_heap(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Memory of this process; what is not written to costs nothing."""
    return np.empty(shape, dtype=np.uint8)


def bounded_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """The largest (width, height) of the same shape with at most `max_pixels`; unchanged when it already fits."""
    if width * height <= max_pixels:
        return width, height
    scale = math.sqrt(max_pixels / (width * height))
    scaled_height = min(max(1, math.floor(height * scale)), max_pixels)
    scaled_width = min(max(1, math.floor(width * scale)), max_pixels // scaled_height)
    return scaled_width, scaled_height


@dataclass
class FrameBuffer:
    """Collects the kept frames of one clip. The first decides size and rotation for all, so that they stack."""

    size: FrameSize
    """What upright frames are resized to, once, from the size that they have."""
    max_pixels: int
    """Where any size is wanted: larger frames are scaled down to this."""
    num_asked: int
    """Most frames that are kept."""
    num_expected: int
    """As many as the container promises, by which some models choose the size; there are no more of that size."""
    allocate: Allocate = on_heap
    pixel_aspect: Fraction | None = None
    """How much wider than high the container says that pixels are."""
    times_s: list[float] = field(default_factory=list, init=False)
    source_size: tuple[int, int] = field(default=(0, 0), init=False)
    """(width, height) as stored."""
    shown_size: tuple[int, int] = field(default=(0, 0), init=False)
    """The same on a screen, and at most as many pixels as are taken from a frame."""
    rotation: int = field(default=0, init=False)
    """Degrees clockwise that put the frames upright: 0, 90, 180 or 270."""
    is_mirrored: bool = field(default=False, init=False)
    """Whether they are turned upside down before."""
    num_damaged: int = field(default=0, init=False)
    num_resized: int = field(default=0, init=False)
    _pictures: NDArray[np.uint8] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.times_s)

    @property
    def capacity(self) -> int:
        """Frames that there is room for: few may be large, where a model has bounds for a whole video."""
        return self.num_expected if self.size.counts_frames else self.num_asked

    def append(self, time_s: float, frame: VideoFrame) -> None:
        """Convert and keep one frame; one more than there is room for is dropped. Raises what libav raises for a
        picture that it cannot convert, and what `FrameSize.of` does."""
        if len(self) == self.capacity:
            return
        size = (frame.width, frame.height)
        if not self.times_s:
            self.source_size = size
            self.rotation, self.is_mirrored = orientation(frame)
            on_screen = shown_size(*size, self.pixel_aspect) if self.pixel_aspect not in (None, 0, 1) else size
            self.shown_size = bounded_size(*on_screen, self._most_pixels(frame))
        picture = _to_rgb(frame, self.shown_size)
        self.num_resized += size != self.source_size
        self.num_damaged += frame.is_corrupt
        upright = np.rot90(picture[::-1] if self.is_mirrored else picture, k=-(self.rotation // 90))
        if self.size.is_known:
            upright = fit(upright, self.size, self.num_expected)
        if self._pictures is None:
            self._pictures = self.allocate((self.capacity, *upright.shape))
        self._pictures[len(self.times_s)] = upright
        self.times_s.append(time_s)

    def _most_pixels(self, frame: VideoFrame) -> int:
        """That are taken from a frame before it gets the wanted size."""
        if not self.size.is_known:
            return self.max_pixels
        return HDR_PIXELS if frame.color_trc in HDR_TRANSFERS else max(frame.width * frame.height, LARGEST_SHOWN)

    def stacked(self) -> NDArray[np.uint8]:
        """[n, height, width, 3] C-contiguous; n is at least 1."""
        assert self._pictures is not None
        return self._pictures[: len(self.times_s)]

    def warnings(self) -> list[str]:
        """What is unusual about the kept frames."""
        found = []
        if self.num_damaged:
            found.append(f"{self.num_damaged} of the sampled frames are damaged and only partly right")
        if self.num_resized:
            found.append(f"the picture size changes within the video; {self.num_resized} frames were rescaled to match")
        return found


def _to_rgb(frame: VideoFrame, size: tuple[int, int]) -> NDArray[np.uint8]:
    """[height, width, 3] as stored, not rotated; `size` is (width, height)."""
    if frame.interlaced_frame:
        frame = upper_field(frame)
    if frame.color_trc in HDR_TRANSFERS:
        codes = _resized(frame, size, "rgb48le").astype(np.uint16, copy=False)
        return to_sdr(codes, frame.color_trc, frame.color_primaries)
    return _resized(frame, size, "rgb24").astype(np.uint8, copy=False)


def _resized(frame: VideoFrame, size: tuple[int, int], pixel_format: str) -> NDArray[np.uint8 | np.uint16]:
    width, height = size
    if (frame.width, frame.height) != size:
        frame = frame.reformat(width=width, height=height, format=pixel_format, interpolation="BICUBIC", threads=1)
    return np.asarray(frame.to_ndarray(format=pixel_format, threads=1))


# -- runs -------------------------------------------------------------------------------------------------------------

# Decodes planned runs of packets into timed frames.

_SKIPS_EXACTLY = {"h264"}
"""Codecs whose unreferenced pictures are certain to be unneeded by any other, so skipping them changes no frame."""


def decode_runs(
    video: OpenVideo, packets: PacketTimes, runs: Sequence[DecodeRun], limits: DecodeLimits, damage: DamageCount
) -> Iterator[tuple[float, VideoFrame]]:
    """(time in seconds, frame) in presentation order. Packets between the runs are read but not decoded.

    Reading past them is cheaper than it looks (5 GB/s from the page cache, 3 microseconds a packet), and unlike a
    seek it lands exactly in every container. Raises what `DamageCount.add` and `check_picture_size` raise.
    """
    time_of = _clock(packets)
    codec = video.stream.codec_context
    codec.thread_count = limits.decoder_threads
    codec.options = {"max_pixels": str(limits.max_pixels_source)}
    if isinstance(video.reader.source, RangedReader):
        video.reader.source.will_decode(runs)
    remaining = iter(runs)
    run = next(remaining, None)
    for index, packet in enumerate(video.packets(damage)):
        if run is None:
            return
        damage.at(index)
        if index >= run.start:
            _skip_unwanted(codec, run, index)
            yield from _timed(_decode(codec, packet, damage), time_of, limits)
        if index + 1 == run.stop:
            yield from _timed(_decode(codec, None, damage), time_of, limits)
            codec.flush_buffers()
            run = next(remaining, None)
    yield from _timed(_decode(codec, None, damage), time_of, limits)


def _skip_unwanted(codec: VideoCodecContext, run: DecodeRun, index: int) -> None:
    if run.wanted is None or codec.name not in _SKIPS_EXACTLY:
        return
    codec.skip_frame = "DEFAULT" if index in run.wanted else "NONREF"


def _decode(codec: VideoCodecContext, packet: "Packet[VideoStream] | None", damage: DamageCount) -> list[VideoFrame]:
    try:
        return codec.decode(packet)
    except EOFError:  # drained before
        return []
    except Exception as failure:  # a damaged packet raises whatever the decoder trips over
        damage.add(failure)
        return []


def _clock(packets: PacketTimes) -> Callable[[VideoFrame], float | None]:
    """The function that says when a frame is shown, in seconds; None when nothing tells."""
    if packets.in_output_order:
        times_s = iter(packets.shown_s())
        return lambda frame: next(times_s, None)

    def by_timestamp(frame: VideoFrame) -> float | None:
        ticks = frame.pts if frame.pts is not None else frame.dts
        return None if ticks is None else packets.seconds(ticks)

    return by_timestamp


def _timed(
    frames: Sequence[VideoFrame], time_of: Callable[[VideoFrame], float | None], limits: DecodeLimits
) -> Iterator[tuple[float, VideoFrame]]:
    for frame in frames:
        check_picture_size(frame.width, frame.height, limits)
        time_s = time_of(frame)
        if time_s is not None:
            yield time_s, frame


# -- decode -----------------------------------------------------------------------------------------------------------

_DURATION_SLACK_S = 0.3
"""Sound often outlasts the pictures by less than this."""


def sample_video(
    source: Source,
    num_frames: int,
    limits: DecodeLimits,
    *,
    fps: float = 0.0,
    should_stop: Callable[[], bool] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    allocate: Allocate = on_heap,
    size: FrameSize = ANY_SIZE,
) -> SampledVideo:
    """Up to `num_frames` frames, or `num_sampled` by `fps`, at `sample_times`; FramePicker says which ones.

    Blocks: run it in a worker thread. `source` must be seekable and is left open. `should_stop` is polled between
    packets and inside reads; `on_progress(frames_so_far, frames_expected)` is called from this thread. `allocate` says
    where the frames are put; it may be called twice, and then the first memory is not used any more. `size` says
    which size upright frames are resized to; without it they keep theirs, within the limits.

    Raises InvalidRequest, UnreadableVideo, LimitExceeded, or DecodeCancelled.
    """
    if not 1 <= num_frames <= limits.max_frames_sampled:
        raise InvalidRequest(f"num_frames is {num_frames}; ask for 1 to {limits.max_frames_sampled}")
    watch = Watch(limits.timeout_s, should_stop)
    damage = DamageCount(limits.max_corrupt_packets)
    with open_video(source, limits, watch, counts_on=True) as video:
        packets = read_packet_times(video, limits, damage)
        stated_s, is_cut = video.stated_s, video.is_cut
        codec = video.stream.codec_context.codec.canonical_name
    duration_s = packets.end_s()
    num_frames = num_sampled(duration_s, num_frames, fps)
    sampler = _Sampler(source, limits, watch, packets, num_frames, on_progress, allocate, size)
    kept, decode_damage = sampler.sample()
    if not kept:
        raise decode_damage.error("no frame of the video could be decoded; it is damaged, export it again")
    warnings = [
        *max(damage, decode_damage, key=lambda d: d.count).warnings(),
        *packets.warnings(),
        *kept.warnings(),
        *warn_cut_off(is_cut, stated_s, packets),
        *warn_few(num_frames, len(kept)),
    ]
    width, height = kept.source_size
    return SampledVideo(
        kept.stacked(), tuple(kept.times_s), duration_s, width, height, codec, kept.rotation, tuple(warnings)
    )


@dataclass(frozen=True)
class _Sampler:
    """Second pass over the file: the sparse plan first, everything if that misses a frame. What the sparse one gave
    stays if that gives less, or does not come to an end in time."""

    source: Source
    limits: DecodeLimits
    watch: Watch
    packets: PacketTimes
    num_frames: int
    on_progress: Callable[[int, int], None] | None
    allocate: Allocate
    size: FrameSize

    def sample(self) -> tuple[FrameBuffer, DamageCount]:
        times_s = sample_times(0.0, self.packets.end_s(), self.num_frames)
        wanted_s = self.packets.wanted_s(times_s)
        whole = plan_all(self.packets)
        sparse = whole if self.packets.in_output_order else plan_runs(self.packets, wanted_s)
        check_decoded(sparse, self.limits)
        kept, damage = self._decode(sparse, times_s, len(wanted_s))
        if same_times(kept.times_s, wanted_s) or sparse == whole or len(self.packets) > self.limits.max_frames_decoded:
            return kept, damage
        # Key packets that are none, or lost packets: decoding from the start finds the frames that do exist.
        if not kept:
            return self._decode(whole, times_s, len(wanted_s))
        pictures = kept.stacked().copy()
        with suppress(UnreadableVideo, LimitExceeded):
            found, found_damage = self._decode(whole, times_s, len(wanted_s))
            if len(found) >= len(kept):
                return found, found_damage
        kept.stacked()[:] = pictures  # the memory is the same
        return kept, damage

    def _decode(
        self, runs: Sequence[DecodeRun], times_s: Sequence[float], num_expected: int
    ) -> tuple[FrameBuffer, DamageCount]:
        damage = DamageCount(self.limits.max_corrupt_packets)
        with open_video(self.source, self.limits, self.watch, counts_on=True) as video:
            aspect, most = video.stream.sample_aspect_ratio, self.limits.max_frame_pixels
            kept = FrameBuffer(self.size, most, self.num_frames, num_expected, self.allocate, aspect)
            frames = decode_runs(video, self.packets, runs, self.limits, damage)
            for time_s, frame in pick_frames(frames, FramePicker(times_s)):
                try:
                    kept.append(time_s, frame)
                except InvalidRequest:  # of a sound picture that the model does not take
                    raise
                except Exception as failure:  # a damaged picture that cannot be converted
                    damage.add(failure)
                if self.on_progress is not None:
                    self.on_progress(len(kept), num_expected)
        return kept, damage


def check_decoded(runs: Sequence[DecodeRun], limits: DecodeLimits) -> None:
    """Raises `LimitExceeded` for runs of more pictures than may be decoded."""
    num_decoded = sum(run.stop - run.start for run in runs)
    if num_decoded > limits.max_frames_decoded:
        raise LimitExceeded(
            f"{num_decoded} pictures would have to be decoded, more than the {limits.max_frames_decoded} "
            "served; cut the video, or export it with more key frames"
        )


def pick_frames(frames: Iterable[tuple[float, VideoFrame]], picker: FramePicker) -> Iterable[tuple[float, VideoFrame]]:
    """The wanted ones among timed frames. Frames that go back in time are dropped; at most one is held back."""
    previous: tuple[float, VideoFrame] | None = None
    for time_s, frame in frames:
        if picker.is_late(time_s):
            continue
        if picker.offer(time_s) and previous is not None:
            yield previous
        if picker.done:
            return
        previous = time_s, frame
    if picker.finish() and previous is not None:
        yield previous


def same_times(times_s: Sequence[float], wanted_s: Sequence[float]) -> bool:
    """Whether these are the wanted frames."""
    return len(times_s) == len(wanted_s) and bool(np.allclose(times_s, wanted_s, rtol=0.0, atol=TIME_TOLERANCE_S))


def warn_cut_off(is_cut: bool, stated_s: float, packets: PacketTimes) -> list[str]:
    """What to say of a file that ends before it should."""
    duration_s = packets.end_s()
    if is_cut:
        return [f"the file is cut off; its frames end at {duration_s:.1f} s"]
    start_s = max(packets.seconds_of_origin(), 0.0)  # some containers state the time of the end, and no length
    if stated_s <= start_s + duration_s + _DURATION_SLACK_S:
        return []
    return [f"the file states {stated_s:.1f} s, but its frames end at {duration_s:.1f} s"]


def warn_few(num_frames: int, num_kept: int) -> list[str]:
    """What to say of a clip with fewer frames than were asked for."""
    if num_kept == num_frames:
        return []
    return [f"{num_frames} frames were asked for, but the video has only {num_kept} at these times"]
