"""Plots of the sweeps: how speed, acceptance and times follow one setting."""

from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report import papers
from bench.report.plots.style import BLUE, FAINT, GREY, INK, ORANGE, colours, grid, new_figure, panels
from bench.report.rows import Document, Row, by_method, sweep
from slipstream.speculation.methods import ATTENTION_PRUNERS

LOOKS = ("o-", "s--", "^:", "D-.")
"""Of lines, so that those that lie on each other are seen."""
_GUIDED = ("uv", "uv_spread", "uv_cosine")


def video_tokens(document: Document) -> Figure | None:
    """Speedup over plain by the length of the video."""
    rows = sweep(document, "video_tokens")
    if not rows:
        return None
    figure = new_figure(6.4, 3.6)
    axes = panels(figure)[0]
    _lines(axes, rows, "video_tokens", "speedup")
    axes.set_xlabel("video tokens in the target's context")
    axes.set_ylabel("speedup over plain")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def alphas(document: Document) -> Figure | None:
    """What pruning the draft's video buys and costs: T_q, M and the speedup."""
    rows = sweep(document, "alpha")
    if not rows:
        return None
    figure = new_figure(9.2, 3.1)
    time_axes, length_axes, speed_axes = panels(figure, 1, 3, sharex=True)
    in_ms = [{**row, "T_q_ms": row["T_q"] * 1e3} for row in rows if row.get("T_q")]
    _lines(time_axes, in_ms, "alpha", "T_q_ms")
    _lines(length_axes, rows, "alpha", "M")
    _lines(speed_axes, rows, "alpha", "speedup")
    reported = [(point.alpha, point.speedup) for point in papers.ALPHA if point.speedup is not None]
    speed_axes.plot(*zip(*reported, strict=True), "x--", color=GREY, linewidth=1.0, label="paper 000, LLaVA-OV 7B/72B")
    titles = ("a draft token, T_q (ms)", "accepted length M", "speedup over plain")
    for axes, title in zip((time_axes, length_axes, speed_axes), titles, strict=True):
        axes.set_title(title)
        axes.set_xlabel("share of video tokens pruned, alpha")
        axes.set_ylim(bottom=0)
    speed_axes.legend(loc="lower left")
    return figure


def pruners(document: Document) -> Figure | None:
    """M by pruner at the same alpha."""
    rows = [row for row in sweep(document, "pruner") if row.get("M") is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: float(row["M"]))
    figure = new_figure(6.4, 0.27 * len(rows) + 1.1)
    axes = panels(figure)[0]
    for place, row in enumerate(rows):
        axes.barh(place, row["M"], 0.72, color=pruner_kind(row["pruner"])[1])
        axes.text(row["M"], place, f" {row['M']:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["pruner"] for row in rows])
    axes.set_xlabel("accepted length M (tokens)")
    for label, colour in dict(pruner_kind(row["pruner"]) for row in rows).items():
        axes.barh(0, 0, color=colour, label=label)
    axes.legend(loc="lower right")
    axes.margins(x=0.1)
    grid(axes, "x")
    return figure


def pruner_kind(name: str) -> tuple[str, str]:
    """Who guides a pruner, and the colour of that."""
    if name in _GUIDED:
        return "the target's states", BLUE
    if name in ATTENTION_PRUNERS:
        return "the target's attention", ORANGE
    if name in ("none", "all"):
        return "all video, or none of it", INK
    return "nobody", GREY


def speed_ratios(document: Document) -> Figure | None:
    """Speedup by how many draft tokens go into a target pass, c."""
    rows = [row for row in sweep(document, "c") if row.get("c")]
    if not rows:
        return None
    figure = new_figure(6.4, 3.6)
    axes = panels(figure)[0]
    _lines(axes, rows, "c", "speedup")
    top = max(row["c"] for row in rows)
    axes.plot([1, top], [1, top], color=FAINT, linewidth=1.2, label="speedup = c", zorder=0)
    axes.set_ylim(0, 1.25 * max(row["speedup"] for row in rows if row.get("speedup")))
    axes.set_xlabel("c = T_p(0) / T_q")
    axes.set_ylabel("speedup over plain")
    axes.legend()
    return figure


def windows(document: Document) -> Figure | None:
    """Speedup by the window that was asked for."""
    rows = sweep(document, "gamma")
    if not rows:
        return None
    figure = new_figure(6.4, 3.4)
    axes = panels(figure)[0]
    _lines(axes, rows, "asked_gamma", "speedup")
    axes.set_xlabel("window asked for, gamma (draft tokens)")
    axes.set_ylabel("speedup over plain")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _lines(axes: Axes, rows: Sequence[Row], across: str, up: str) -> None:
    """One line a method, with points where it was measured."""
    groups = by_method(rows)
    palette = colours(groups)
    for (method, own), look in zip(groups.items(), cycle(LOOKS)):
        points = sorted(
            (row[across], row[up]) for row in own if row.get(up) is not None and row.get(across) is not None
        )
        axes.plot([across for across, _ in points], [up for _, up in points], look, color=palette[method], label=method)
    grid(axes)
