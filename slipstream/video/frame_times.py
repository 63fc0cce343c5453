"""Which frames of a clip to look at, and which packets that needs. Pure: no I/O, no codec, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest

TIME_TOLERANCE_S = 1e-6
"""A frame this much later than a wanted time still counts as "at" it: it absorbs float rounding, not frame gaps."""


def sample_times(start_s: float, end_s: float, num_frames: int) -> list[float]:
    """`num_frames` evenly spaced times: `t_i = start + i * (end - start) / num_frames`. `end_s` itself is never one.

    Raises InvalidRequest when `num_frames` is below 1 or the clip ends before it starts.
    """
    if num_frames < 1:
        raise InvalidRequest(f"num_frames is {num_frames}; ask for at least 1 frame")
    if end_s < start_s:
        raise InvalidRequest(f"the clip ends at {end_s} s, before its start at {start_s} s")
    return [start_s + i * (end_s - start_s) / num_frames for i in range(num_frames)]


def num_sampled(duration_s: float, most: int, fps: float) -> int:
    """How many frames to sample of a clip: `fps` of each second, to the nearest, but at least one and no more than
    `most`; 0: `most`, however long it is."""
    return min(max(round(duration_s * fps), 1), most) if fps else most


@dataclass
class FramePicker:
    """Says, while frames arrive in presentation order, which of them are wanted.

    Each wanted time takes the last frame at or before it; a time before the first frame takes the first frame. A frame
    that serves several times is picked once, so a clip with fewer frames than times yields each of its frames once, in
    order. A choice is known only when the next frame arrives, so answers are about the frame offered *before*:

        for frame in frames:
            if picker.offer(frame.time_s):
                keep(previous)
            previous = frame
        if picker.finish():
            keep(previous)

    Times must be ascending. A frame that is not later than its predecessor is out of order: do not offer it
    (`is_late` tells).
    """

    times_s: Sequence[float]
    _next_time: int = field(default=0, init=False)
    _last_s: float | None = field(default=None, init=False)

    @property
    def done(self) -> bool:
        """True when every wanted time has its frame."""
        return self._next_time == len(self.times_s)

    def is_late(self, time_s: float) -> bool:
        """Whether a frame at `time_s` would go back in time."""
        return self._last_s is not None and time_s <= self._last_s

    def offer(self, time_s: float) -> bool:
        """Take note of the next frame; True when the previously offered one is wanted."""
        had_previous = self._last_s is not None
        self._last_s = time_s
        return had_previous and self._take_before(time_s)

    def finish(self) -> bool:
        """No more frames: True when the last offered one is wanted."""
        return self._last_s is not None and self._take_before(float("inf"))

    def _take_before(self, time_s: float) -> bool:
        first = self._next_time
        while not self.done and self.times_s[self._next_time] + TIME_TOLERANCE_S < time_s:
            self._next_time += 1
        return self._next_time > first


@dataclass(frozen=True)
class PacketTimes:
    """When each packet of a clip is shown, in decode order; times count from the first frame that can be shown."""

    time_s: NDArray[np.float64]
    """[num_packets] presentation time."""
    is_key: NDArray[np.bool_]
    """[num_packets] True where a decoder can start."""
    is_shown: NDArray[np.bool_]
    """[num_packets] False for packets that only serve as references."""
    origin_ticks: int = 0
    """The stream's own timestamp of time zero."""
    tick_s: float = 1.0
    """Length of one tick of the stream's clock."""
    lone_frame_s: float = 0.0
    """How long a clip of a single frame lasts."""
    in_output_order: bool = False
    """The container knows no presentation times: the n-th frame out of the decoder is shown at the n-th time."""
    num_restarts: int = 0
    """How often the container's clock begins anew."""
    num_behind: int = 0
    """Packets behind such a beginning that are shown before others that came before it."""

    def __len__(self) -> int:
        return len(self.time_s)

    def seconds(self, ticks: int) -> float:
        """Time of a timestamp of the stream."""
        return (ticks - self.origin_ticks) * self.tick_s

    def seconds_of_origin(self) -> float:
        """What the container's own clock says at time zero; 0 where it knows no presentation times."""
        return 0.0 if self.in_output_order else self.origin_ticks * self.tick_s

    def warnings(self) -> list[str]:
        """What to say of a clock that begins anew."""
        if not self.num_restarts:
            return []
        lost = f"{self.num_behind} frames are stamped as others before and are not shown" if self.num_behind else ""
        found = f"timestamps go back {self.num_restarts} times, as in files that were joined"
        return [f"{found}; {lost or 'times were counted on from there'}"]

    def end_s(self) -> float:
        """When the last frame ends: its time plus the median gap, since stated durations lie."""
        shown_s = self.shown_s()
        if len(shown_s) < 2:
            return self.lone_frame_s
        return float(shown_s[-1] + np.median(np.diff(shown_s)))

    def shown_s(self) -> NDArray[np.float64]:
        """[<= num_packets] the distinct times at which a frame is shown, ascending."""
        return np.unique(self.time_s[self.is_shown])

    def wanted_s(self, times_s: Sequence[float]) -> list[float]:
        """The distinct presentation times that serve `times_s`, ascending: what FramePicker will pick."""
        shown_s = self.shown_s()
        last_at_or_before = np.searchsorted(shown_s, np.asarray(times_s) + TIME_TOLERANCE_S, side="right") - 1
        return [float(t) for t in shown_s[np.unique(np.maximum(last_at_or_before, 0))]]


@dataclass(frozen=True)
class DecodeRun:
    """Packets `start <= i < stop` in decode order, to be decoded without a gap by a freshly flushed decoder."""

    start: int
    stop: int
    wanted: frozenset[int] | None
    """The packets among them whose frames are wanted; None means that every frame counts."""


def plan_all(packets: PacketTimes) -> list[DecodeRun]:
    """Decode everything: what `plan_runs` must agree with."""
    return [DecodeRun(0, len(packets), wanted=None)]


def plan_runs(packets: PacketTimes, wanted_s: Sequence[float]) -> list[DecodeRun]:
    """The fewest packets that give every frame in `wanted_s` intact; runs are ascending and do not overlap.

    A run starts at the last key packet decoded and shown at or before the wanted frame. Pictures decoded after a key
    packet but shown before it may need the group before, and where a film has several edits, hidden packets are decoded
    after pictures that are shown behind them. It stops after the wanted packet, since all references precede it in
    decode order.
    """
    keys = np.flatnonzero(packets.is_key)
    shown_index, shown_s = _by_time(packets, packets.is_shown)
    runs: list[DecodeRun] = []
    for time_s in wanted_s:
        packet = int(shown_index[np.searchsorted(shown_s, time_s)])
        before = keys[: np.searchsorted(keys, packet, side="right")]
        rank = _last_at_or_before(packets.time_s, before, time_s)
        _append_run(runs, DecodeRun(0 if rank is None else int(before[rank]), packet + 1, frozenset({packet})))
    return runs


def _last_at_or_before(times_s: NDArray[np.float64], index: NDArray[np.intp], time_s: float) -> int | None:
    """The last place in `index` whose time is no later than that: mostly the very last one, and so looked for there."""
    high, size = len(index), 1
    while high > 0:
        low = max(0, high - size)
        found = np.flatnonzero(times_s[index[low:high]] <= time_s)
        if len(found):
            return low + int(found[-1])
        high, size = low, 2 * size
    return None


def _by_time(packets: PacketTimes, mask: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """(indices, times) of the masked packets, ascending in time."""
    index = np.flatnonzero(mask)
    index = index[np.argsort(packets.time_s[index], kind="stable")]
    return index, packets.time_s[index]


def _append_run(runs: list[DecodeRun], run: DecodeRun) -> None:
    while runs and run.start < runs[-1].stop:
        before = runs.pop()
        wanted = (before.wanted or frozenset()) | (run.wanted or frozenset())
        run = DecodeRun(min(run.start, before.start), max(run.stop, before.stop), wanted)
    runs.append(run)
