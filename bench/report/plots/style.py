"""How plots look: opaque light paper that reads on light and on dark pages, colours that the colour-blind can tell
apart, and small files. Knows no figures of ours."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, FAINT, PAPER = "#24292f", "#d0d7de", "#ffffff"
BLUE, ORANGE, GREEN, SKY, RED, YELLOW, PURPLE, GREY = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#56b4e9",
    "#d55e00",
    "#f0e442",
    "#cc79a7",
    "#8c959f",
)
METHOD_COLOURS = {"slipstream": BLUE, "parallelvlm": ORANGE, "autoregressive": GREY, "sd": SKY, "std": GREEN}
OTHER_COLOURS = (PURPLE, RED, YELLOW, INK)
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
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.hashsalt": "slipstream",
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


def save(figure: Figure, path: Path) -> Path:
    """Writes an SVG, the same bytes for the same figures (or a PNG, by the path's name)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    return path


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour a name: methods have the same in every plot, others get the free ones in turn."""
    given: dict[str, str] = {}
    free = [colour for colour in OTHER_COLOURS if colour not in METHOD_COLOURS.values()]
    for name in dict.fromkeys(names):
        num_others = sum(other not in METHOD_COLOURS for other in given)
        given[name] = METHOD_COLOURS.get(name) or free[num_others % len(free)]
    return given


def grid(axes: Axes, axis: Any = "y") -> None:
    """Faint lines to read values by."""
    axes.grid(True, axis=axis)
