"""The first part of one caption as a Gantt chart: target passes, draft tokens, what was accepted, and the gaps between.

A gateway's `trace` says when passes ran. Without one, a pass is drawn as the method's mean T_p before its tokens came.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.report.plots.style import BLUE, FAINT, GREEN, GREY, INK, RED, SKY, colours, grid, new_figure, panels
from bench.report.rows import Document, Row, method_named

METHODS = ("autoregressive", "sd", "sd_tree", "parallelvlm", "slipstream")
SHOWN_S = 0.4
"""Of a caption's decoding, from the first token."""


@dataclass(frozen=True)
class Span:
    """One bar: seconds from the first token, and of the draft tokens in it how many were accepted."""

    start_s: float
    end_s: float
    window: int = 0
    accepted: int = 0
    stale: bool = False


@dataclass(frozen=True)
class Lanes:
    """What one method's processes did."""

    target: tuple[Span, ...]
    draft: tuple[Span, ...]
    restarts_s: tuple[float, ...]


def make_lanes(timeline: Row, mean_pass_s: float) -> Lanes:
    """From a trace if there is one, else from the tokens as they came."""
    trace = timeline.get("trace")
    if not trace:
        return Lanes(_passes_by_tokens(timeline, mean_pass_s), (), ())
    return Lanes(
        tuple(_pass(entry) for entry in trace if entry["kind"] == "pass"),
        tuple(_drafted(entry) for entry in trace if entry["kind"] == "draft"),
        tuple(entry["t_s"] for entry in trace if entry["kind"] == "restart"),
    )


def gantt(document: Document) -> Figure | None:
    """The first moments of decoding by several methods, one under the other."""
    timelines = _shown(document)
    if not timelines:
        return None
    figure = new_figure(9.2, 1.05 * len(timelines) + 1.0)
    for axes, (method, timeline) in zip(panels(figure, len(timelines), sharex=True), timelines.items(), strict=True):
        lanes = make_lanes(timeline, _mean_pass_s(document, method))
        axes.set_title(method)
        _draw(axes, lanes)
        axes.set_xlim(0, SHOWN_S * 1e3)
    axes.set_xlabel("ms since the first token")
    handles = [
        Patch(color=BLUE, label="target pass, its own token"),
        Patch(color=GREEN, label="window accepted"),
        Patch(color=RED, label="rejected, or never judged"),
        Patch(color=SKY, label="draft writes"),
        Patch(facecolor="white", edgecolor=GREY, label="idle, or messages under way"),
        Line2D([], [], color=INK, linewidth=0.7, label="the draft begins anew"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure


def progress(document: Document) -> Figure | None:
    """Committed tokens by seconds since the first one: what somebody who waits sees."""
    timelines = _shown(document)
    if not timelines:
        return None
    figure = new_figure(7.0, 3.4)
    axes = panels(figure)[0]
    palette = colours(timelines)
    for method, timeline in timelines.items():
        commits = [event for event in timeline["events"] if "tokens" in event]
        tokens = list(accumulate(event["tokens"] for event in commits))
        seconds = [event["t_s"] for event in commits]
        axes.step(seconds, tokens, where="post", color=palette[method], label=method, linewidth=1.4)
    axes.set_xlabel("seconds since the first token")
    axes.set_ylabel("tokens committed")
    axes.set_xlim(left=0)
    grid(axes)
    axes.legend(loc="upper left")
    return figure


def _shown(document: Document) -> dict[str, Row]:
    timelines: Mapping[str, Row] = document.get("timelines") or {}
    return {name: timelines[name] for name in METHODS if (timelines.get(name) or {}).get("events")}


def _mean_pass_s(document: Document, method: str) -> float:
    row = method_named(document, method)
    return float((row or {}).get("T_p") or 0.0)


def _pass(entry: Row) -> Span:
    start_s = entry["start_s"]
    return Span(start_s, start_s + entry["pass_s"], entry.get("window") or 0, entry.get("accepted") or 0)


def _drafted(entry: Row) -> Span:
    length_s = (entry.get("pass_s") or 0.0) * max(entry.get("tokens") or 0, 1)
    return Span(entry["t_s"] - length_s, entry["t_s"], entry.get("tokens") or 0, stale=bool(entry.get("stale")))


def _passes_by_tokens(timeline: Row, mean_pass_s: float) -> tuple[Span, ...]:
    spans, last_s = [], 0.0
    for event in timeline["events"]:
        if "tokens" not in event or event["t_s"] <= 0:
            continue
        start_s = max(event["t_s"] - mean_pass_s, last_s)
        spans.append(Span(start_s, event["t_s"], event["from_draft"], event["from_draft"]))
        last_s = event["t_s"]
    return tuple(spans)


def _draw(axes: Axes, lanes: Lanes) -> None:
    target, draft = 1.0, 0.0
    for span in lanes.target:
        if span.start_s > SHOWN_S:
            break
        _draw_pass(axes, span, target)
    for span in lanes.draft:
        if span.start_s <= SHOWN_S:
            _bar(axes, span, draft - 0.36, 0.72, RED if span.stale else SKY)
    for moment_s in lanes.restarts_s:
        axes.plot([moment_s * 1e3] * 2, [-0.45, 1.45], color=INK, linewidth=0.7)
    axes.set_ylim(-0.55 if lanes.draft else 0.45, 1.55)
    axes.set_yticks([target, draft] if lanes.draft else [target], ["target", "draft"] if lanes.draft else ["target"])
    axes.tick_params(axis="y", length=0)


def _draw_pass(axes: Axes, span: Span, place: float) -> None:
    """The bar's height is the window with the target's own token: green what was accepted, red what was not."""
    low, unit = place - 0.4, 0.8 / (span.window + 1)
    _bar(axes, span, low, unit * span.accepted, GREEN)
    _bar(axes, span, low + unit * span.accepted, unit, BLUE)
    _bar(axes, span, low + unit * (span.accepted + 1), unit * (span.window - span.accepted), RED)


def _bar(axes: Any, span: Span, low: float, height: float, colour: str) -> None:
    if height <= 0:
        return
    width_ms = (span.end_s - span.start_s) * 1e3
    axes.bar(span.start_s * 1e3, height, width_ms, low, align="edge", color=colour, edgecolor=FAINT, linewidth=0.3)
