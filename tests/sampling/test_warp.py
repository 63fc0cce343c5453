"""Probabilities are those of transformers' own logits processors, row by row, with the history of that row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.errors import SlipstreamError
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import NO_TOKEN, Warp

VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def transformers_probabilities(logits: Tensor, history: list[int], params: SamplingParams) -> Tensor:
    """Of one row [vocab], in the order in which `generate` applies them."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    input_ids = torch.tensor([history], dtype=torch.int64)
    return steps(input_ids, logits[None].clone())[0].softmax(dim=-1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    prompt=st.lists(st.integers(0, VOCAB + 5), max_size=6),
    output=TOKENS,
    window=TOKENS,
    temperature=st.sampled_from((0.2, 0.7, 1.0, 3.0)),
    top_k=st.sampled_from((0, 1, 5, VOCAB, 1000)),
    top_p=st.sampled_from((1.0, 0.95, 0.5, 0.01)),
    penalty=st.sampled_from((1.0, 1.3, 0.8)),
    min_p=st.sampled_from((0.0, 0.05, 0.5, 1.0)),
)
def test_rows_equal_transformers(
    seed: int,
    prompt: list[int],
    output: list[int],
    window: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    penalty: float,
    min_p: float,
) -> None:
    logits = torch.randn(len(window) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature, top_k, top_p, penalty, min_p=min_p)
    ours = Warp(params, (0, *prompt), VOCAB).probabilities(logits, output, window)
    for row in range(len(window) + 1):
        history = [0, *(token for token in prompt if token < VOCAB), *output, *window[:row]]
        theirs = transformers_probabilities(logits[row], history, params)
        assert torch.equal(ours[row] > 0, theirs > 0)
        assert torch.allclose(ours[row], theirs.double(), atol=1e-6)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), output=TOKENS, window=TOKENS)
def test_a_penalised_greedy_choice_is_the_one_of_transformers(seed: int, output: list[int], window: list[int]) -> None:
    logits = torch.randn(len(window) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    penalty = RepetitionPenaltyLogitsProcessor(1.7)
    ours = Warp(SamplingParams(repetition_penalty=1.7), (3, 4), VOCAB).adjusted(logits, output, window)
    for row in range(len(window) + 1):
        theirs = penalty(torch.tensor([[3, 4, *output, *window[:row]]]), logits[row : row + 1].clone())[0]
        assert torch.equal(ours[row], theirs)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    output=TOKENS,
    window=TOKENS,
    presence=st.sampled_from((-2.0, 0.0, 0.5)),
    frequency=st.sampled_from((-0.3, 0.0, 1.5)),
)
def test_tokens_of_the_text_count_as_openais_protocol_has_it(
    seed: int, output: list[int], window: list[int], presence: float, frequency: float
) -> None:
    logits = torch.randn(len(window) + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    ours = Warp(params, (3, 4), VOCAB).adjusted(logits, output, [*window, 5, 5])
    for row in range(len(window) + 1):
        counts = torch.bincount(torch.tensor([*output, *window[:row]], dtype=torch.int64), minlength=VOCAB)
        theirs = logits[row] - counts * frequency - (counts > 0).float() * presence
        assert torch.allclose(ours[row], theirs, atol=1e-6)


@pytest.mark.parametrize("least", [1, 4, 6, 100])
def test_ends_come_no_sooner_than_transformers_have_them(least: int) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(7))
    prompt, output, window = [3, 4], [5, 6], [7, 8, 9]
    warp = Warp(SamplingParams(min_new_tokens=least), prompt, VOCAB, ends=(1, 30, VOCAB))
    ours = warp.adjusted(logits, output, window)
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt), least, [1, 30], device="cpu")
    for row in range(4):
        history = torch.tensor([[*prompt, *output, *window[:row]]])
        assert torch.equal(ours[row], theirs(history, logits[row : row + 1].clone())[0])


def test_without_penalty_the_logits_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB)
    assert Warp(SamplingParams(), (1, 2), VOCAB).adjusted(logits, (3,), (4,)) is logits


def test_a_penalty_does_not_change_the_given_logits() -> None:
    logits = torch.ones(2, VOCAB)
    for params in (SamplingParams(repetition_penalty=2.0), SamplingParams(frequency_penalty=2.0)):
        assert not torch.equal(Warp(params, (1, 2), VOCAB).adjusted(logits, (3,), (4,)), logits)
    assert bool((logits == 1).all())


def test_a_penalty_counts_no_token_twice() -> None:
    penalised = Warp(SamplingParams(repetition_penalty=2.0), (1, 1), VOCAB).adjusted(
        torch.ones(4, VOCAB), (1,), (1, 2, 2)
    )
    assert penalised[:, 1].tolist() == [0.5] * 4
    assert penalised[:, 2].tolist() == [1.0, 1.0, 0.5, 0.5]


def test_rows_sum_to_one_and_keep_the_ties_at_the_edge() -> None:
    tied = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for params in (SamplingParams(1.0, top_k=2), SamplingParams(1.0, top_p=0.5), SamplingParams(1.0, min_p=0.3)):
        probabilities = Warp(params, (), 5).probabilities(tied, ())[0]
        assert (probabilities > 0).tolist() == [True, True, True, True, False]
        assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-9])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-5.0, -7.0, -6.0]])
    assert Warp(SamplingParams(temperature), (), 3).probabilities(logits, ()).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_a_large_vocabulary_with_a_wide_nucleus() -> None:
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(1.0, top_p=0.9)
    ours = Warp(params, (), 50_000).probabilities(logits, ())
    theirs = torch.stack([transformers_probabilities(row.double(), [0], params) for row in logits])
    assert torch.equal(ours > 0, theirs > 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(bad: float) -> None:
    warp, logits = Warp(SamplingParams(1.0), (), 5), torch.zeros(3, 5)
    logits[1, 2] = bad
    assert warp.likeliest(logits, ()) == [0, NO_TOKEN, 0]
    assert len(warp.probabilities(logits, ())) == 1, "as far as they are sound"
    with pytest.raises(SlipstreamError, match="not finite numbers"):
        warp.probabilities(logits[1:], ())


def test_masked_logits_have_probability_zero() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    assert Warp(SamplingParams(0.5), (), 3).probabilities(logits, ()).tolist() == [[0.5, 0.0, 0.5]]
