"""What a draft's tokens are worth, without a stack: everything runs in this process.

- `joint_chi2`: texts have the target's joint distribution, in the toy world of the tests, real pipeline and samplers.
- `pocket_acceptance`: both pocket models look at the same sampled captions, and at every position it is asked, for each
  rule, how often a draft token is accepted; beside it stand the bounds that any pair of distributions obeys.
- `measure_positions`: does a draft agree more when kept video tokens stay where they were? It reads the target's own
  greedy captions and says after every word what it would have written. "original" leaves kept video tokens at their
  positions, "compact" closes the gaps.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.common import PROMPT, ROOT, SHORT_SCENES, Task, held_out_clips, say
from bench.methods import agreement
from bench.methods.agreement import early_guidance
from bench.reference import engine_model, frames_of
from slipstream.engine import PromptPlan, VideoLM, load_model
from slipstream.pruning import Guidance, VideoTokens, get_pruner, prune
from slipstream.sampling.params import RULES, SamplingParams
from slipstream.sampling.sampler import DraftSampler, TargetSampler, Warp
from slipstream.stack.local import POCKET_DIR
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from tests.sampling.toy_world import TEMPERATURES, p_values, play_many, toy_drafts, toy_target
from training.world import FULL_SCENES

# -- sampling ---------------------------------------------------------------------------------------------------------

POCKET_TEMPERATURES = (0.7, 1.0)
NUM_FRAMES = 16
MAX_NEW_TOKENS = 96
DRAWS = 8
"""Draft tokens that are drawn and judged at each position, by each rule."""


def joint_chi2(num_captions: int = 300) -> dict[str, Any]:
    """Smallest p-value per rule of all chi-square tests: 3 temperatures, 4 drafts, runs of 2 and 3 tokens, 3 offsets.

    `num_captions`: toy captions of 30 tokens for each rule, temperature and draft. With true samplers the smallest of
    72 p-values is below 0.0007 in one measurement out of twenty.
    """
    target = toy_target()
    smallest: dict[str, float] = {}
    for rule in RULES:
        found: list[float] = []
        for temperature, (name, draft) in product(TEMPERATURES, toy_drafts(target).items()):
            texts = play_many((target, draft), rule, temperature, num_captions)
            found += p_values(target, texts, temperature).values()
            say(f"{rule}, temperature {temperature}, {name} draft: smallest p so far {min(found):.4f}")
        smallest[rule] = round(min(found), 6)
    return {**smallest, "tests_per_rule": len(found), "captions_per_test": num_captions}


def acceptance_bounds(target: Tensor, draft: Tensor) -> tuple[float, float]:
    """Mean over rows [n, vocab] of (1 - TV) / (1 + TV), which `coupled` reaches at least, and of 1 - TV, which
    `rejection` reaches and no rule exceeds. TV is the total variation distance of a row's two distributions."""
    overlap = torch.minimum(target, draft).sum(dim=-1)
    return float((overlap / (2 - overlap)).mean()), float(overlap.mean())


def pocket_acceptance(
    num_clips: int = 4, temperatures: Sequence[float] = POCKET_TEMPERATURES, alpha: float = 0.9
) -> dict[str, dict[str, float]]:
    """Mean acceptance of a draft token by temperature and rule, with both bounds, on held-out clips."""
    clips = held_out_clips(num_clips, SHORT_SCENES)
    return {f"{temperature:g}": _acceptance(clips, temperature, alpha) for temperature in temperatures}


def _acceptance(clips: Sequence[Path], temperature: float, alpha: float) -> dict[str, float]:
    target_rows, draft_rows, accepted = [], [], {rule: [0, 0] for rule in RULES}
    for number, clip in enumerate(clips):
        task = Task(clip, NUM_FRAMES, PROMPT, MAX_NEW_TOKENS, POCKET_DIR / "target", POCKET_DIR / "draft")
        text, target_logits = _sampled_text(task, SamplingParams(temperature, seed=number))
        draft_logits, _ = agreement.draft_logits(task, text, "uv_spread", alpha)
        target_rows.append(target_logits)
        draft_rows.append(draft_logits)
        for rule, draw in product(RULES, range(DRAWS)):
            params = SamplingParams(temperature, seed=1000 * (number + 1) + draw, rule=rule)
            accepted[rule][0] += _num_accepted(params, text, target_logits, draft_logits)
            accepted[rule][1] += len(text)
        say(f"temperature {temperature}: {number + 1} of {len(clips)} clips, {len(text)} tokens")
    warp = Warp(SamplingParams(temperature), (), target_rows[0].shape[-1])
    lower, upper = acceptance_bounds(
        warp.probabilities(torch.cat(target_rows), ()), warp.probabilities(torch.cat(draft_rows), ())
    )
    rates = {rule: round(hits / count, 4) for rule, (hits, count) in accepted.items()}
    return {**rates, "lower_bound": round(lower, 4), "upper_bound": round(upper, 4)}


def _sampled_text(task: Task, params: SamplingParams) -> tuple[tuple[int, ...], Tensor]:
    """A caption sampled from the target, and the logits [n, vocab] that each of its tokens was chosen from."""
    model, frames = engine_model(task.target), frames_of(task)
    plan, sampler = model.plan_prompt(task.prompt, len(frames)), TargetSampler(params, (), model.info.vocab_size)
    text: list[int] = []
    with torch.inference_mode():
        state, logits = model.start_prefill(plan, model.encode_frames(frames)).finish()
        rows = [logits]
        while True:
            _, token = sampler.judge(rows[-1][None], text, ())
            text.append(token)
            if token in model.info.eos_token_ids or len(text) == task.max_new_tokens:
                return tuple(text), torch.stack(rows)
            rows.append(model.step([(state, [token])])[0][-1])


def _num_accepted(params: SamplingParams, text: Sequence[int], target_logits: Tensor, draft_logits: Tensor) -> int:
    """At how many positions of the text one draft token, written after the text before it, is accepted."""
    vocab_size = target_logits.shape[-1]
    target, draft = TargetSampler(params, (), vocab_size), DraftSampler(params, (), vocab_size)
    num_accepted = 0
    for position, (target_row, draft_row) in enumerate(zip(target_logits, draft_logits, strict=True)):
        token, proposal = draft.choose(draft_row, text[:position])
        proposals = () if proposal is None else (proposal,)
        num_accepted += target.judge(target_row.expand(2, -1), text[:position], (token,), proposals)[0]
    return num_accepted


# -- positions --------------------------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[str, tuple[int, int]]] = {
    "llava_onevision": ("models/pocket", FULL_SCENES),
    "qwen2_5_vl": ("models/pocket-qwen", (1, 3)),
}
"""Family -> its pair, and the fewest and most scenes of the clips that it was trained for."""
ALPHAS = (0.0, 0.5, 0.9, 1.0)
SCHEMES = ("original", "compact")
PRUNER = "uv_spread"
MAX_NEW_TOKENS = 256


class Clip(NamedTuple):
    """A clip, what the target says of it, and what it tells the draft."""

    frames: NDArray[np.uint8]
    seconds_per_frame: float
    token_ids: list[int]
    guidance: Guidance


def measure_positions(num_clips: int = 6, num_frames: int = 32) -> dict[str, Any]:
    """Per family and pruned share: accepted tokens with either scheme, and how many were judged."""
    return {family: _measure_pair(family, num_clips, num_frames) for family in PAIRS}


@torch.inference_mode()
def _measure_pair(family: str, num_clips: int, num_frames: int) -> dict[str, Any]:
    folder, num_scenes = PAIRS[family]
    target, draft = (load_model(str(ROOT / folder / role)) for role in ("target", "draft"))
    right = dict.fromkeys([(alpha, scheme) for alpha in ALPHAS for scheme in SCHEMES], 0)
    num_tokens = 0
    for number, path in enumerate(held_out_clips(num_clips, num_scenes), 1):
        clip = _read(target, path, num_frames)
        num_tokens += len(clip.token_ids)
        for alpha, scheme in right:
            right[alpha, scheme] += _num_agreeing(draft, clip, alpha, scheme)
        say(f"positions, {family}: clip {number} of {num_clips}, {num_tokens} tokens")
    by_alpha = {
        str(alpha): {scheme: round(right[alpha, scheme] / num_tokens, 4) for scheme in SCHEMES} for alpha in ALPHAS
    }
    return {"tokens": num_tokens, "clips": num_clips, "acceptance": by_alpha}


def _read(target: VideoLM, path: Path, num_frames: int) -> Clip:
    """The target's greedy caption of a clip, and its guidance."""
    with path.open("rb") as source:
        sampled = sample_video(source, num_frames, DecodeLimits())
    seconds_per_frame = sampled.duration_s / len(sampled.frames)
    plan = _plan(target, sampled.frames, seconds_per_frame)
    prefill = target.start_prefill(plan, target.encode_frames(sampled.frames))
    guidance = early_guidance(target, prefill)
    state, logits = prefill.finish()
    token_ids = [int(logits.argmax())]
    while token_ids[-1] not in target.info.eos_token_ids and len(token_ids) < MAX_NEW_TOKENS:
        token_ids.append(int(target.step([(state, token_ids[-1:])])[0][-1].argmax()))
    return Clip(sampled.frames, seconds_per_frame, token_ids, guidance)


def _num_agreeing(draft: VideoLM, clip: Clip, alpha: float, scheme: str) -> int:
    """Tokens of the target's caption that the draft would write too, given the words before each."""
    plan = _plan(draft, clip.frames, clip.seconds_per_frame)
    embeddings = draft.encode_frames(clip.frames)
    video = VideoTokens(plan.num_video_tokens, plan.num_steps, embeddings)
    keep = prune(get_pruner(PRUNER), video, alpha, guidance=clip.guidance, seed=0)
    state, first_logits = draft.start_prefill(plan, embeddings, keep=keep, positions=scheme).finish()
    (rows,) = draft.step([(state, clip.token_ids)])
    choices = torch.cat([first_logits[None], rows[:-1]]).argmax(dim=-1)
    return int((choices == torch.tensor(clip.token_ids)).sum())


def _plan(model: VideoLM, frames: NDArray[np.uint8], seconds_per_frame: float) -> PromptPlan:
    return model.plan_prompt(PROMPT, len(frames), frame_size=frames.shape[1:3], seconds_per_frame=seconds_per_frame)
