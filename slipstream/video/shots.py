"""Where one shot ends and the next begins, from small pictures of every frame.

As PySceneDetect's ContentDetector: the mean change of hue, saturation and brightness from one frame to the next. Here
too a cut is where that is above a threshold, and no shot is shorter than a least length.
"""

from collections.abc import Iterable
from typing import BinaryIO

import numpy as np
from av.video.frame import VideoFrame
from numpy.typing import NDArray

from slipstream.errors import LimitExceeded
from slipstream.video.container import DamageCount, Watch, open_video
from slipstream.video.decode import decode_runs
from slipstream.video.frame_times import PacketTimes, plan_all
from slipstream.video.messages import DecodeLimits

THRESHOLD = 27.0
"""Of the mean change, on a scale of 0 to 255; ContentDetector's."""
LEAST_SHOT_S = 0.6
"""ContentDetector's 15 frames at 25 frames a second."""
WIDTH, HEIGHT = 64, 36


def find_shots(source: BinaryIO, packets: PacketTimes, limits: DecodeLimits, watch: Watch) -> NDArray[np.float64]:
    """[num_shots] when each shot begins, the first at the film's first frame.

    Raises LimitExceeded for a film with more frames than may be decoded in one job, and what decoding raises.
    """
    if len(packets) > limits.max_frames_decoded:
        raise LimitExceeded(
            f"the film has {len(packets)} frames, and shots are looked for in at most {limits.max_frames_decoded}; "
            "ask for segments of a fixed length, or cut the film"
        )
    damage = DamageCount(limits.max_corrupt_packets)
    with open_video(source, limits, watch) as video:
        frames = decode_runs(video, packets, plan_all(packets), limits, damage)
        cuts_s = shot_starts((time_s, _small(frame)) for time_s, frame in frames)
    first_s = packets.shown_s()[0]
    return np.asarray([first_s, *(cut_s for cut_s in cuts_s if cut_s > first_s)])


def shot_starts(
    pictures: Iterable[tuple[float, NDArray[np.uint8]]], threshold: float = THRESHOLD, least_s: float = LEAST_SHOT_S
) -> list[float]:
    """When shots begin after the first, of pictures [height, width, 3] in RGB with the times at which they are shown.
    Pictures that go back in time are left out."""
    starts_s: list[float] = []
    before: NDArray[np.float32] | None = None
    shot_s = last_s = -np.inf
    for time_s, picture in pictures:
        if time_s <= last_s:
            continue
        now, last_s = hsv(picture), time_s
        if before is None:
            shot_s = time_s
        elif time_s - shot_s >= least_s and change(before, now) >= threshold:
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
