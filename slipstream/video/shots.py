"""Where one shot ends and the next begins, from small pictures of every frame.

As PySceneDetect's ContentDetector: the mean change of hue, saturation and brightness from one frame to the next. Here
too a cut is where that is above a threshold, and no shot is shorter than a least length.
"""

from collections.abc import Iterable
from itertools import takewhile

import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from slipstream.video.container import Source, Watch, open_video
from slipstream.video.damage import FilmDamage
from slipstream.video.decode import check_decoded, decode_runs
from slipstream.video.frame_times import TIME_TOLERANCE_S, PacketTimes, plan_all, plan_runs
from slipstream.video.messages import DecodeLimits, Window

THRESHOLD = 27.0
"""Of the mean change, on a scale of 0 to 255; ContentDetector's."""
LEAST_SHOT_S = 0.6
"""ContentDetector's 15 frames at 25 frames a second."""
WIDTH, HEIGHT = 64, 36


def find_shots(
    source: Source, packets: PacketTimes, piece: Window, shot_s: float, limits: DecodeLimits, watch: Watch
) -> list[float]:
    """When shots begin within a piece of a film, whose last shot before began at `shot_s`. The frame before the piece
    is looked at too, so that the pieces of a film give the shots of the whole.

    Raises LimitExceeded for a piece with more frames than may be decoded in one job, and what decoding raises.
    """
    start_s, end_s = (bound - TIME_TOLERANCE_S for bound in piece)
    shown_s = packets.shown_s()
    first, last = np.searchsorted(shown_s, (start_s, end_s))
    wanted_s = [float(time_s) for time_s in shown_s[max(first - 1, 0) : last]]
    runs = plan_all(packets) if packets.in_output_order else plan_runs(packets, wanted_s)
    check_decoded(runs, limits)
    damage = FilmDamage(limits.max_corrupt_packets)
    with open_video(source, limits, watch) as video:
        frames = decode_runs(video, packets, runs, limits, damage)
        within = takewhile(lambda timed: timed[0] < end_s, frames)
        pictures = ((time_s, _small(frame)) for time_s, frame in within if time_s > wanted_s[0] - TIME_TOLERANCE_S)
        return [found_s for found_s in shot_starts(pictures, shot_s) if found_s >= start_s]


def shot_starts(
    pictures: Iterable[tuple[float, NDArray[np.uint8]]],
    shot_s: float = 0.0,
    threshold: float = THRESHOLD,
    least_s: float = LEAST_SHOT_S,
) -> list[float]:
    """When shots begin, of pictures [height, width, 3] in RGB with the times at which they are shown; `shot_s` is when
    that of the first one began. Pictures that go back in time are left out."""
    starts_s: list[float] = []
    before: NDArray[np.float32] | None = None
    last_s = -np.inf
    for time_s, picture in pictures:
        if time_s <= last_s:
            continue
        now, last_s = hsv(picture), time_s
        if before is not None and time_s - shot_s >= least_s and change(before, now) >= threshold:
            shot_s = time_s
            starts_s.append(time_s)
        before = now
    return starts_s


def change(before: NDArray[np.float32], now: NDArray[np.float32]) -> float:
    """Mean difference of hue, saturation and brightness, 0 to 255."""
    return float(np.abs(now - before).mean())


def hsv(picture: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[height, width, 3] hue (0 to 180, in steps of two degrees, as OpenCV has it), saturation and brightness."""
    rgb = picture.astype(np.float32)
    most, least = rgb.max(axis=2), rgb.min(axis=2)
    span = most - least
    safe = np.where(span > 0, span, 1.0)
    red, green, blue = (rgb[..., channel] for channel in range(3))
    hue = np.select(
        [span == 0, most == red, most == green],
        [np.zeros_like(most), (green - blue) / safe % 6, (blue - red) / safe + 2],
        (red - green) / safe + 4,
    )
    saturation = np.where(most > 0, 255 * span / np.where(most > 0, most, 1.0), 0.0)
    return np.stack([30 * hue, saturation, most], axis=2).astype(np.float32)


def _small(frame: VideoFrame) -> NDArray[np.uint8]:
    small = frame.reformat(width=WIDTH, height=HEIGHT, format="rgb24", interpolation="AREA", threads=1)
    return np.asarray(small.to_ndarray(format="rgb24", threads=1), dtype=np.uint8)
