"""Sampling on the device: the same choices as on the CPU, and few waits for them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slipstream.engine.segments import GreedyRows
from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.sampling.sampler import BLOCK_ROWS, DraftSampler, TargetSampler
from slipstream.sampling.structure import Structure
from tests.pretended_gpu import queue

VOCAB, PROMPT, COMMITTED = 500, (3, 9), [4, 8, 15]
PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(1.0, min_p=0.1, min_new_tokens=6, seed=5),
    SamplingParams(1.0, seed=5),
    SamplingParams(0.8, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=6),
    SamplingParams(0.9, top_p=0.8, seed=7, rule="rejection"),
    SamplingParams(choice=("even",)),
    SamplingParams(1.1, seed=8, choice=("even",)),
]
each_params = pytest.mark.parametrize("params", PARAMS, ids=str)


class EvenTokens(Structure):
    """Of which every text is, of any length."""

    def __init__(self) -> None:
        pass

    def allowed(self, output: Sequence[int], window: Sequence[int]) -> list[NDArray[np.bool_]]:
        return [np.arange(VOCAB) % 2 == 0] * (len(window) + 1)


def samplers(params: SamplingParams) -> tuple[TargetSampler, DraftSampler]:
    structure = EvenTokens() if params.is_structured else None
    return TargetSampler(params, PROMPT, VOCAB, structure, (2,)), DraftSampler(params, PROMPT, VOCAB, structure, (2,))


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@each_params
def test_a_window_is_judged_with_few_waits(params: SamplingParams) -> None:
    target, draft = samplers(params)
    for seed in range(10):
        logits = logits_of(BLOCK_ROWS, seed)
        window: list[int] = []
        proposals: list[Proposal] = []
        for row in logits[:-1] + logits_of(BLOCK_ROWS - 1, seed + 100) * 0.1:
            token, proposal = draft.choose(row, [*COMMITTED, *window])
            window.append(token)
            proposals += [proposal] if proposal is not None else []
        right = target.judge(logits, COMMITTED, window, proposals)
        there = logits.cuda()
        target.judge(there, COMMITTED, window, proposals)  # has what all share made there
        queue.CALLS.clear()
        assert target.judge(there, COMMITTED, window, proposals) == right
        assert queue.waits() <= (1 if params.greedy else 4 if params.sends_proposals else 2)


@each_params
def test_a_draft_chooses_what_it_does_on_the_cpu(params: SamplingParams) -> None:
    _, draft = samplers(params)
    for seed in range(10):
        (logits,) = logits_of(1, seed)
        there = logits.cuda()
        draft.choose(there, COMMITTED)
        queue.CALLS.clear()
        assert draft.choose(there, COMMITTED)[0] == draft.choose(logits, COMMITTED)[0]
        assert queue.waits() <= (1 if params.greedy else 4 if params.sends_proposals else 2)
        assert draft.rank(there, COMMITTED, 4) == draft.rank(logits, COMMITTED, 4)
        assert draft.candidates(there, COMMITTED, 4)[0] == draft.candidates(logits, COMMITTED, 4)[0]


@pytest.mark.parametrize("num_best", [0, 1, 20, VOCAB + 1])
def test_how_likely_tokens_are_takes_one_wait(num_best: int) -> None:
    logits, rows, tokens = logits_of(BLOCK_ROWS, 3), (0, 2, 2, 5), (7, 1, 499, 8)
    there = GreedyRows(logits.cuda())
    queue.CALLS.clear()
    told, best = there.likely(rows, tokens, num_best)
    assert queue.waits() == 1
    right = logits.log_softmax(dim=-1)
    assert told == [right[row, token].item() for row, token in zip(rows, tokens, strict=True)]
    likeliest = [right[row].topk(min(num_best, VOCAB)) for row in rows]
    assert [token for token, _ in best] == [int(token) for found in likeliest for token in found.indices]
    assert [chance for _, chance in best] == [float(chance) for found in likeliest for chance in found.values]
