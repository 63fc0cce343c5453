"""Texts have the target's joint distribution; how many draft tokens survive it.

Two measurements. `joint_chi2` runs the toy world of the tests, real pipeline and real samplers, with more captions.
`pocket_acceptance` lets both pocket models look at the same sampled captions and asks at every position, for each rule,
how often a draft token is accepted; beside it stand the bounds that any pair of distributions obeys.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import PROMPT, SHORT_SCENES, Task, held_out_clips, say
from bench.methods import agreement
from bench.reference import engine_model, frames_of
from slipstream.sampling.params import RULES, SamplingParams
from slipstream.sampling.sampler import DraftSampler, TargetSampler, Warp
from slipstream.stack.local import POCKET_DIR
from tests.sampling.toy_world import TEMPERATURES, p_values, play_many, toy_drafts, toy_target

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
