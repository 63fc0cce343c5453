"""Plots of the table of methods: who is how fast, where the time goes, what was predicted."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.report.plots.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    grid,
    new_figure,
    panels,
)
from bench.report.rows import Document, prediction_clips, prediction_rows, speedup_spread

MARKS = "osD^vP*Xh<>d"
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


def speedups(document: Document) -> Figure | None:
    """Speedup over plain by method, with quartiles over the clips."""
    rows = [row for row in document["methods"] if row.get("speedup_engine") is not None]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: float(row["speedup_engine"]))
    figure = new_figure(7.6, 0.27 * len(rows) + 1.3)
    axes = panels(figure)[0]
    for place, row in enumerate(rows):
        low, high = speedup_spread(document, row)
        value = row["speedup_engine"]
        colour = FAMILIES.get(row.get("family", ""), ("", GREY))[1]
        lossy = bool(row.get("lossy"))
        axes.barh(place, value, 0.72, color=colour, hatch="////" if lossy else None, edgecolor="white", linewidth=0.5)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.2)
        bold = "bold" if row["name"] == "slipstream" else "normal"
        axes.text(max(high, value) + 0.03, place, f"{value:.2f}", va="center", fontsize=8, fontweight=bold)
    axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [row.get("title") or row["name"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("tokens/s of decoding over plain decoding by the same engine (median; line: quartiles of clips)")
    grid(axes, "x")
    shown = [name for name in FAMILIES if any(row.get("family") == name for row in rows)]
    axes.legend(handles=[_family_patch(name) for name in shown], loc="lower right")
    return figure


def latencies(document: Document) -> Figure | None:
    """Where a caption's seconds go, the draft's own work below the target's bar."""
    rows = [row for row in document["methods"] if (row.get("latency") or {}).get("generate_s") is not None]
    if not rows:
        return None
    rows = rows[::-1]
    figure = new_figure(7.6, 0.36 * len(rows) + 1.6)
    axes = panels(figure)[0]
    for place, row in enumerate(rows):
        stages = latency_stages(row["latency"])
        end = _stack(axes, place + 0.12, 0.46, stages, STAGES, 0.0)
        axes.text(end + 0.06, place + 0.12, f"{end:.1f} s", va="center", fontsize=8)
        _stack(axes, place - 0.27, 0.22, row["latency"], DRAFT_STAGES, stages.get("decode_s", 0.0))
    axes.set_yticks(range(len(rows)), [row.get("title") or row["name"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("seconds from the request, medians over clips (thin bars: the draft, meanwhile)")
    axes.margins(x=0.08)
    grid(axes, "x")
    entries = [*STAGES.values(), *DRAFT_STAGES.values()]
    handles = [Patch(facecolor=colour, label=label) for label, colour in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def latency_stages(latency: Mapping[str, float | None]) -> dict[str, float]:
    """A row's seconds one after the other, with what is not accounted for before the first token."""
    known = {name: latency.get(name) or 0.0 for name in ("decode_s", "target_encode_s", "target_prefill_s")}
    other = (latency.get("first_token_s") or 0.0) - sum(known.values())
    return known | {"other_s": max(other, 0.0), "generate_s": latency.get("generate_s") or 0.0}


def predictions(document: Document) -> Figure | None:
    """Measured against predicted tokens/s; small marks are clips, large ones methods."""
    rows = [row for row in prediction_rows(document) if row.get("predicted_tokens_per_s")]
    if not rows:
        return None
    figure = new_figure(5.4, 4.6)
    axes = panels(figure)[0]
    palette = (BLUE, ORANGE, GREEN, SKY, PURPLE, RED, GREY)
    top = 0.0
    for place, row in enumerate(rows):
        method = row["method"]
        look: dict[str, Any] = {"color": palette[place % len(palette)], "marker": MARKS[place % len(MARKS)]}
        clips = [clip for clip in prediction_clips(document) if clip["method"] == method]
        axes.scatter([clip["predicted"] for clip in clips], [clip["measured"] for clip in clips], 9, alpha=0.5, **look)
        point = row["predicted_tokens_per_s"], row["measured_tokens_per_s"]
        axes.scatter(*point, 60, label=method, **look)
        top = max([top, *point, *(max(clip["predicted"], clip["measured"]) for clip in clips)])
    top *= 1.1
    axes.plot([0, top], [0, top], color=INK, linewidth=0.8)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color=FAINT, alpha=0.5, linewidth=0, label="within 10%")
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_xlabel("tokens/s that the event simulator predicts, messages included")
    axes.set_ylabel("tokens/s measured")
    axes.legend(loc="upper left")
    return figure


def _family_patch(name: str) -> Patch:
    label, colour = FAMILIES[name]
    return Patch(facecolor=colour, hatch="////" if name == "lossy" else None, edgecolor="white", label=label)


def _stack(
    axes: Any,
    place: float,
    height: float,
    values: Mapping[str, float | None],
    stages: Mapping[str, tuple[str, str]],
    left: float,
) -> float:
    for name, (_, colour) in stages.items():
        width = values.get(name) or 0.0
        axes.barh(place, width, height, left=left, color=colour)
        left += width
    return left
