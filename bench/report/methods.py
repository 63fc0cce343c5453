"""Two plots of the table of methods: who is how fast, and where the time goes."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report.figures import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    grid,
    legend_below,
    new_figure,
    panels,
    patch,
)
from bench.tables import Row

FAMILIES: Mapping[str, tuple[str, str]] = {
    "plain": ("plain decoding", GREY),
    "sequential": ("draft, then verify", SKY),
    "self": ("the target drafts for itself", GREEN),
    "parallel": ("draft while verifying", BLUE),
    "lossy": ("lossy: another text", RED),
    "fairness": ("plain decoding on both cores", FAINT),
    "outside": ("transformers", PURPLE),
}
STAGES: Mapping[str, tuple[str, str]] = {
    "decode_s": ("decode video", YELLOW),
    "target_encode_s": ("encode", SKY),
    "target_prefill_s": ("prefill", BLUE),
    "other_s": ("other, to the first token", FAINT),
    "generate_s": ("generate", GREEN),
}
DRAFT_STAGES: Mapping[str, tuple[str, str]] = {
    "draft_encode_s": ("draft: encode", "#b3dcf2"),
    "draft_guidance_s": ("draft: wait for guidance", FAINT),
    "draft_prune_s": ("draft: prune", RED),
    "draft_prefill_s": ("draft: prefill", "#7fb8d8"),
}


def draw_speedups(document: Row) -> Figure | None:
    """Speedup over plain by method, with quartiles over the clips."""
    rows = [row for row in document["methods"] if row.get("speedup_engine") is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: float(row["speedup_engine"]))
    figure = new_figure(7.6, 0.27 * len(rows) + 1.5)
    axes = panels(figure)[0]
    for place, row in enumerate(rows):
        _draw_speedup(axes, place, row)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [row.get("title") or row["name"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.margins(x=0.08)
    axes.set_xlabel("decoding speed over plain decoding\n(median over clips; line: quartiles)")
    grid(axes, "x")
    families = {row.get("family") for row in rows}
    shown = {name: look for name, look in FAMILIES.items() if name in families}
    axes.legend(handles=[_family_patch(name) for name in shown], loc="lower right")
    return figure


def _draw_speedup(axes: Axes, place: int, row: Row) -> None:
    value = float(row["speedup_engine"])
    low, high = row.get("speedup_quartiles") or (value, value)
    colour = FAMILIES.get(row.get("family", ""), ("", GREY))[1]
    hatch = "////" if row.get("lossy") else None
    axes.barh(place, value, 0.72, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5)
    axes.plot([low, high], [place, place], color=INK, linewidth=1.2)
    bold = "bold" if row["name"] == "slipstream" else "normal"
    axes.text(max(high, value) + 0.03, place, f"{value:.2f}", va="center", fontsize=8, fontweight=bold)


def draw_latencies(document: Row) -> Figure | None:
    """Where a caption's seconds go, the draft's own work below the target's bar."""
    rows = [row for row in document["methods"] if (row.get("latency") or {}).get("generate_s") is not None]
    if not rows:
        return None
    rows = rows[::-1]
    figure = new_figure(7.6, 0.36 * len(rows) + 1.8)
    axes = panels(figure)[0]
    for place, row in enumerate(rows):
        stages = latency_stages(row["latency"])
        end = _stack(axes, place + 0.12, 0.46, stages, STAGES, 0.0)
        axes.text(end + 0.06, place + 0.12, f"{end:.1f} s", va="center", fontsize=8)
        _stack(axes, place - 0.27, 0.22, row["latency"], DRAFT_STAGES, stages.get("decode_s", 0.0))
    axes.set_yticks(range(len(rows)), [row.get("title") or row["name"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("seconds from the request (medians over clips; thin bars: the draft, meanwhile)")
    axes.margins(x=0.1)
    grid(axes, "x")
    legend_below(figure, [patch(*look) for look in (*STAGES.values(), *DRAFT_STAGES.values())], columns=4)
    return figure


def latency_stages(latency: Mapping[str, float | None]) -> dict[str, float]:
    """A row's seconds one after the other, with what is not accounted for before the first token."""
    known = {name: latency.get(name) or 0.0 for name in ("decode_s", "target_encode_s", "target_prefill_s")}
    other = (latency.get("first_token_s") or 0.0) - sum(known.values())
    return known | {"other_s": max(other, 0.0), "generate_s": latency.get("generate_s") or 0.0}


def _family_patch(name: str) -> Any:
    return patch(*FAMILIES[name], hatch="////" if name == "lossy" else None, edgecolor="white")


def _stack(
    axes: Axes,
    place: float,
    height: float,
    values: Mapping[str, float | None],
    stages: Mapping[str, tuple[str, str]],
    left: float,
) -> float:
    for name, (_, colour) in stages.items():
        width = values.get(name) or 0.0
        if width:
            axes.barh(place, width, height, left=left, color=colour)
        left += width
    return left
