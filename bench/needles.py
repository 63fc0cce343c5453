"""Pruners in a world where what is kept matters (`training.needles`): how long the draft stays right by each of them.

Nothing is served. The target writes its caption from the whole video; the draft, which keeps what the pruner chooses,
reads that caption and says after every word what it would have written. A run of M accepted tokens ends where the two
differ, and the target's own token begins the next, as with windows without an end. `oracle` keeps what needles lie in
and evenly spaced others; no pruner can know that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from bench.common import ROOT, Budget, machine_facts, make_parser, say
from bench.methods.agreement import Told, prefill_and_tell, read_text
from bench.output import finish
from bench.report.pictures import BLUE, FAINT, FRAME_SIDE, RED, kept_in_frame, new_figure, save, styled, veiled
from bench.tables import print_rows
from slipstream.engine import PromptPlan, VideoLM, load_model
from slipstream.pruning import VideoTokens, get_pruner, num_kept, prune
from slipstream.pruning.guided import scores_of
from slipstream.pruning.unguided import evenly
from training.needles import GRID, NUM_FRAMES, PROMPT, Flash, NeedleClip, sample_needle_clip
from training.pocket import IMAGE_SIZE, family_folder
from training.world import HELD_OUT_SEEDS

ORACLE = "oracle"
PRUNERS = ("uv", "uv_spread", "attention", "specvlm", "dycoke", "uniform", "random")
ALPHAS = (0.9, 0.95, 0.99)
SEEDS_PER_WORLD = 100_000
RESAMPLES = 2000
PICTURE = ROOT / "docs" / "pictures" / "needles.png"
DRAWN = ("uv", "uv_spread", "attention", "specvlm", "uniform", ORACLE)


@dataclass(frozen=True)
class Reading:
    """One clip, as one pruner leaves it to the draft."""

    pruner: str
    alpha: float
    world: int
    agrees: tuple[bool, ...]
    """By position of the target's caption, whether the draft would have written its token."""
    needles_kept: float
    """Share of the needles with a token among those kept."""
    decoys_kept: float

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens the draft is right about, runs of those, and all tokens."""
        right = sum(self.agrees)
        return right, len(self.agrees) - right + 1, len(self.agrees)


@dataclass(frozen=True)
class ClipFindings:
    readings: tuple[Reading, ...]
    kept: Mapping[str, list[int]]
    """By pruner, at the first alpha."""
    needle_ranks: Mapping[str, list[float]]
    """By kind of score, for every needle: the share of the video's tokens that rank above its best one."""
    named: float
    """What the target's caption has right of the needles, see `share_named`."""


class Pair:
    """Target and draft in this process."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.target, self.draft = load_model(str(target)), load_model(str(draft))

    @torch.inference_mode()
    def read(self, clip: NeedleClip, world: int, alphas: Sequence[float], seed: int = 0) -> ClipFindings:
        """Every pruner on one clip."""
        frames = clip.frames(list(range(clip.num_frames)), IMAGE_SIZE)
        plan = self.target.plan_prompt(PROMPT, len(frames))
        told = prefill_and_tell(self.target, plan, self.target.encode_frames(frames))
        token_ids = _caption(self.target, told)
        embeddings = self.draft.encode_frames(frames)
        readings: list[Reading] = []
        kept: dict[str, list[int]] = {}
        for alpha, name in product(alphas, (*PRUNERS, ORACLE)):
            keep = self._keep(name, alpha, clip, plan, embeddings, told, seed)
            logits = read_text(self.draft, plan, embeddings, keep, token_ids)
            agrees = tuple((logits.argmax(dim=-1) == torch.tensor(token_ids)).tolist())
            readings.append(
                Reading(name, alpha, world, agrees, _share_kept(clip.needles, keep), _share_kept(clip.decoys, keep))
            )
            kept.setdefault(name, keep.tolist())
        named = share_named(self.target.decode(token_ids), clip)
        return ClipFindings(tuple(readings), kept, _needle_ranks(clip, told), named)

    def _keep(
        self, name: str, alpha: float, clip: NeedleClip, plan: PromptPlan, embeddings: Tensor, told: Told, seed: int
    ) -> Tensor:
        if name == ORACLE:
            return keep_needles(clip, num_kept(plan.num_video_tokens, alpha))
        pruner = get_pruner(name)
        video = VideoTokens(plan.num_video_tokens, plan.num_steps, embeddings)
        return prune(pruner, video, alpha, guidance=told.guidance_of(pruner), seed=seed)


def keep_needles(clip: NeedleClip, num_keep: int) -> Tensor:
    """What needles lie in, at most `num_keep` tokens of it, and evenly spaced others: int64, ascending."""
    num_tokens = clip.num_frames * GRID * GRID
    wanted = torch.tensor([place for needle in clip.needles for place in needle.places])[:num_keep]
    others = torch.ones(num_tokens, dtype=torch.bool)
    others[wanted] = False
    rest = others.nonzero().flatten()
    return torch.cat([wanted, rest[evenly(len(rest), num_keep - len(wanted))]]).sort().values


def _caption(model: VideoLM, told: Told, most: int = 160) -> list[int]:
    token_ids = [int(told.first_logits.argmax())]
    while token_ids[-1] not in model.info.eos_token_ids and len(token_ids) < most:
        token_ids.append(int(model.step([(told.state, token_ids[-1:])])[0][-1].argmax()))
    return token_ids


def _share_kept(flashes: Sequence[Flash], keep: Tensor) -> float:
    kept = set(keep.tolist())
    return sum(not kept.isdisjoint(flash.places) for flash in flashes) / len(flashes)


def _needle_ranks(clip: NeedleClip, told: Told) -> dict[str, list[float]]:
    ranks = {}
    for name in ("uv", "attention"):
        pruner = get_pruner(name)
        assert pruner.score is not None
        scores = scores_of(told.guidance_of(pruner), pruner.score)
        best = [scores[list(needle.places)].max() for needle in clip.needles]
        ranks[pruner.score.value] = [float((scores > score).float().mean()) for score in best]
    return ranks


def share_named(text: str, clip: NeedleClip) -> float:
    """Of the needles' colours, shapes and sides, those that the sentence about their scene has right."""
    right = 0
    for sentence, needle in zip(text.split("."), clip.needles, strict=False):
        colour, shape, *_ = [*sentence.partition(" tiny ")[2].split(), "", ""]
        right += (colour == needle.look.colour) + (shape == needle.look.shape) + sentence.endswith(needle.side)
    return right / (3 * len(clip.needles))


# -- figures over clips -----------------------------------------------------------------------------------------------


def mean_run_and_tau(counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """M and tau of [..., clips, 3] counts as in `Reading.counts`, all clips together."""
    right, runs, tokens = np.moveaxis(counts.sum(axis=-2).astype(np.float64), -1, 0)
    return right / runs, right / tokens


def resample(worlds: Sequence[int], rng: np.random.Generator, times: int = RESAMPLES) -> NDArray[np.int64]:
    """Indices [times, clips] for a bootstrap: as many clips of each world as there are, drawn with replacement."""
    places = np.arange(len(worlds))
    parts = [places[np.equal(worlds, world)] for world in sorted(set(worlds))]
    return np.concatenate([rng.choice(part, (times, len(part))) for part in parts], axis=1)


def summarise(findings: Sequence[ClipFindings]) -> list[dict[str, Any]]:
    """A row for each alpha and pruner: M, tau and M over that of `random`, each with its 95% interval over clips; clips
    are drawn together for all pruners, so that the ratio is of the same clips."""
    by_setting: dict[tuple[float, str], list[Reading]] = {}
    for reading in (reading for found in findings for reading in found.readings):
        by_setting.setdefault((reading.alpha, reading.pruner), []).append(reading)
    drawn = resample([found.readings[0].world for found in findings], np.random.default_rng(0))
    rows = []
    for (alpha, pruner), readings in by_setting.items():
        counts, beside = (
            np.array([reading.counts for reading in of]) for of in (readings, by_setting[alpha, "random"])
        )
        (run, tau), (runs, taus) = mean_run_and_tau(counts), mean_run_and_tau(counts[drawn])
        random_run, random_runs = mean_run_and_tau(beside)[0], mean_run_and_tau(beside[drawn])[0]
        worlds = np.array([reading.world for reading in readings])
        rows.append(
            {"alpha": alpha, "pruner": pruner}
            | _with_interval("M", run, runs)
            | _with_interval("tau", tau, taus)
            | _with_interval("M_over_random", run / random_run, runs / random_runs)
            | {f"M_world_{w}": round(float(mean_run_and_tau(counts[worlds == w])[0]), 2) for w in sorted(set(worlds))}
            | {
                "needles_kept": round(float(np.mean([reading.needles_kept for reading in readings])), 3),
                "decoys_kept": round(float(np.mean([reading.decoys_kept for reading in readings])), 3),
            }
        )
    return rows


def _with_interval(name: str, value: Any, resampled: NDArray[np.float64]) -> dict[str, float]:
    low, high = np.percentile(resampled, (2.5, 97.5))
    return {name: round(float(value), 3), f"{name}_low": round(float(low), 3), f"{name}_high": round(float(high), 3)}


# -- the picture ------------------------------------------------------------------------------------------------------


def draw(clip: NeedleClip, kept: Mapping[str, Sequence[int]]) -> Figure:
    """A row for each pruner: the first frame of every needle with what is kept of it, and how many tokens of each frame
    of the clip are kept; needles are marked below."""
    numbers = [needle.frames[0] for needle in clip.needles]
    step = IMAGE_SIZE // FRAME_SIDE
    frames = clip.frames(numbers, IMAGE_SIZE)[:, ::step, ::step]
    figure = new_figure(10.0, 1.0 * len(DRAWN) + 0.6)
    widths = [*(1.0 for _ in numbers), 4.0]
    grid = figure.subplots(len(DRAWN), len(widths), squeeze=False, width_ratios=widths)
    for name, row in zip(DRAWN, grid, strict=True):
        for axes, number, frame in zip(row, numbers, frames, strict=False):
            axes.imshow(veiled(frame, kept_in_frame(kept[name], number, (GRID, GRID))), interpolation="none")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
        row[0].set_ylabel(name)
        _draw_counts(row[-1], clip, kept[name])
    for axes, number in zip(grid[0], numbers, strict=False):
        axes.set_title(f"frame {number + 1}", fontsize=8, fontweight="normal", loc="center")
    grid[0][-1].set_title("tokens kept of each frame (red: a needle)", fontsize=8, fontweight="normal", loc="center")
    return figure


def _draw_counts(axes: Axes, clip: NeedleClip, kept: Sequence[int]) -> None:
    counts = np.bincount(np.array(kept) // (GRID * GRID), minlength=clip.num_frames)
    flashing = [frame for needle in clip.needles for frame in needle.frames]
    edges = np.arange(clip.num_frames + 1) + 0.5
    on_needles = np.where(np.isin(np.arange(clip.num_frames), flashing), counts, 0)
    axes.vlines([frame + 1 for frame in flashing], 0, GRID * GRID, color=FAINT, linewidth=0.6)
    axes.stairs(counts, edges, fill=True, color=BLUE)
    axes.stairs(on_needles, edges, fill=True, color=RED)
    axes.set_ylim(0, GRID * GRID)
    axes.set_xlim(edges[0], edges[-1])


# -- the program ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> None:
    folder = family_folder("needles")
    options = make_parser(
        "needles",
        __doc__ or "",
        target=(folder / "target", "folder of the pair's target, see training.train_needles"),
        draft=folder / "draft",
        worlds=(3, "seeds of worlds"),
        clips=(8, "of each world"),
        minutes=(60.0, "after which no clip is begun"),
        frames=(NUM_FRAMES, "of each clip"),
        alphas=list(ALPHAS),
        picture=(PICTURE, "of the first clip, at the first alpha"),
    ).parse_args(argv)
    torch.set_num_threads(1)
    pair, budget = Pair(options.target, options.draft), Budget(60 * options.minutes)
    findings: list[ClipFindings] = []
    for number, world in product(range(options.clips), range(options.worlds)):
        if findings and not budget.allows(0):
            break
        seed = HELD_OUT_SEEDS.start + world * SEEDS_PER_WORLD + number
        clip = sample_needle_clip(seed, options.frames)
        findings.append(pair.read(clip, world, options.alphas, seed))
        say(f"world {world}, clip {number + 1} of {options.clips}: the target names {findings[-1].named:.0%}")
        if len(findings) == 1:
            with styled():
                save(draw(clip, findings[0].kept), options.picture)
    rows = summarise(findings)
    print_rows(f"Needles: runs of accepted tokens ({len(findings)} clips of {options.worlds} worlds)", rows)
    ranks = {name: [rank for f in findings for rank in f.needle_ranks[name]] for name in findings[0].needle_ranks}
    finish(
        "needles",
        {
            "rows": rows,
            "clips": len(findings),
            "target_named": round(float(np.mean([found.named for found in findings])), 4),
            "needle_rank_median": {name: round(float(np.median(values)), 4) for name, values in ranks.items()},
            "machine": machine_facts(),
        },
    )
