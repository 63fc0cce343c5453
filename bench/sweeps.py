"""One thing varied at a time on one clip: which points there are, and their rows. Knows no process and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.methods import (
    ENGINE_PLAIN,
    PARALLELVLM,
    RUN_BETWEEN_DEATHS,
    SLIPSTREAM,
    SLOW_DRAFT_PASS_S,
    SLOWER_DRAFT_PASS_S,
    TOKENS_A_VERIFICATION,
    Place,
    caption_options,
)
from bench.rows import Row, point_row
from bench.samples import Sample
from slipstream.rpc.v1.gateway_pb2 import CaptionOptions
from slipstream.speculation.methods import PRUNERS

ALPHAS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)
GAMMAS = {"sd": (2, 5, 9, 16), PARALLELVLM: (2, 5, 9, 16)}
TIMELINE = "timeline"
"""No sweep: captions of which it is told what the models did when."""
DRAWN = (ENGINE_PLAIN, "sd", "sd_tree", PARALLELVLM, SLIPSTREAM)
FRAME_SHARES = (0.08, 0.25, 0.5, 1.0, 1.9)
"""Of the table's frames: with 128 frames of 49 tokens some 500 to 12,000 video tokens."""


@dataclass(frozen=True)
class Point:
    """A caption to measure, and the coordinate that it has in its sweep."""

    sweep: str
    coordinate: dict[str, Any]
    method: str
    options: CaptionOptions = field(hash=False)
    num_frames: int
    place: Place = Place.PAIR

    @property
    def label(self) -> str:
        """For people."""
        where = ", ".join(f"{name} {value}" for name, value in self.coordinate.items())
        return f"{self.method} at {where or f'{self.num_frames} frames'}"


@dataclass(frozen=True)
class Measured:
    """A point and what it showed."""

    point: Point
    sample: Sample


def sweep_points(num_frames: int, max_frames: int) -> list[Point]:
    """All sweeps' points, the most telling first: what a run has no time for is left out from the end."""
    return [
        *_plain(num_frames),
        *_alphas(num_frames),
        *_timelines(num_frames),
        *_video_tokens(num_frames, max_frames),
        *_pruners(num_frames),
        *_speed_ratios(num_frames),
        *_gammas(num_frames),
    ]


def sweep_rows(measured: Sequence[Measured]) -> dict[str, list[Row]]:
    """Rows by sweep. Speedups are over the plain decoding that was measured with as many frames."""
    swept = [m for m in measured if m.point.sweep != TIMELINE]
    plain = {m.point.num_frames: m.sample for m in swept if m.point.method == ENGINE_PLAIN}
    rows: dict[str, list[Row]] = {}
    for m in swept:
        row = point_row(_m_kind(m.point.method), m.sample, plain.get(m.point.num_frames))
        facts = {"method": m.point.method, "clips": 1, "frames": m.point.num_frames}
        facts["video_tokens"] = m.sample.figures.get("video_tokens")
        rows.setdefault(m.point.sweep, []).append({**m.point.coordinate, **facts, **row})
    return rows


def _plain(num_frames: int) -> list[Point]:
    options = caption_options(method=ENGINE_PLAIN)
    return [Point("video_tokens", {}, ENGINE_PLAIN, options, num_frames)]


def _timelines(num_frames: int) -> list[Point]:
    return [Point(TIMELINE, {}, name, caption_options(method=name, trace=True), num_frames) for name in DRAWN]


def _alphas(num_frames: int) -> list[Point]:
    return [
        Point("alpha", {"alpha": alpha}, method, caption_options(method=method, alpha=alpha, gate=False), num_frames)
        for alpha in ALPHAS
        for method in (SLIPSTREAM, PARALLELVLM)
    ]


def _video_tokens(num_frames: int, max_frames: int) -> list[Point]:
    counts = sorted({min(max(round(share * num_frames), 1), max_frames) for share in FRAME_SHARES})
    return [
        Point("video_tokens", {}, method, caption_options(method=method), count)
        for count in counts
        for method in (ENGINE_PLAIN, PARALLELVLM, SLIPSTREAM)
        if (count, method) != (num_frames, ENGINE_PLAIN)
    ]


def _pruners(num_frames: int) -> list[Point]:
    return [
        Point(
            "pruner",
            {"pruner": pruner},
            SLIPSTREAM,
            caption_options(method=SLIPSTREAM, pruner=pruner, gate=False),
            num_frames,
        )
        for pruner in PRUNERS
    ]


def _speed_ratios(num_frames: int) -> list[Point]:
    """c by who drafts, how much of the video it sees, and how fast its clock is."""
    drafts = {
        "pocket draft, alpha 0.9": (Place.PAIR, 0.9),
        f"pocket draft slowed to {1e3 * SLOW_DRAFT_PASS_S:.0f} ms (replay)": (Place.SLOW_DRAFT, 0.9),
        f"pocket draft slowed to {1e3 * SLOWER_DRAFT_PASS_S:.0f} ms (replay)": (Place.SLOWER_DRAFT, 0.9),
        "pocket draft, alpha 0": (Place.PAIR, 0.0),
        "the target itself, alpha 0.9": (Place.SAME, 0.9),
        "the target itself, alpha 0": (Place.SAME, 0.0),
    }
    return [
        Point(
            "c",
            {"draft": draft},
            method,
            caption_options(method=method, alpha=alpha, gate=False),
            num_frames,
            place,
        )
        for draft, (place, alpha) in drafts.items()
        for method in (PARALLELVLM, SLIPSTREAM)
    ]


def _gammas(num_frames: int) -> list[Point]:
    return [
        Point("gamma", {"asked_gamma": gamma}, method, caption_options(method=method, gamma=gamma), num_frames)
        for method, gammas in GAMMAS.items()
        for gamma in gammas
    ]


def _m_kind(method: str) -> str | None:
    if method == ENGINE_PLAIN:
        return None
    return TOKENS_A_VERIFICATION if method == "sd" else RUN_BETWEEN_DEATHS
