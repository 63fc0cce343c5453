"""The pictures of a report: who is how fast, where the time goes, one caption's passes, and the tokens kept.

Light paper, colours that the colour-blind can tell apart, small files.
"""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray
from PIL import Image

from bench.common import CLIP_FOLDER
from bench.tables import Row
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits

# -- how pictures look and are written --------------------------------------------------------------------------------

INK, FAINT, PAPER = "#24292f", "#d0d7de", "#ffffff"
BLUE, GREEN, SKY, RED = "#0072b2", "#009e73", "#56b4e9", "#d55e00"
YELLOW, PURPLE, GREY = "#f0e442", "#cc79a7", "#8c959f"
STYLE = Path(__file__).with_name("pictures.mplstyle")
DIGITS = 1
"""Behind the point of a place in an SVG, whose unit is a 72nd of an inch."""
COLOURS = 64
"""Of a PNG."""


def styled() -> AbstractContextManager[None]:
    """Around all drawing and saving."""
    return matplotlib.rc_context(fname=STYLE)


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(figure: Figure, rows: int = 1, columns: int = 1, **how: Any) -> list[Axes]:
    return list(figure.subplots(rows, columns, squeeze=False, **how).flat)


def patch(label: str, colour: str, **how: Any) -> Patch:
    return Patch(facecolor=colour, label=label, **how)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture, the same bytes for the same figures: an SVG with rounded numbers, or a PNG of few colours, by
    the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".svg":
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=100, bbox_inches="tight", pad_inches=0.1)
        Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        return
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.1)
    path.write_text(_smaller(written.getvalue()))


def _smaller(svg: str) -> str:
    """Without what comes before the picture, digits that nobody sees, groups' names and lines' indents. Words between
    tags stay as they are."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<g id="[a-z]+[\w.]*">', "<g>", svg)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"-?\d+\.\d+", _rounded, tag[0]), svg)
    return re.sub(r"\n\s*", "\n", svg)


def _rounded(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), DIGITS):g}"


# -- the table of methods ---------------------------------------------------------------------------------------------

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

TOKEN_PARTS: Mapping[str, tuple[str, str]] = {
    "one_row": ("target: a pass of one row", BLUE),
    "rows": ("target: the window's rows", SKY),
    "round": ("messages and event loops", YELLOW),
    "rest": ("waiting for the draft, and the rest", FAINT),
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
    axes.grid(True, axis="x")
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
        end = _draw_stack(axes, place + 0.12, 0.46, stages, STAGES, 0.0)
        axes.text(end + 0.06, place + 0.12, f"{end:.1f} s", va="center", fontsize=8)
        _draw_stack(axes, place - 0.27, 0.22, row["latency"], DRAFT_STAGES, stages.get("decode_s", 0.0))
    axes.set_yticks(range(len(rows)), [row.get("title") or row["name"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("seconds from the request (medians over clips; thin bars: the draft, meanwhile)")
    axes.margins(x=0.1)
    axes.grid(True, axis="x")
    figure.legend(
        handles=[patch(*look) for look in (*STAGES.values(), *DRAFT_STAGES.values())],
        loc="outside lower center",
        ncols=4,
    )
    return figure


def latency_stages(latency: Mapping[str, float | None]) -> dict[str, float]:
    """A row's seconds one after the other, with what is not accounted for before the first token."""
    known = {name: latency.get(name) or 0.0 for name in ("decode_s", "target_encode_s", "target_prefill_s")}
    other = (latency.get("first_token_s") or 0.0) - sum(known.values())
    return known | {"other_s": max(other, 0.0), "generate_s": latency.get("generate_s") or 0.0}


def draw_token_parts(document: Row) -> Figure | None:
    """What a token of decoding takes, part by part; a mark where the draft's own time for a token is."""
    rows = [row for row in document["methods"] if row.get("T_p0") and row.get("round_overhead_s") is not None]
    rows = [row for row in rows if row["family"] != "lossy" and row.get("mean_tokens_per_pass")][::-1]
    if not rows:
        return None
    figure = new_figure(7.6, 0.27 * len(rows) + 1.6)
    axes = panels(figure)[0]
    for place, row in enumerate(rows):
        end = _draw_stack(axes, place, 0.66, token_parts(row), TOKEN_PARTS, 0.0)
        axes.text(end + 0.15, place, f"{end:.1f}", va="center", fontsize=8)
        if row.get("T_q"):
            axes.plot([1e3 * row["T_q"]] * 2, [place - 0.33, place + 0.33], color=INK, linewidth=1.4)
    axes.set_yticks(range(len(rows)), [row.get("title") or row["name"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("milliseconds a token of decoding\n(medians over clips; mark: what the draft takes to write one)")
    axes.margins(x=0.08)
    axes.grid(True, axis="x")
    figure.legend(handles=[patch(*look) for look in TOKEN_PARTS.values()], loc="outside lower center", ncols=2)
    return figure


def token_parts(row: Row) -> dict[str, float]:
    """Milliseconds of a token: its share of a round, and what is left of the time between two tokens."""
    num_tokens, passes_s = row["mean_tokens_per_pass"], {"one_row": min(row["T_p0"], row["T_p"])}
    passes_s |= {"rows": max(row["T_p"] - row["T_p0"], 0.0), "round": row["round_overhead_s"]}
    parts = {name: 1e3 * seconds / num_tokens for name, seconds in passes_s.items()}
    return parts | {"rest": max(1e3 / row["tokens_per_s"]["median"] - sum(parts.values()), 0.0)}


def _family_patch(name: str) -> Any:
    return patch(*FAMILIES[name], hatch="////" if name == "lossy" else None, edgecolor="white")


def _draw_stack(
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


# -- the first part of one caption, from a gateway's `trace` ----------------------------------------------------------

TIMELINES = ("autoregressive", "sd", "parallelvlm", "slipstream")
TIMELINE_S = 0.4
"""Of a caption's decoding, from the first token."""
TARGET_LANE, DRAFT_LANE = 1.0, 0.0
"""Heights of the two lanes."""


def draw_timelines(document: Row) -> Figure | None:
    """The first moments of decoding by several methods, one under the other."""
    timelines: Mapping[str, Row] = document.get("timelines") or {}
    traces = {name: trace for name in TIMELINES if (trace := (timelines.get(name) or {}).get("trace"))}
    if not traces:
        return None
    figure = new_figure(8.4, 1.0 * len(traces) + 1.3)
    for axes, (method, trace) in zip(panels(figure, len(traces), sharex=True), traces.items(), strict=True):
        axes.set_title(method)
        _draw_trace(axes, [entry for entry in trace if entry.get("start_s", entry["t_s"]) <= TIMELINE_S])
        axes.set_xlim(0, TIMELINE_S * 1e3)
    axes.set_xlabel("ms since the first token")
    meanings = [
        patch("target pass, its own token", BLUE),
        patch("window accepted", GREEN),
        patch("rejected, or never judged", RED),
        patch("draft writes", SKY),
        patch("idle, or messages under way", "white", edgecolor=GREY),
        Line2D([], [], color=INK, linewidth=0.7, label="the draft begins anew"),
    ]
    figure.legend(handles=meanings, loc="outside lower center", ncols=3)
    return figure


def _draw_trace(axes: Axes, trace: list[Row]) -> None:
    for entry in trace:
        match entry["kind"]:
            case "pass":
                _draw_pass(axes, entry)
            case "draft":
                width_s = (entry.get("pass_s") or 0.0) * max(entry.get("tokens") or 0, 1)
                colour = RED if entry.get("stale") else SKY
                _bar(axes, entry["t_s"] - width_s, width_s, DRAFT_LANE - 0.36, 0.72, colour)
            case "restart":
                axes.plot([entry["t_s"] * 1e3] * 2, [-0.45, 1.45], color=INK, linewidth=0.7)
    has_draft = any(entry["kind"] == "draft" for entry in trace)
    axes.set_ylim(-0.55 if has_draft else 0.45, 1.55)
    axes.set_yticks(
        [TARGET_LANE, DRAFT_LANE] if has_draft else [TARGET_LANE], ["target", "draft"] if has_draft else ["target"]
    )
    axes.tick_params(axis="y", length=0)


def _draw_pass(axes: Axes, entry: Row) -> None:
    """The bar's height is the window with the target's own token: green what was accepted, red what was not."""
    window, accepted = entry.get("window") or 0, entry.get("accepted") or 0
    low, unit = TARGET_LANE - 0.4, 0.8 / (window + 1)
    parts = ((low, accepted, GREEN), (low + unit * accepted, 1, BLUE))
    for start, tokens, colour in (*parts, (low + unit * (accepted + 1), window - accepted, RED)):
        _bar(axes, entry["start_s"], entry["pass_s"], start, unit * tokens, colour)


def _bar(axes: Any, start_s: float, width_s: float, low: float, height: float, colour: str) -> None:
    if height > 0:
        axes.bar(start_s * 1e3, height, width_s * 1e3, low, align="edge", color=colour, edgecolor=FAINT, linewidth=0.3)


# -- kept video tokens, drawn over the frames -------------------------------------------------------------------------

PRUNERS = ("uv", "uv_spread", "attention", "specvlm")
NUM_SHOWN = 8
FRAME_SIDE = 56
"""Pixels of a drawn frame: small, so that the file is."""


def draw_kept(document: Row) -> Figure | None:
    """Frames from the whole clip, with what each pruner keeps of them in colour and the rest faint."""
    kept = document.get("kept") or {}
    clip = CLIP_FOLDER / str(kept.get("clip", "")).rpartition("/")[2]
    if not kept.get("pruners") or not clip.is_file():
        return None
    names = [name for name in PRUNERS if name in kept["pruners"]]
    numbers = shown_frames(kept["frames"])
    with clip.open("rb") as source:
        sampled = sample_video(source, kept["frames"], DecodeLimits()).frames[numbers]
    step = max(sampled.shape[1] // FRAME_SIDE, 1)
    frames = np.asarray(sampled[:, ::step, ::step])
    figure = new_figure(8.4, 1.1 * len(names) + 0.3)
    for place, axes in enumerate(panels(figure, len(names), NUM_SHOWN)):
        name, column = names[place // NUM_SHOWN], place % NUM_SHOWN
        mask = kept_in_frame(kept["pruners"][name], numbers[column], tuple(kept["grid"]))
        axes.imshow(veiled(frames[column], mask), interpolation="none")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        if column == 0:
            axes.set_ylabel(name)
        if place < NUM_SHOWN:
            axes.set_title(f"frame {numbers[column] + 1}", fontsize=8, fontweight="normal", loc="center")
    return figure


def shown_frames(num_frames: int) -> list[int]:
    """Indices of the frames that are drawn, evenly over the clip."""
    return [int(number) for number in np.linspace(0, num_frames - 1, NUM_SHOWN).round()]


def kept_in_frame(positions: Sequence[int], frame: int, grid: tuple[int, int]) -> NDArray[np.bool_]:
    size = grid[0] * grid[1]
    mask = np.zeros(size, dtype=np.bool_)
    mask[[position - frame * size for position in positions if position // size == frame]] = True
    return mask.reshape(grid)


def veiled(frame: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """A frame [height, width, 3] whose tokens outside `mask` [rows, columns] fade to white."""
    rows = np.arange(frame.shape[0]) * mask.shape[0] // frame.shape[0]
    columns = np.arange(frame.shape[1]) * mask.shape[1] // frame.shape[1]
    shown = mask[rows][:, columns, None]
    return np.where(shown, frame, 255 - (255 - frame) // 5).astype(np.uint8)
