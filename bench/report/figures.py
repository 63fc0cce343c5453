"""How pictures look and are written: light paper, colours that the colour-blind can tell apart, small files."""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

INK, FAINT, PAPER = "#24292f", "#d0d7de", "#ffffff"
BLUE, GREEN, SKY, RED, YELLOW, PURPLE, GREY = (
    "#0072b2",
    "#009e73",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#cc79a7",
    "#8c959f",
)
DIGITS = 1
"""Behind the point of a place in an SVG, whose unit is a 72nd of an inch."""
_STYLE: dict[str, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "slipstream",
    "svg.fonttype": "none",
}


def styled() -> AbstractContextManager[None]:
    """Around all drawing and saving."""
    return matplotlib.rc_context(cast(Any, _STYLE))


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches."""
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(figure: Figure, rows: int = 1, columns: int = 1, **how: Any) -> list[Axes]:
    """Its panels, row by row."""
    return list(figure.subplots(rows, columns, squeeze=False, **how).flat)


def grid(axes: Axes, axis: Any = "y") -> None:
    """Faint lines to read values by."""
    axes.grid(True, axis=axis)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int) -> None:
    """What colours mean, under all panels."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def patch(label: str, colour: str, **how: Any) -> Patch:
    """An entry of a legend."""
    return Patch(facecolor=colour, label=label, **how)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture, the same bytes for the same figures: an SVG with rounded numbers, or a PNG, by the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".svg":
        figure.savefig(path, dpi=100, bbox_inches="tight", pad_inches=0.1)
        return
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.1)
    path.write_text(_smaller(written.getvalue()))


def _smaller(svg: str) -> str:
    """Without digits that nobody sees, groups' names and lines' indents. Words between tags stay as they are."""
    svg = re.sub(r'<g id="[a-z]+[\w.]*">', "<g>", svg)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d+", _rounded, tag[0]), svg)
    return re.sub(r"\n\s*", "\n", svg)


def _rounded(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), DIGITS):g}"
