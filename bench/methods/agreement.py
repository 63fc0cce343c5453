"""Who agrees with the target: the draft after every prefix of the target's text, and the target with lossy texts.

This is the draft that a stack runs, with the same tokens kept, but fed the text as it is; so it says for every output
position whether a draft token there is accepted, also where a stack never asked. Runs in the reference process.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.common import Task
from bench.reference import engine_model, frames_of
from bench.simulate_trees import TreeTrace
from slipstream.engine import DecodeState, Prefill, PromptPlan, VideoLM
from slipstream.engine.target_engine import default_guidance_layer
from slipstream.engine.text_attention import TextAttention
from slipstream.pruning import Guidance, Pruner, Score, VideoTokens, get_pruner, prune
from slipstream.pruning.guided import make_guidance
from slipstream.sampling.params import GREEDY, SamplingParams
from slipstream.sampling.sampler import DraftSampler
from slipstream.speculation.trees.growth import GROWTHS

MAX_WIDTH = max(growth.width for growth in GROWTHS.values())
TIMED_ROWS = 4
TIMED_PASSES = 15


@dataclass(frozen=True)
class Agreement:
    """What the draft makes of the target's text, and what its passes cost."""

    trace: TreeTrace
    """The target's tokens among the draft's candidates, by output position."""
    kept_tokens: int
    pass_s: float = 0.0
    """Seconds of a draft's pass over one row, in the reference process; 0: not measured."""
    row_share: float = 0.05
    """What a further row of it costs, as a share of the pass."""

    @property
    def agrees(self) -> tuple[bool, ...]:
        """By output position, whether the draft would have written the target's token."""
        return tuple(rank == 0 for rank in self.trace.ranks)


def draft_agreements(
    task: Task, token_ids: Sequence[int], pruners: Sequence[str], alpha: float, sampling: SamplingParams = GREEDY
) -> list[Agreement]:
    """Agreement on the text `token_ids`, which was chosen so, by pruner, each pruning a share `alpha` of the video."""
    logits_of = DraftLogits(task)
    agreements = []
    for pruner in pruners:
        logits, num_kept = logits_of(token_ids, pruner, alpha)
        one_s, many_s = (logits_of.pass_s(token_ids[:rows]) for rows in (1, TIMED_ROWS))
        row_share = max(many_s / one_s - 1, 0.0) / (TIMED_ROWS - 1)
        agreements.append(Agreement(trace_of(logits, token_ids, sampling), num_kept, one_s, row_share))
    return agreements


def trace_of(logits: Tensor, token_ids: Sequence[int], sampling: SamplingParams) -> TreeTrace:
    """Where each token stands among what a draft with these logits [n, vocab] would name there."""
    sampler = DraftSampler(sampling, (), logits.shape[-1])  # nothing here is penalised, so no prompt counts
    ranks, sure = [], []
    for place, (row, token) in enumerate(zip(logits, token_ids, strict=True)):
        candidates, chances = sampler.candidates(row, token_ids[:place], MAX_WIDTH)
        ranks.append(candidates.index(token) if token in candidates else MAX_WIDTH)
        sure.append(tuple(chances))
    return TreeTrace(tuple(ranks), tuple(sure))


def draft_logits(task: Task, token_ids: Sequence[int], pruner: str, alpha: float) -> tuple[Tensor, int]:
    """What the draft makes of every prefix of a text, logits [n, vocab], and how many video tokens it keeps."""
    return DraftLogits(task)(token_ids, pruner, alpha)


class DraftLogits:
    """A clip's draft, which can be asked about any text and any pruner that needs no attention."""

    def __init__(self, task: Task) -> None:
        target, self._draft, frames = engine_model(task.target), engine_model(task.draft), frames_of(task)
        self._plan = self._draft.plan_prompt(task.prompt, len(frames))
        with torch.inference_mode():
            self._guidance = early_guidance(target, target.start_prefill(self._plan, target.encode_frames(frames)))
            self._embeddings = self._draft.encode_frames(frames)

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int], pruner: str, alpha: float) -> tuple[Tensor, int]:
        """What the draft makes of every prefix of a text, logits [n, vocab], and how many video tokens it keeps."""
        video = VideoTokens(self._plan.num_video_tokens, self._plan.num_steps, self._embeddings)
        keep = prune(get_pruner(pruner), video, alpha, guidance=self._guidance, seed=0)
        self._state, logits = _read(self._draft, self._plan, self._embeddings, keep, token_ids)
        return logits, len(keep)

    @torch.inference_mode()
    def pass_s(self, token_ids: Sequence[int]) -> float:
        """Seconds of a pass over these behind the text asked about last: the median."""
        taken, num_before = [], self._state.num_tokens
        for _ in range(TIMED_PASSES):
            began_s = time.perf_counter()
            self._draft.step([(self._state, token_ids)])
            taken.append(time.perf_counter() - began_s)
            self._state.rollback(num_before)
        return statistics.median(taken)


@torch.inference_mode()
def read_text(model: VideoLM, plan: PromptPlan, embeddings: Tensor, keep: Tensor, token_ids: Sequence[int]) -> Tensor:
    """What a model that keeps these of the video's tokens makes of every prefix of a text, logits [n, vocab]."""
    return _read(model, plan, embeddings, keep, token_ids)[1]


def _read(
    model: VideoLM, plan: PromptPlan, embeddings: Tensor, keep: Tensor, token_ids: Sequence[int]
) -> tuple[DecodeState, Tensor]:
    state, first_logits = model.start_prefill(plan, embeddings, keep=keep).finish()
    rows = model.step([(state, token_ids[:-1])])[0] if len(token_ids) > 1 else first_logits[None, :][:0]
    return state, torch.cat([first_logits[None, :], rows])


def accepted_shares(task: Task, texts: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Of every text, the share of tokens that the target with all of the video would choose after what precedes them:
    the papers' A of a lossy method (ParallelVLM, table 2)."""
    target, frames = engine_model(task.target), frames_of(task)
    plan = target.plan_prompt(task.prompt, len(frames))
    shares = {}
    with torch.inference_mode():
        state, first_logits = target.start_prefill(plan, target.encode_frames(frames)).finish()
        for name, token_ids in texts.items():
            rows = target.step([(state, token_ids[:-1])])[0] if len(token_ids) > 1 else first_logits[None, :][:0]
            state.rollback(plan.num_tokens)
            choices = torch.cat([first_logits[None, :], rows]).argmax(dim=-1)
            shares[name] = float((choices == torch.tensor(token_ids)).double().mean())
    return shares


def kept_tokens(task: Task, pruners: Sequence[str], alpha: float) -> dict[str, list[int]]:
    """The indices of the video tokens that each pruner keeps, ascending."""
    target, draft, frames = engine_model(task.target), engine_model(task.draft), frames_of(task)
    plan = target.plan_prompt(task.prompt, len(frames))
    with torch.inference_mode():
        told = prefill_and_tell(target, plan, target.encode_frames(frames))
        video = VideoTokens(plan.num_video_tokens, plan.num_steps, draft.encode_frames(frames))
        return {
            name: prune(get_pruner(name), video, alpha, guidance=told.guidance_of(get_pruner(name))).tolist()
            for name in pruners
        }


@dataclass(frozen=True)
class Told:
    """All that a target can tell of a video, by the kind of score, and where its prefill has come to."""

    states: Guidance
    attention: Mapping[Score, Tensor]
    """Scores [num_video_tokens]."""
    state: DecodeState
    first_logits: Tensor

    def guidance_of(self, pruner: Pruner) -> Guidance:
        """What that pruner asks for."""
        scores = self.attention.get(pruner.score) if pruner.score else None
        return self.states if scores is None else Guidance(scores=scores)


def prefill_and_tell(target: VideoLM, plan: PromptPlan, embeddings: Tensor) -> Told:
    """Runs a prompt, and records what guidance of every kind is made from."""
    layer, attention = default_guidance_layer(target.info.num_layers), TextAttention(plan)
    prefill = target.start_prefill(plan, embeddings, observer=attention)
    before = prefill.video_states(), prefill.text_states()
    prefill.run_layers(layer)
    states = make_guidance(*before, prefill.video_states(), prefill.text_states(), kind="hidden_states")
    state, first_logits = prefill.finish()
    scores = {
        Score.ATTENTION: attention.mean(),
        Score.ATTENTION_VARIATION: attention.mean([layer - 1]) - attention.mean([0]),
    }
    return Told(states, scores, state, first_logits)


def early_guidance(target: VideoLM, prefill: Prefill) -> Guidance:
    """The guidance of a prefill that no layer has run of; runs it up to the guidance layer."""
    before = prefill.video_states(), prefill.text_states()
    prefill.run_layers(default_guidance_layer(target.info.num_layers))
    return make_guidance(*before, prefill.video_states(), prefill.text_states(), kind="scores")
