"""Near-duplicates told by their fingerprints: recall and precision over made pairs, and in a search among all of them.

Films of the pocket world are cut into windows, which are decoded like segments. What should be found are the same
windows of copies of the film: encoded again, scaled, cropped, put between bars. What should not are windows of other
films and, harder, of the same one, where neighbours show the same scene some seconds later. Pairs of windows of one
scene in which nothing moves are left out: they do show the same.
"""

import argparse
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any

import av
import numpy as np
from av.filter import Graph
from av.video.format import VideoFormat
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from bench.common import say
from bench.tables import print_rows
from slipstream.captioning.duplicates import HINT, SHARE, WITHIN
from slipstream.frame_size import FrameSize
from slipstream.video.film_windows import sample_windows
from slipstream.video.fingerprint import Fingerprint, Fingerprints, distance, fingerprint_of
from slipstream.video.messages import DecodeLimits, SampledVideo, Window
from training.data import FILE_SIZE, FRAMES_PER_SECOND
from training.render import Renderer
from training.world import HELD_OUT_SEEDS, Clip, sample_clip

FIRST_SEED = HELD_OUT_SEEDS.start + 800
"""The distances were chosen on other films, of seeds below this one."""
SIZE, FRAMES = FrameSize(112, 112), 8
"""As the pocket target takes them; of a window."""
THRESHOLDS = (6.0, 8.0, 10.0, 12.0, WITHIN[SHARE], 16.0, 18.0, 21.0, WITHIN[HINT])
OTHERS_A_WINDOW = 40
"""Windows of other films that each is held against, drawn at random; of its own film all are."""
LEAST_RECALL, LEAST_PRECISION = 0.95, 0.99


@dataclass(frozen=True)
class Copy:
    """How a film is copied."""

    name: str
    filters: Sequence[tuple[str, str]] = ()
    codec: str = "libx264"
    options: Mapping[str, str] = field(default_factory=lambda: {"crf": "23", "preset": "veryfast"})
    full_range: bool = False
    """Its numbers are those of a computer's range of brightness, and the file does not say so."""


POOR = {"crf": "36", "preset": "veryfast"}
LETTERBOX = ("pad", "iw:ih*4/3:0:(oh-ih)/2")
ORIGINAL = Copy("original", options={"crf": "18", "preset": "veryfast"})
COPIES = (
    Copy("h264 crf 36", options=POOR),
    Copy("mpeg4 q 12", codec="mpeg4", options={"qmin": "12", "qmax": "12"}),
    Copy("vp9 crf 45", codec="libvpx-vp9", options={"crf": "45", "b": "0", "deadline": "realtime", "cpu-used": "8"}),
    Copy("half the size", [("scale", "112:112")]),
    Copy("480 x 270", [("scale", "480:270")]),
    Copy("twice the size", [("scale", "448:448")]),
    Copy("2% cut off each side", [("crop", "iw*0.96:ih*0.96")]),
    Copy("4% cut off each side", [("crop", "iw*0.92:ih*0.92")]),
    Copy("5% cut off two sides", [("crop", "iw*0.95:ih*0.95:0:0")]),
    Copy("letterbox", [LETTERBOX]),
    Copy("pillarbox", [("pad", "iw*16/9:ih:(ow-iw)/2:0")]),
    Copy("letterbox, small, crf 36", [LETTERBOX, ("scale", "160:120")], options=POOR),
    Copy("3% cut off, mpeg4", [("crop", "iw*0.94:ih*0.94")], codec="mpeg4", options={"qmin": "8", "qmax": "8"}),
    Copy("another range", full_range=True),
)


@dataclass(frozen=True, eq=False)
class Shown:
    """A window of a copy of a film."""

    film: Clip
    window: Window
    copy: Copy
    fingerprint: Fingerprint
    times_s: tuple[float, ...]
    """Of its frames, in the film."""

    def is_same(self, other: "Shown") -> bool:
        """It was made from the same pictures."""
        return self.film is other.film and self.window == other.window

    def looks_same(self, other: "Shown") -> bool:
        """Nothing moves from the frames of the one to those of the other; a window's very end may be of another scene,
        which none of its frames shows."""
        if self.film is not other.film:
            return False
        scenes = {self.film.scene_at(time_s).number for one in (self, other) for time_s in one.times_s}
        scene = self.film.scenes[scenes.pop() - 1]
        return not scenes and scene.motion == "still" and scene.event == "none"


@dataclass(frozen=True)
class Pairs:
    """Distances of pairs that are copies, by the kind of copy, and of pairs that are not."""

    same: Mapping[str, NDArray[np.float64]]
    other: NDArray[np.float64]
    left_out: int

    def row(self, within: float) -> dict[str, Any]:
        """What a threshold gives."""
        same = np.concatenate(list(self.same.values()))
        found, false = int((same <= within).sum()), int((self.other <= within).sum())
        return {
            "within": within,
            "recall": round(found / len(same), 4),
            "precision": round(found / max(found + false, 1), 4),
            "false": false,
        }


async def run_duplicates(given: argparse.Namespace) -> Mapping[str, Any]:
    """The part `duplicates`."""
    began = time.monotonic()
    shown = [one for number in range(given.films) for one in _film(FIRST_SEED + number, given.window_seconds)]
    say(f"{len(shown)} windows in {time.monotonic() - began:.0f} s")
    pairs = _pairs(shown, Random(given.seed))
    rows = [pairs.row(within) for within in THRESHOLDS]
    kinds = [_kind_row(name, distances) for name, distances in pairs.same.items()]
    print_rows("Near-duplicates by distance", rows)
    print_rows("Copies", kinds)
    at_share = pairs.row(WITHIN[SHARE])
    report: dict[str, Any] = {"pairs_same": sum(map(len, pairs.same.values())), "pairs_other": len(pairs.other)}
    report |= {"left_out": pairs.left_out, "rows": rows, "copies": kinds, "search": _search(shown)}
    return report | {"recall": at_share["recall"], "precision": at_share["precision"]}


def told_apart(report: Mapping[str, Any]) -> bool:
    """Whether recall and precision of what is shared are high enough, among pairs and in a search."""
    found = (report, report["search"])
    return all(shares["recall"] >= LEAST_RECALL and shares["precision"] >= LEAST_PRECISION for shares in found)


# -- measuring --------------------------------------------------------------------------------------------------------


def _pairs(shown: Sequence[Shown], chance: Random) -> Pairs:
    """Each window of an original against its copies, all others of its film, and some of other films."""
    same: dict[str, list[float]] = {copy.name: [] for copy in COPIES}
    other: list[float] = []
    left_out = 0
    for one in (one for one in shown if one.copy is ORIGINAL):
        of_film = [two for two in shown if two.film is one.film and two is not one]
        others = chance.sample([two for two in shown if two.film is not one.film], OTHERS_A_WINDOW)
        for two in (*of_film, *others):
            if one.is_same(two):
                same[two.copy.name].append(distance(one.fingerprint, two.fingerprint))
            elif one.looks_same(two):
                left_out += 1
            else:
                other.append(distance(one.fingerprint, two.fingerprint))
    return Pairs({name: np.array(found) for name, found in same.items()}, np.array(other), left_out)


def _kind_row(name: str, distances: NDArray[np.float64]) -> dict[str, Any]:
    found = (distances <= WITHIN[SHARE]).mean()
    return {
        "copy": name,
        "median": round(float(np.median(distances)), 1),
        "p95": round(float(np.percentile(distances, 95)), 1),
        "shared": round(float(found), 3),
    }


def _search(shown: Sequence[Shown]) -> dict[str, Any]:
    """Every copy is looked up among all originals, as the archive does."""
    originals = [one for one in shown if one.copy is ORIGINAL]
    kept = Fingerprints(len(originals))
    for one in originals:
        kept.add(one.fingerprint)
    right = wrong = 0
    copies = [one for one in shown if one.copy is not ORIGINAL]
    began = time.process_time()
    for one in copies:
        found = kept.nearest(one.fingerprint, WITHIN[SHARE])
        is_right = found is not None and (
            originals[found.number].is_same(one) or originals[found.number].looks_same(one)
        )
        right, wrong = right + is_right, wrong + (found is not None and not is_right)
    took_s = (time.process_time() - began) / len(copies)
    shares = {"recall": round(right / len(copies), 4), "precision": round(right / max(right + wrong, 1), 4)}
    return {"among": len(originals), "looked_up": len(copies), **shares, "cpu_ms": round(1000 * took_s, 2)}


# -- films and their copies -------------------------------------------------------------------------------------------


def _film(seed: int, window_s: float) -> list[Shown]:
    """All windows of a film, in all its copies."""
    film = sample_clip(seed)
    renderer, num_pictures = Renderer(film, FILE_SIZE), round(film.duration_s * FRAMES_PER_SECOND)
    pictures = [renderer.frame(number / FRAMES_PER_SECOND) for number in range(num_pictures)]
    starts_s = np.arange(0, num_pictures / FRAMES_PER_SECOND - window_s, window_s)
    windows = [(float(start_s), float(start_s + window_s)) for start_s in starts_s]
    shown = []
    for copy in (ORIGINAL, *COPIES):
        source = io.BytesIO(_written(pictures, copy))
        for window, video in zip(
            windows, sample_windows(source, FRAMES, windows, DecodeLimits(), size=SIZE), strict=True
        ):
            assert isinstance(video, SampledVideo), video
            times_s = tuple(window[0] + time_s for time_s in video.timestamps_s)
            shown.append(Shown(film, window, copy, fingerprint_of(video), times_s))
    say(f"film {seed}: {len(windows)} windows")
    return shown


def _written(pictures: Sequence[NDArray[np.uint8]], copy: Copy) -> bytes:
    file = io.BytesIO()
    graph = _graph(pictures[0].shape, copy)
    with av.open(file, "w", format="matroska") as output:
        stream: VideoStream | None = None
        for number, picture in enumerate(pictures):
            frame = VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FRAMES_PER_SECOND)
            graph.vpush(frame)
            frame = graph.vpull()
            if stream is None:
                added = output.add_stream(copy.codec, rate=Fraction(FRAMES_PER_SECOND), options=dict(copy.options))
                assert isinstance(added, VideoStream)
                stream = added
                stream.width, stream.height, stream.pix_fmt = frame.width, frame.height, "yuv420p"
            output.mux(stream.encode(frame))
        assert stream is not None, "a film has pictures"
        output.mux(stream.encode())
    return file.getvalue()


def _graph(shape: tuple[int, ...], copy: Copy) -> Graph:
    """Filters that end in pictures as an encoder wants them: of even sides, brightness and colours apart."""
    graph, (height, width, _) = Graph(), shape
    out_range = "full" if copy.full_range else "limited"
    tick = Fraction(1, FRAMES_PER_SECOND)
    last = graph.add_buffer(width=width, height=height, format=VideoFormat("rgb24"), time_base=tick)
    ending = [
        ("scale", f"trunc(iw/2)*2:trunc(ih/2)*2:out_range={out_range}:out_color_matrix=bt601"),
        ("format", "yuv420p"),
        ("setparams", "range=limited:colorspace=smpte170m"),
    ]
    for name, argument in (*copy.filters, *ending):
        node = graph.add(name, argument)
        last.link_to(node)
        last = node
    last.link_to(graph.add("buffersink"))
    graph.configure()
    return graph
