"""Writes the page, its plots and the document that they came from."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from bench.report.markdown import FOLDER
from bench.report.page import make_page
from bench.report.plots import kept, methods, sweeps, timeline
from bench.report.plots.style import save, styled
from bench.report.rows import Document, slim

DOCS = Path(__file__).resolve().parents[2] / "docs"
PLOTS: Mapping[str, Callable[[Document], Figure | None]] = {
    "speedup": methods.speedups,
    "video_tokens": sweeps.video_tokens,
    "alpha": sweeps.alphas,
    "pruners": sweeps.pruners,
    "kept": kept.over_frames,
    "positions": kept.along_video,
    "timeline": timeline.gantt,
    "progress": timeline.progress,
    "latency": methods.latencies,
    "prediction": methods.predictions,
    "c": sweeps.speed_ratios,
    "gamma": sweeps.windows,
}


def write(document: Document, folder: Path = DOCS, suffix: str = ".svg") -> Path:
    """Writes `results.md`, `results/*.svg` and `results.json` into `folder`; the page's path.

    Plots of what was not measured are left out, and removed if an earlier document had them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = slim(document)
    drawn = []
    with styled():
        for name, draw in PLOTS.items():
            figure = draw(document)
            path = folder / FOLDER / f"{name}{suffix}"
            if figure is None:
                path.unlink(missing_ok=True)
            else:
                drawn.append(save(figure, path).stem)
    page = folder / "results.md"
    page.write_text(make_page(document, drawn))
    (folder / "results.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    return page
