"""Segments of a film: where they begin, and the frames of some of them, from one pass over the file.

A window is sampled as if it were a clip of its own: its first frame is at its start, and no frame of a neighbour stands
in for one that is missing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby

import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from slipstream.errors import UnreadableVideo
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.video.container import DamageCount, Source, Watch, open_video, read_packet_times
from slipstream.video.decode import (
    FrameBuffer,
    check_decoded,
    decode_runs,
    pick_frames,
    same_times,
    warn_cut_off,
    warn_few,
)
from slipstream.video.film_cuts import bounds_of, check_times, fixed_starts
from slipstream.video.frame_times import (
    TIME_TOLERANCE_S,
    DecodeRun,
    FramePicker,
    PacketTimes,
    plan_runs,
    sample_times,
)
from slipstream.video.messages import DecodeLimits, Planned, SampledVideo, Window
from slipstream.video.shots import find_shots

NO_FRAME = "no frame of this segment could be decoded; the file is damaged there"

# -- where segments begin ---------------------------------------------------------------------------------------------


def plan_segments(source: Source, stride_s: float, limits: DecodeLimits) -> Planned:
    """Where the film's segments of a fixed length begin. No frame is decoded for that.

    Raises InvalidRequest, UnreadableVideo or LimitExceeded.
    """
    watch, damage = Watch(limits.timeout_s, None), DamageCount(limits.max_corrupt_packets)
    with open_video(source, limits, watch) as video:
        packets = read_packet_times(video, limits, damage)
        stated_s, is_cut = (video.container.duration or 0) / 1e6, video.is_cut
    check_times(packets)
    start_s, shown_s, end_s = packets.seconds_of_origin(), packets.shown_s(), packets.end_s()
    is_counted_from_zero = stated_s > end_s + max(start_s, 0.0)  # some containers state the time of the end instead
    warnings = [*damage.warnings(), *warn_cut_off(is_cut, stated_s if is_counted_from_zero else 0.0, end_s)]
    starts_s = fixed_starts(shown_s, stride_s)
    return Planned(round(start_s, 6), bounds_of(starts_s, end_s), tuple(warnings))


def plan_shots(source: Source, piece: Window, shot_s: float, limits: DecodeLimits) -> Planned:
    """Where shots begin within a piece of a film, of which each frame is decoded once, small: the bounds are `shot_s`,
    when the last shot before began, then those that were found, then the piece's end.

    Raises InvalidRequest, UnreadableVideo or LimitExceeded.
    """
    watch, damage = Watch(limits.timeout_s, None), DamageCount(limits.max_corrupt_packets)
    with open_video(source, limits, watch) as video:
        packets = read_packet_times(video, limits, damage)
    found_s = find_shots(source, packets, piece, shot_s, limits, watch)
    return Planned(packets.seconds_of_origin(), (shot_s, *(round(time_s, 6) for time_s in found_s), piece[1]), ())


# -- frames of windows ------------------------------------------------------------------------------------------------

AllocateWindow = Callable[[int, tuple[int, ...]], NDArray[np.uint8]]
"""Gives memory for the frames of a window, by its number, of the shape [most frames, height, width, 3]."""


def on_heap(window: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Memory of this process."""
    return np.empty(shape, dtype=np.uint8)


def sample_windows(
    source: Source,
    num_frames: int,
    windows: Sequence[Window],
    limits: DecodeLimits,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    allocate: AllocateWindow = on_heap,
    size: FrameSize = ANY_SIZE,
) -> list[SampledVideo | UnreadableVideo]:
    """Of each window what `sample_video` gives for a clip of its frames alone, or why there is nothing.

    `windows` are ascending and do not overlap. See `sample_video` for the rest; `on_progress` counts the frames of all
    windows.

    Raises InvalidRequest, UnreadableVideo or LimitExceeded about the file as a whole.
    """
    watch, damage = Watch(limits.timeout_s, None), DamageCount(limits.max_corrupt_packets)
    with open_video(source, limits, watch) as video:
        packets = read_packet_times(video, limits, damage)
        codec = video.stream.codec_context.codec.canonical_name
    sampler = _WindowSampler(source, num_frames, windows, limits, watch, packets, on_progress, allocate, size)
    kept, decode_damage = sampler.sample()
    damaged = max(damage, decode_damage, key=lambda d: d.count).warnings()
    found: list[SampledVideo | UnreadableVideo] = []
    for (start_s, end_s), frames, expected in zip(windows, kept, sampler.expected, strict=True):
        if not frames:
            found.append(UnreadableVideo(NO_FRAME))
            continue
        lost = [] if same_times(frames.times_s, expected) else damaged
        warnings = (*lost, *frames.warnings(), *warn_few(num_frames, len(frames)))
        since_s = (time_s - start_s for time_s in frames.times_s)
        times_s = tuple(0.0 if time_s < TIME_TOLERANCE_S else time_s for time_s in since_s)
        width, height = frames.source_size
        video_of = SampledVideo(
            frames.stacked(), times_s, end_s - start_s, width, height, codec, frames.rotation, warnings
        )
        found.append(video_of)
    return found


@dataclass
class _WindowSampler:
    """Second pass over the file: the sparse plan first, everything up to the last window if that misses a frame."""

    source: Source
    num_frames: int
    windows: Sequence[Window]
    limits: DecodeLimits
    watch: Watch
    packets: PacketTimes
    on_progress: Callable[[int, int], None] | None
    allocate: AllocateWindow
    size: FrameSize
    times: list[list[float]] = field(init=False)
    """Of each window those that are wanted, evenly spaced,"""
    expected: list[list[float]] = field(init=False)
    """and the frames' that serve them."""

    def __post_init__(self) -> None:
        self.times = [sample_times(start_s, end_s, self.num_frames) for start_s, end_s in self.windows]
        self.expected = [self.packets.wanted_s(times_s) for times_s in self.times]

    def sample(self) -> tuple[list[FrameBuffer], DamageCount]:
        sparse = plan_runs(self.packets, [time_s for expected in self.expected for time_s in expected])
        whole = [DecodeRun(0, sparse[-1].stop, wanted=None)]
        if self.packets.in_output_order:
            sparse = whole = [DecodeRun(0, len(self.packets), wanted=None)]
        check_decoded(sparse, self.limits)
        kept, damage = self._decode(sparse)
        is_complete = all(
            same_times(frames.times_s, expected) for frames, expected in zip(kept, self.expected, strict=True)
        )
        if is_complete or sparse == whole or whole[0].stop > self.limits.max_frames_decoded:
            return kept, damage
        return self._decode(whole)

    def _decode(self, runs: Sequence[DecodeRun]) -> tuple[list[FrameBuffer], DamageCount]:
        damage = DamageCount(self.limits.max_corrupt_packets)
        num_expected, num_kept = sum(map(len, self.expected)), 0
        with open_video(self.source, self.limits, self.watch) as video:
            kept = self._buffers(video.stream.sample_aspect_ratio)
            frames = decode_runs(video, self.packets, runs, self.limits, damage)
            for window, of_window in groupby(self._located(frames), key=lambda located: located[0]):
                picker = FramePicker(self.times[window])
                for time_s, frame in pick_frames((timed for _, timed in of_window), picker):
                    try:
                        kept[window].append(time_s, frame)
                    except Exception as failure:  # a damaged picture that cannot be converted
                        damage.add(failure)
                        continue
                    num_kept += 1
                    if self.on_progress is not None:
                        self.on_progress(num_kept, num_expected)
        return kept, damage

    def _buffers(self, aspect: Fraction | None) -> list[FrameBuffer]:
        def allocator(window: int) -> Callable[[tuple[int, ...]], NDArray[np.uint8]]:
            return lambda shape: self.allocate(window, shape)

        most = self.limits.max_frame_pixels
        return [
            FrameBuffer(self.size, most, self.num_frames, len(expected), allocator(window), aspect)
            for window, expected in enumerate(self.expected)
        ]

    def _located(self, frames: Iterable[tuple[float, VideoFrame]]) -> Iterator[tuple[int, tuple[float, VideoFrame]]]:
        """The frames that lie in a window, with its number. Ends behind the last window; what goes back in time is
        dropped."""
        starts_s, last_s = [start_s for start_s, _ in self.windows], -np.inf
        for time_s, frame in frames:
            if time_s <= last_s:
                continue
            last_s = time_s
            window = bisect_right(starts_s, time_s + TIME_TOLERANCE_S) - 1
            if window < 0:
                continue
            start_s, end_s = self.windows[window]
            if time_s + TIME_TOLERANCE_S < max(end_s, start_s + 2 * TIME_TOLERANCE_S):
                yield window, (time_s, frame)
            elif window == len(starts_s) - 1:
                return
