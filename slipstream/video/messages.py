"""What the parent and a decoder process tell each other, as JSON: limits in, a sampled video out.

A decoder reads hostile files, so its answers may be an attacker's and none is believed unchecked: they choose among
known kinds, their numbers are held against the request, and their texts are cut. Frames never travel here; they lie in
memory that the parent sized.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest, LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.frame_size import ANY_SIZE, FrameSize
from slipstream.video.film_cuts import MAX_SEGMENTS
from slipstream.video.formats import DEFAULT_TIER

# -- limits and result ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeLimits:
    """Bounds on one `sample_video` call; the defaults suit a server that takes files from strangers."""

    max_bytes: int = 2 * 1024**3
    """Size of the file."""
    max_ranged_bytes: int = 64 * 1024**3
    """The same of one that is elsewhere, and of which ranges are read."""
    max_duration_s: float = 6 * 3600.0
    """Time between the first and the last frame."""
    max_pixels_source: int = 8192 * 4320
    """Width x height of a coded picture, checked before decoding and on every frame."""
    max_packets: int = 2_000_000
    """Video packets in the file; six hours at 60 frames a second are 1.3 million."""
    max_frames_decoded: int = 200_000
    """Pictures decoded to reach the sampled ones."""
    max_frames_sampled: int = 1024
    """Frames that may be asked for: they are all held in memory."""
    max_frame_pixels: int = 448 * 448
    """Of frames that are returned. Where no size was asked for, only larger ones are scaled, to this, aspect kept."""
    max_corrupt_packets: int = 32
    """Packets that may be skipped because they cannot be read or decoded. One more, and the video is refused."""
    timeout_s: float = 120.0
    """Wall-clock time for the whole call."""
    formats: str = DEFAULT_TIER
    """Which containers and codecs are decoded, one of `slipstream.video.formats.TIERS`."""
    decoder_threads: int = 1
    """Threads of one decoder. Several captions decode side by side, so one each uses the cores best."""


@dataclass(eq=False)
class SampledVideo:
    """Frames of one clip, with when they are shown. It owns the frames: as a context manager, or by `close`, it frees
    them, whoever still knows it. So nobody is to keep the array itself."""

    frames: NDArray[np.uint8]
    """[n, height, width, 3] RGB, upright, C-contiguous, maybe read-only; 1 <= n <= what was asked for, 0 once freed."""
    timestamps_s: tuple[float, ...]
    """[n] seconds from the first frame of the clip, ascending."""
    duration_s: float
    """From the first frame to the end of the last, taken from the packets; may be 0 for a single frame."""
    source_width: int
    """Stored picture, before rotation and scaling."""
    source_height: int
    codec: str
    rotation: int
    """Degrees clockwise that the frames were turned: 0, 90, 180 or 270."""
    warnings: tuple[str, ...]
    """What the caller should know about a damaged, cut off or short file."""
    sha256: str = ""
    """Digest of the whole file in hexadecimal, computed where the file was opened; empty unless it was asked for."""
    num_bytes: int = 0
    """Size of what was digested; 0 unless it was asked for."""
    on_close: Callable[[], None] | None = None
    """Called once, when the frames are freed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the frames. May be called again."""
        self.frames = np.empty((0, *self.frames.shape[1:]), dtype=np.uint8)
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()


# -- messages ---------------------------------------------------------------------------------------------------------

MAX_MESSAGE_BYTES = 160 * 1024
"""Holds the timestamps of 4,096 frames, or the bounds of `MAX_SEGMENTS`; less than the kernel takes as one message."""
_MAX_TEXT, _MAX_WARNINGS = 600, 8
_MAX_SIDE = 2**31
_MAX_START_S = 2.0**63
"""A timestamp of 64 bits in seconds, the longest tick there is."""
_ERRORS: dict[str, type[SlipstreamError]] = {
    kind.__name__: kind for kind in (InvalidRequest, LimitExceeded, UnreadableVideo)
}


class BadAnswer(ValueError):
    """A decoder said what no sound decoder says."""


Window = tuple[float, float]
"""From when to when, in seconds from the first frame of the clip; the end is no part of it."""


@dataclass(frozen=True)
class DecodeRequest:
    """One job. The descriptors of the file and of the memory for its frames come with it."""

    num_frames: int
    """Most of the clip, or of each window."""
    limits: DecodeLimits
    size: FrameSize = ANY_SIZE
    """Of the frames that are wanted."""
    windows: tuple[Window, ...] = ()
    """Segments of the clip, ascending, each of which is sampled by itself; none: the whole clip is."""
    cut: float | None = None
    """No frames but cuts: every so many seconds; in a window, of shots, the last of which began at this time."""
    film: str = ""
    """Names the file for as long as it has this content, for what is asked of a film job by job; empty: it has none."""
    fps: float = 0.0
    """Frames of each second, where they are fewer; 0: `num_frames` at any length."""

    def encode(self) -> bytes:
        """The message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "DecodeRequest":
        """The request of a message that the parent wrote."""
        fields = json.loads(message)
        limits, size = DecodeLimits(**fields["limits"]), FrameSize(**fields["size"])
        windows = tuple((start_s, end_s) for start_s, end_s in fields["windows"])
        return cls(**(fields | {"limits": limits, "size": size, "windows": windows}))

    @property
    def most_frames(self) -> int:
        """Of all windows together."""
        return self.num_frames * max(len(self.windows), 1)

    @property
    def frames_bytes(self) -> int:
        """Most bytes that the frames can have. Those of each window lie in an equal part of the memory."""
        return self.window_bytes * max(len(self.windows), 1)

    @property
    def window_bytes(self) -> int:
        """Most bytes that the frames of one window can have."""
        numbers = range(1, self.num_frames + 1)
        return 3 * max(n * (self.size.most_pixels(n) or self.limits.max_frame_pixels) for n in numbers)

    @property
    def frame_pixels(self) -> int:
        """Most pixels that a frame can have."""
        return max(map(self.size.most_pixels, range(1, self.num_frames + 1))) or self.limits.max_frame_pixels


@dataclass(frozen=True)
class Ready:
    """The decoder waits for work."""

    confined: tuple[str, ...] = ()
    """What was taken from the process, by name."""


@dataclass(frozen=True)
class Started:
    """The request has arrived; from here on a crash is about this file."""


@dataclass(frozen=True)
class Progress:
    """`done` of `total` frames are there."""

    done: int
    total: int


@dataclass(frozen=True)
class Refused:
    """The file cannot be decoded."""

    error: str
    """Name of the error's class."""
    message: str

    def exception(self) -> SlipstreamError:
        """The error, of a class that decoding is documented to raise."""
        return _ERRORS[self.error](self.message)


@dataclass(frozen=True)
class Sampled:
    """The frames lie in the memory; these are the other fields of SampledVideo."""

    shape: tuple[int, int, int]
    """(n, height, width)"""
    timestamps_s: tuple[float, ...]
    duration_s: float
    source_width: int
    source_height: int
    codec: str
    rotation: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class SampledWindows:
    """What became of each window, in their order: one may have no frame that can be decoded, and the others have."""

    windows: tuple[Sampled | Refused, ...]


@dataclass(frozen=True)
class Planned:
    """Where a clip is cut."""

    start_s: float
    """When its first frame is shown, by the container's clock."""
    bounds: tuple[float, ...]
    """[num_segments + 1] seconds from that frame, ascending: where each segment begins, and where the last one ends."""
    warnings: tuple[str, ...]
    """What the caller should know about a damaged or cut off file, or one that is shorter than a segment."""


Answer = Ready | Started | Progress | Refused | Sampled | SampledWindows | Planned


def encode_answer(answer: Answer) -> bytes:
    """The message that `parse_answer` reads."""
    return json.dumps(_named(answer)).encode()


def _named(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, SampledWindows):
        return {type(answer).__name__: {"windows": [_named(window) for window in answer.windows]}}
    return {type(answer).__name__: asdict(answer)}


def parse_answer(message: bytes, request: DecodeRequest | None) -> Answer:
    """The answer to `request` (None before the first one), every field checked. Raises BadAnswer."""
    try:
        [(kind, fields)] = json.loads(message).items()
        return _PARSERS[kind](_Fields(fields), request)
    except BadAnswer:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as failure:
        raise BadAnswer(f"{type(failure).__name__} in an answer of {len(message)} bytes") from failure


class _Fields:
    """Fields of an untrusted message; every getter raises BadAnswer or KeyError for what does not fit."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def integer(self, name: str, low: int, high: int) -> int:
        return _integer(self._fields[name], low, high)

    def seconds(self, name: str) -> float:
        return _finite(self._fields[name])

    def text(self, name: str, limit: int = _MAX_TEXT) -> str:
        return _text(self._fields[name], limit)

    def list(self, name: str) -> list[Any]:
        found = self._fields[name]
        if not isinstance(found, list):
            raise BadAnswer(f"{name} is no list")
        return found

    def matching(self, name: str, pattern: str) -> str:
        found = self._fields[name]
        if not isinstance(found, str) or not re.fullmatch(pattern, found, re.ASCII):
            raise BadAnswer(f"{name} has the wrong form")
        return found


def _integer(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise BadAnswer(f"a number is not in {low}..{high}")
    return value


def _finite(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise BadAnswer("a time is no finite number")
    return float(value)  # type: ignore[arg-type]


def _text(value: object, limit: int = _MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise BadAnswer("a text is not a string")
    return printable(value, limit)


def printable(text: str, limit: int = _MAX_TEXT) -> str:
    """At most `limit` characters without control characters."""
    return "".join(char if char.isprintable() else "?" for char in text[:limit])


def _ready(fields: _Fields, request: DecodeRequest | None) -> Ready:
    return Ready(tuple(_text(name, 40) for name in fields.list("confined")[: _MAX_WARNINGS * 2]))


def _started(fields: _Fields, request: DecodeRequest | None) -> Started:
    return Started()


def _progress(fields: _Fields, request: DecodeRequest | None) -> Progress:
    limit = _asked(request).most_frames
    return Progress(fields.integer("done", 0, limit), fields.integer("total", 0, limit))


def _refused(fields: _Fields, request: DecodeRequest | None) -> Refused:
    return Refused(fields.matching("error", "|".join(_ERRORS)), fields.text("message"))


def _sampled(fields: _Fields, request: DecodeRequest | None) -> Sampled:
    asked = _asked(request)
    n, height, width = (_integer(size, 1, _MAX_SIDE) for size in fields.list("shape"))
    if n > asked.num_frames or height * width > asked.frame_pixels or 3 * n * height * width > asked.window_bytes:
        raise BadAnswer("there are more or larger frames than were asked for")
    times_s = tuple(_finite(time_s) for time_s in fields.list("timestamps_s"))
    if len(times_s) != n or any(late <= early for early, late in pairwise(times_s)):
        raise BadAnswer("the timestamps do not fit the frames")
    source_width, source_height = (fields.integer(f"source_{side}", 1, _MAX_SIDE) for side in ("width", "height"))
    if source_width * source_height > asked.limits.max_pixels_source:
        raise BadAnswer("the source picture is larger than allowed")
    duration_s = fields.seconds("duration_s")
    rotation = fields.integer("rotation", 0, 270)
    if duration_s < 0 or rotation % 90:
        raise BadAnswer("the duration or rotation is impossible")
    return Sampled(
        (n, height, width),
        times_s,
        duration_s,
        source_width,
        source_height,
        fields.matching("codec", "[a-z0-9_]{1,32}"),
        rotation,
        tuple(_text(warning) for warning in fields.list("warnings")[:_MAX_WARNINGS]),
    )


def _sampled_windows(fields: _Fields, request: DecodeRequest | None) -> SampledWindows:
    found = fields.list("windows")
    if len(found) != len(_asked(request).windows):
        raise BadAnswer("there are more or fewer windows than were asked for")
    answers = [parse_answer(json.dumps(window).encode(), request) for window in found]
    windows = tuple(answer for answer in answers if isinstance(answer, Sampled | Refused))
    if len(windows) != len(answers):
        raise BadAnswer("a window is neither sampled nor refused")
    return SampledWindows(windows)


def _planned(fields: _Fields, request: DecodeRequest | None) -> Planned:
    bounds = tuple(_finite(bound) for bound in fields.list("bounds"))
    start_s, longest_s = fields.seconds("start_s"), 2 * _asked(request).limits.max_duration_s
    if abs(start_s) > _MAX_START_S or any(bound > longest_s for bound in bounds):
        raise BadAnswer("a film cannot begin or end so late")
    if not 2 <= len(bounds) <= MAX_SEGMENTS + 1 or bounds[0] < 0 or bounds[-1] < bounds[-2]:
        raise BadAnswer("there are no segments, or too many")
    if any(late <= early for early, late in pairwise(bounds[:-1])) or _asked(request).cut is None:
        raise BadAnswer("the segments are out of order, or nobody asked for them")
    for piece_s, piece_end_s in _asked(request).windows:
        if not all(piece_s - 1e-5 <= bound <= piece_end_s for bound in bounds[1:]):
            raise BadAnswer("a shot begins outside of the piece")
    warnings = tuple(_text(warning) for warning in fields.list("warnings")[:_MAX_WARNINGS])
    return Planned(start_s, bounds, warnings)


def _asked(request: DecodeRequest | None) -> DecodeRequest:
    if request is None:
        raise BadAnswer("nothing was asked")
    return request


_PARSERS: dict[str, Callable[[_Fields, DecodeRequest | None], Answer]] = {
    "Ready": _ready,
    "Started": _started,
    "Progress": _progress,
    "Refused": _refused,
    "Sampled": _sampled,
    "SampledWindows": _sampled_windows,
    "Planned": _planned,
}
