"""What a bench says of how a draft agrees with a text, however the text was chosen."""

import pytest
import torch

from bench.methods.agreement import MAX_WIDTH, trace_of
from slipstream.sampling.params import GREEDY, SamplingParams
from slipstream.sampling.sampler import TargetSampler

VOCAB, LENGTH = 50, 40


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=7)], ids=["greedy", "drawn"])
def test_a_draft_with_the_targets_own_logits_names_every_token_first(sampling: SamplingParams) -> None:
    logits = 3 * torch.randn(LENGTH, VOCAB, generator=torch.Generator().manual_seed(1))
    target, text = TargetSampler(sampling, (), VOCAB), list[int]()
    for row in logits:
        text.append(target.judge(row[None], text, ())[1])
    assert trace_of(logits, text, sampling).ranks == (0,) * LENGTH
    others = trace_of(logits, [(token + 1) % VOCAB for token in text], sampling)
    assert 0 not in others.ranks and max(others.ranks) == MAX_WIDTH, "some are no candidates at all"
    assert all(len(chances) == MAX_WIDTH for chances in others.sure)
