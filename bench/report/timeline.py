"""The first part of one caption, from a gateway's `trace`: target passes, draft tokens, what was accepted, the gaps."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.report.figures import BLUE, FAINT, GREEN, GREY, INK, RED, SKY, legend_below, new_figure, panels, patch
from bench.tables import Row

METHODS = ("autoregressive", "sd", "parallelvlm", "slipstream")
SHOWN_S = 0.4
"""Of a caption's decoding, from the first token."""
TARGET, DRAFT = 1.0, 0.0
"""Heights of the two lanes."""


def draw_timelines(document: Row) -> Figure | None:
    """The first moments of decoding by several methods, one under the other."""
    timelines: Mapping[str, Row] = document.get("timelines") or {}
    traces = {name: trace for name in METHODS if (trace := (timelines.get(name) or {}).get("trace"))}
    if not traces:
        return None
    figure = new_figure(8.4, 1.0 * len(traces) + 1.3)
    for axes, (method, trace) in zip(panels(figure, len(traces), sharex=True), traces.items(), strict=True):
        axes.set_title(method)
        _draw(axes, [entry for entry in trace if entry.get("start_s", entry["t_s"]) <= SHOWN_S])
        axes.set_xlim(0, SHOWN_S * 1e3)
    axes.set_xlabel("ms since the first token")
    meanings = [
        patch("target pass, its own token", BLUE),
        patch("window accepted", GREEN),
        patch("rejected, or never judged", RED),
        patch("draft writes", SKY),
        patch("idle, or messages under way", "white", edgecolor=GREY),
        Line2D([], [], color=INK, linewidth=0.7, label="the draft begins anew"),
    ]
    legend_below(figure, meanings, columns=3)
    return figure


def _draw(axes: Axes, trace: list[Row]) -> None:
    for entry in trace:
        match entry["kind"]:
            case "pass":
                _draw_pass(axes, entry)
            case "draft":
                width_s = (entry.get("pass_s") or 0.0) * max(entry.get("tokens") or 0, 1)
                colour = RED if entry.get("stale") else SKY
                _bar(axes, entry["t_s"] - width_s, width_s, DRAFT - 0.36, 0.72, colour)
            case "restart":
                axes.plot([entry["t_s"] * 1e3] * 2, [-0.45, 1.45], color=INK, linewidth=0.7)
    has_draft = any(entry["kind"] == "draft" for entry in trace)
    axes.set_ylim(-0.55 if has_draft else 0.45, 1.55)
    axes.set_yticks([TARGET, DRAFT] if has_draft else [TARGET], ["target", "draft"] if has_draft else ["target"])
    axes.tick_params(axis="y", length=0)


def _draw_pass(axes: Axes, entry: Row) -> None:
    """The bar's height is the window with the target's own token: green what was accepted, red what was not."""
    window, accepted = entry.get("window") or 0, entry.get("accepted") or 0
    low, unit = TARGET - 0.4, 0.8 / (window + 1)
    parts = ((low, accepted, GREEN), (low + unit * accepted, 1, BLUE))
    for start, tokens, colour in (*parts, (low + unit * (accepted + 1), window - accepted, RED)):
        _bar(axes, entry["start_s"], entry["pass_s"], start, unit * tokens, colour)


def _bar(axes: Any, start_s: float, width_s: float, low: float, height: float, colour: str) -> None:
    if height > 0:
        axes.bar(start_s * 1e3, height, width_s * 1e3, low, align="edge", color=colour, edgecolor=FAINT, linewidth=0.3)
