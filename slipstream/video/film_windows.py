"""Segments of a film: where they begin, and the frames of some of them, from one pass over the file.

A window is sampled as if it were a clip of its own: its first frame is at its start, and no frame of a neighbour stands
in for one that is missing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest, LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.video.container import Source, Watch, open_video
from slipstream.video.damage import DamageCount, FilmDamage
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
from slipstream.video.film_listing import ListFilm, list_film
from slipstream.video.frame_times import (
    TIME_TOLERANCE_S,
    DecodeRun,
    FramePicker,
    PacketTimes,
    num_sampled,
    plan_runs,
    sample_times,
)
from slipstream.video.messages import DecodeLimits, Planned, SampledVideo, Window
from slipstream.video.shots import find_shots

NO_FRAME = "no frame of this segment could be decoded; the file is damaged there"
CLOSER_LOOK = 500
"""Packets ahead of a segment that lacks frames which are decoded with it. A key packet that is none, as of streams that
are refreshed bit by bit, gives whole pictures some tens of packets later."""

# -- where segments begin ---------------------------------------------------------------------------------------------


def plan_segments(source: Source, stride_s: float, limits: DecodeLimits, *, listed: ListFilm = list_film) -> Planned:
    """Where the film's segments of a fixed length begin. No frame is decoded for that.

    Raises InvalidRequest, UnreadableVideo or LimitExceeded.
    """
    listing = listed(source, limits, Watch(limits.timeout_s, None))
    packets = listing.packets
    check_times(packets)
    cut_off = warn_cut_off(listing.is_cut, listing.stated_s, packets)
    bounds = bounds_of(fixed_starts(packets.shown_s(), stride_s), packets.end_s())
    warnings = (*listing.damage.warnings(), *packets.warnings(), *cut_off)
    return Planned(round(packets.seconds_of_origin(), 6), bounds, warnings)


def plan_shots(
    source: Source, piece: Window, shot_s: float, limits: DecodeLimits, *, listed: ListFilm = list_film
) -> Planned:
    """Where shots begin within a piece of a film, of which each frame is decoded once, small: the bounds are `shot_s`,
    when the last shot before began, then those that were found, then the piece's end.

    Raises InvalidRequest, UnreadableVideo or LimitExceeded.
    """
    watch = Watch(limits.timeout_s, None)
    listing = listed(source, limits, watch)
    found_s = find_shots(source, listing.packets, piece, shot_s, limits, watch)
    return Planned(
        listing.packets.seconds_of_origin(), (shot_s, *(round(time_s, 6) for time_s in found_s), piece[1]), ()
    )


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
    fps: float = 0.0,
    listed: ListFilm = list_film,
    on_progress: Callable[[int, int], None] | None = None,
    allocate: AllocateWindow = on_heap,
    size: FrameSize = ANY_SIZE,
) -> list[SampledVideo | SlipstreamError]:
    """Of each window what `sample_video` gives for a clip of its frames alone, or why there is nothing: whatever is
    torn elsewhere in the film, and however much of it.

    `windows` are ascending and do not overlap. See `sample_video` for the rest; `on_progress` counts the frames of all
    windows.

    Raises InvalidRequest, UnreadableVideo or LimitExceeded about the file as a whole.
    """
    watch = Watch(limits.timeout_s, None)
    listing = listed(source, limits, watch)
    counts = [num_sampled(end_s - start_s, num_frames, fps) for start_s, end_s in windows]
    sampler = _WindowSampler(source, counts, windows, limits, watch, listing.packets, on_progress, allocate, size)
    found: list[SampledVideo | SlipstreamError] = []
    for (start_s, end_s), count, taken, expected in zip(
        windows, counts, sampler.sample(), sampler.expected, strict=True
    ):
        frames = taken.frames
        if taken.error is not None:
            found.append(taken.error)
            continue
        damaged = (taken.damage if taken.damage.count else listing.damage).warnings()
        lost = [] if same_times(frames.times_s, expected) else damaged
        warnings = (*lost, *frames.warnings(), *warn_few(count, len(frames)))
        since_s = (time_s - start_s for time_s in frames.times_s)
        times_s = tuple(0.0 if time_s < TIME_TOLERANCE_S else time_s for time_s in since_s)
        width, height = frames.source_size
        video_of = SampledVideo(
            frames.stacked(), times_s, end_s - start_s, width, height, listing.codec, frames.rotation, warnings
        )
        found.append(video_of)
    return found


@dataclass(frozen=True)
class _Taken:
    """What one pass has of a window."""

    frames: FrameBuffer
    damage: DamageCount

    @property
    def error(self) -> SlipstreamError | None:
        """Why there is nothing to show."""
        if self.damage.is_too_much:
            return self.damage.error(self.damage.refusal("segment"))
        return None if self.frames else self.damage.error(NO_FRAME)


@dataclass
class _WindowSampler:
    """Second pass over the file: the sparse plan first, then a closer look at the windows that miss a frame."""

    source: Source
    counts: Sequence[int]
    """Frames that are wanted of each window."""
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
        self.times = [
            sample_times(start_s, end_s, count)
            for (start_s, end_s), count in zip(self.windows, self.counts, strict=True)
        ]
        self.expected = [self.packets.wanted_s(times_s) for times_s in self.times]

    def sample(self) -> list[_Taken]:
        """What there is of each window."""
        sparse = plan_runs(self.packets, [time_s for expected in self.expected for time_s in expected])
        if self.packets.in_output_order:
            sparse = [DecodeRun(0, len(self.packets), wanted=None)]
        check_decoded(sparse, self.limits)
        buffers, damage = self._begin(range(len(self.windows)))
        self._decode(sparse, buffers, damage)
        taken = {window: _Taken(frames, damage.of(window)) for window, frames in buffers.items()}
        if not self.packets.in_output_order:
            self._look_closer(taken)
        return list(taken.values())

    def _look_closer(self, taken: dict[int, _Taken]) -> None:
        """Decodes windows that miss a frame again, with all frames and what comes before. What the sparse plan gave of
        one stays if this gives less, or does not come to an end in time."""
        torn = [
            window
            for window, has in taken.items()
            if not (has.damage.is_too_much or same_times(has.frames.times_s, self.expected[window]))
        ]
        runs = plan_closely(self.packets, [self.expected[window] for window in torn])
        if not runs or sum(run.stop - run.start for run in runs) > self.limits.max_frames_decoded:
            return
        pictures = {window: taken[window].frames.stacked().copy() for window in torn if taken[window].frames}
        buffers, damage = self._begin(torn)
        with suppress(UnreadableVideo, LimitExceeded):
            self._decode(runs, buffers, damage)
        for window, frames in buffers.items():
            closer = _Taken(frames, damage.of(window))
            if taken[window].error is not None or (closer.error is None and len(frames) >= len(taken[window].frames)):
                taken[window] = closer
            else:  # the memory is the same
                taken[window].frames.stacked()[:] = pictures[window]

    def _begin(self, windows: Iterable[int]) -> tuple[dict[int, FrameBuffer], FilmDamage]:
        """Room for the frames of these windows, and a count of their damage."""

        def allocator(window: int) -> Callable[[tuple[int, ...]], NDArray[np.uint8]]:
            return lambda shape: self.allocate(window, shape)

        most = self.limits.max_frame_pixels
        buffers = {
            window: FrameBuffer(self.size, most, self.counts[window], len(self.expected[window]), allocator(window))
            for window in windows
        }
        return buffers, FilmDamage(self.limits.max_corrupt_packets, self._window_of)

    def _decode(self, runs: Sequence[DecodeRun], buffers: Mapping[int, FrameBuffer], damage: FilmDamage) -> None:
        """Fills the buffers. Raises what decoding does, and leaves what there is by then."""
        num_expected = sum(map(len, self.expected))
        num_kept = num_expected - sum(len(self.expected[window]) for window in buffers)
        with open_video(self.source, self.limits, self.watch) as video:
            for frames in buffers.values():
                frames.pixel_aspect = video.stream.sample_aspect_ratio
            timed = decode_runs(video, self.packets, runs, self.limits, damage)
            for window, of_window in groupby(self._located(timed, max(buffers)), key=lambda located: located[0]):
                if window not in buffers:
                    continue
                picker = FramePicker(self.times[window])
                for time_s, frame in pick_frames((timed for _, timed in of_window), picker):
                    try:
                        buffers[window].append(time_s, frame)
                    except InvalidRequest:  # of a sound picture that the model does not take
                        raise
                    except Exception as failure:  # a damaged picture that cannot be converted
                        damage.add(failure)
                        continue
                    num_kept += 1
                    if self.on_progress is not None:
                        self.on_progress(num_kept, num_expected)

    def _located(
        self, frames: Iterable[tuple[float, VideoFrame]], last: int
    ) -> Iterator[tuple[int, tuple[float, VideoFrame]]]:
        """The frames that lie in a window, with its number. Ends behind the last window of interest; what goes back in
        time is dropped."""
        last_s = -np.inf
        for time_s, frame in frames:
            if time_s <= last_s:
                continue
            last_s = time_s
            window = self._window_at(time_s)
            if time_s > self.windows[last][0] and window != last:
                return
            if window is not None:
                yield window, (time_s, frame)

    def _window_of(self, packet: int) -> int | None:
        """The window that a packet's picture lies in."""
        return self._window_at(float(self.packets.time_s[packet])) if packet < len(self.packets) else None

    def _window_at(self, time_s: float) -> int | None:
        """The window that what is shown then lies in."""
        window = bisect_right(self.windows, time_s + TIME_TOLERANCE_S, key=lambda bounds: bounds[0]) - 1
        if window < 0:
            return None
        start_s, end_s = self.windows[window]
        return window if time_s + TIME_TOLERANCE_S < max(end_s, start_s + 2 * TIME_TOLERANCE_S) else None


def plan_closely(packets: PacketTimes, wanted_s: Sequence[Sequence[float]]) -> list[DecodeRun]:
    """All frames around these of some windows: from the last key packet that is `CLOSER_LOOK` packets ahead of what
    `plan_runs` begins with, or from the film's start. Runs that overlap are one."""
    keys = np.flatnonzero(packets.is_key)
    runs: list[DecodeRun] = []
    for of_window in wanted_s:
        needed = plan_runs(packets, of_window)
        ahead = int(np.searchsorted(keys, needed[0].start - CLOSER_LOOK, side="right")) - 1
        start, stop = int(keys[ahead]) if ahead >= 0 else 0, needed[-1].stop
        if runs and start <= runs[-1].stop:
            before = runs.pop()
            start, stop = min(start, before.start), max(stop, before.stop)
        runs.append(DecodeRun(start, stop, wanted=None))
    return runs
