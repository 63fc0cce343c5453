"""Windows judged by each rule, and proposals that no honest draft could have sent."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.sampling.noise import Races
from slipstream.sampling.params import Proposal, SamplingParams
from slipstream.sampling.sampler import MAX_PROPOSAL_TOKENS, DraftSampler, TargetSampler, read_proposal, residual
from tests.sampling.statistics import P_FLOOR, chi_square_tail, fit

VOCAB = 12
HOT = SamplingParams(temperature=1.0, seed=5)
COUNTED = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
REJECTION = SamplingParams(temperature=1.0, seed=5, rule="rejection")


def some_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def written(draft: DraftSampler, logits: Tensor, committed: list[int]) -> tuple[list[int], list[Proposal]]:
    """A window with one token for each row of logits."""
    window: list[int] = []
    proposals = []
    for row in logits:
        token, proposal = draft.choose(row, [*committed, *window])
        window.append(token)
        proposals.append(proposal)
    return window, [proposal for proposal in proposals if proposal is not None]


# -- greedy and coupled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.5), COUNTED])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_window_is_judged_as_one_token_at_a_time(params: SamplingParams, temperature: float) -> None:
    params = replace(params, temperature=temperature, top_k=8, min_p=0.05, seed=3)
    sampler, committed, logits = TargetSampler(params, (0, 1), VOCAB), [4, 4, 2], some_logits(20)
    text = list(committed)
    for row in logits:
        num_accepted, token = sampler.judge(row[None], text, ())
        assert num_accepted == 0
        text.append(token)
    choices = text[3:]
    assert sampler.judge(logits, committed, choices[:19]) == (19, choices[19])
    for wrong in (0, 7, 8, 18):
        window = [*choices[:wrong], (choices[wrong] + 1) % VOCAB, *choices[wrong + 1 : 19]]
        assert sampler.judge(logits, committed, window) == (wrong, choices[wrong])


def test_a_rejected_window_leaves_nothing_behind() -> None:
    sampler = TargetSampler(SamplingParams(1.0, repetition_penalty=3.0), (0,), VOCAB)
    logits = some_logits(5)
    before = sampler.judge(logits[:1], [1], ())
    sampler.judge(logits, [1], [9, 8, 7, 6])
    assert sampler.judge(logits[:1], [1], ()) == before


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=2.0), COUNTED, HOT])
def test_a_draft_that_knows_the_target_is_always_right(params: SamplingParams) -> None:
    logits = some_logits(40)
    window, proposals = written(DraftSampler(params, (3,), VOCAB), logits[:-1], [1, 2])
    assert not proposals
    assert TargetSampler(params, (3,), VOCAB).judge(logits, [1, 2], window)[0] == 39


@pytest.mark.parametrize("vocab", [VOCAB, 70_000], ids=["numbers are kept", "numbers are made anew"])
@pytest.mark.parametrize("temperature", [1e-308, 0.1, 1.0, 30.0])
def test_a_race_by_logarithms_has_the_winner_of_the_races_by_weights(temperature: float, vocab: int) -> None:
    params = SamplingParams(temperature=temperature, seed=5)
    assert params.draws_from_all and not replace(params, top_p=0.5).draws_from_all
    assert not replace(params, min_p=0.5).draws_from_all
    logits = some_logits(20, vocab=vocab)
    logits[:, 3] = -torch.inf
    window, _ = written(DraftSampler(params, (), vocab), logits, [1, 2])
    target = TargetSampler(params, (), vocab)
    assert window == [target.judge(row[None], [1, 2, *window[:n]], ())[1] for n, row in enumerate(logits)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_told(bad: float) -> None:
    for logits in (torch.full((VOCAB,), -torch.inf), some_logits(1)[0].index_fill(0, torch.tensor([3]), bad)):
        for params in (SamplingParams(), HOT, replace(HOT, top_p=0.5), REJECTION):
            with pytest.raises(SlipstreamError, match="not finite"):
                DraftSampler(params, (), VOCAB).choose(logits, ())


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.3), COUNTED, HOT, REJECTION])
def test_logits_behind_a_rejection_may_be_anything(params: SamplingParams) -> None:
    """Plain decoding never sees them: only who accepts the tokens before them is told."""
    logits, window = some_logits(4), list[int]()
    target = TargetSampler(params, (), VOCAB)
    for row in logits[:3]:
        window.append(target.judge(row[None], window, ())[1])
    first, second = ((token + 1) % VOCAB for token in window[:2])
    logits[2:] = torch.nan
    assert target.judge(logits, (), [first, 0, 0]) == (0, window[0])
    assert target.judge(logits, (), [window[0], second, 0]) == (1, window[1])
    with pytest.raises(SlipstreamError, match="not finite"):
        target.judge(logits, (), window)


def test_greedy_is_the_argmax() -> None:
    logits = some_logits(3)
    choices = logits.argmax(dim=-1).tolist()
    assert TargetSampler(SamplingParams(), (), VOCAB).judge(logits, (), choices[:2]) == (2, choices[2])
    assert DraftSampler(SamplingParams(rule="rejection"), (), VOCAB).choose(logits[0], ()) == (choices[0], None)


def test_rows_and_window_must_fit() -> None:
    with pytest.raises(ValueError, match="needs 3 rows of logits, not 2"):
        TargetSampler(HOT, (), VOCAB).judge(some_logits(2), (), (1, 2))


def test_choices_are_the_same_with_and_without_a_table() -> None:
    """Small vocabularies keep tables of noise, large ones compute what they need: tokens that truncation leaves."""
    weights = torch.zeros(1, 100_000, dtype=torch.float64)
    weights[0, [3, 17, 900, 999]] = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    ids = torch.tensor([3, 17, 900, 999])
    for position in range(200):
        (large,) = Races(1, 100_000).choose(weights, position)
        (small,) = Races(1, 1000).choose(weights[:, :1000], position)
        among = Races(1, 1000).choose_among(ids, weights[0, ids], position)
        assert large == small == int(ids[among])


def test_tables_are_forgotten_and_made_again() -> None:
    races, fresh = Races(2, VOCAB), Races(2, VOCAB)
    weights = some_logits(3).double().softmax(dim=-1)
    first = races.choose(weights, 30)
    for position in range(0, 1000, 25):
        races.choose(weights, position)
    assert races.choose(weights, 30) == first == fresh.choose(weights, 30)


# -- rejection --------------------------------------------------------------------------------------------------------


def test_equal_distributions_are_always_accepted() -> None:
    logits = some_logits(40)
    window, proposals = written(DraftSampler(REJECTION, (), VOCAB), logits[:-1], [1])
    assert TargetSampler(REJECTION, (), VOCAB).judge(logits, [1], window, proposals)[0] == 39


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**62), rule=st.sampled_from(("coupled", "rejection")), rows=st.integers(1, 10))
def test_a_token_of_probability_zero_never_becomes_text(seed: int, rule: str, rows: int) -> None:
    params = SamplingParams(1.5, top_k=3, seed=seed, rule=rule)
    target_logits, draft_logits = some_logits(rows + 1, seed % 97), some_logits(rows, seed % 89 + 100)
    window, proposals = written(DraftSampler(params, (), VOCAB), draft_logits, [])
    num_accepted, token = TargetSampler(params, (), VOCAB).judge(target_logits, [], window, proposals)
    allowed = [set(row.topk(3).indices.tolist()) for row in target_logits]
    for index, committed in enumerate((*window[:num_accepted], token)):
        assert committed in allowed[index]


def test_a_rejected_token_never_takes_its_own_place() -> None:
    target, draft = some_logits(1), some_logits(1, 1)
    for seed in range(500):
        params = SamplingParams(1.0, seed=seed, rule="rejection")
        window, proposals = written(DraftSampler(params, (), VOCAB), draft, [])
        num_accepted, token = TargetSampler(params, (), VOCAB).judge(torch.cat([target, target]), [], window, proposals)
        assert num_accepted == 1 or token != window[0]


def test_one_token_has_the_targets_distribution_and_is_accepted_as_often_as_theory_says() -> None:
    target_logits, draft_logits = some_logits(1), some_logits(1, 1)
    target, draft = target_logits[0].double().softmax(-1), draft_logits[0].double().softmax(-1)
    exact = dict(enumerate(target.tolist()))
    overlap = float(torch.minimum(target, draft).sum())
    for rule, low, high in (("rejection", overlap, overlap), ("coupled", overlap / (2 - overlap), overlap)):
        tokens, num_accepted = [], 0
        for seed in range(500):
            params = SamplingParams(1.0, seed=seed, rule=rule)
            window, proposals = written(DraftSampler(params, (), VOCAB), draft_logits, [])
            logits = target_logits.expand(2, -1)
            accepted, own_token = TargetSampler(params, (), VOCAB).judge(logits, [], window, proposals)
            tokens.append(window[0] if accepted else own_token)
            num_accepted += accepted
        assert chi_square_tail(*fit(tokens, exact)) > P_FLOOR
        error = 4 * math.sqrt(overlap * (1 - overlap) / 500)
        assert low - error <= num_accepted / 500 <= high + error


def test_a_proposal_is_what_the_draft_draws_from() -> None:
    logits, counts = some_logits(1)[0], Counter[int]()
    for seed in range(600):
        token, proposal = DraftSampler(SamplingParams(1.0, top_p=0.8, seed=seed, rule="rejection"), (), VOCAB).choose(
            logits, ()
        )
        assert proposal is not None
        counts[token] += 1
    assert proposal is not None
    exact = dict(zip(proposal.token_ids, proposal.probabilities, strict=True))
    assert len(exact) < VOCAB
    assert all(probability == float(torch.tensor(probability)) for probability in proposal.probabilities)
    assert chi_square_tail(*fit(list(counts.elements()), exact)) > P_FLOOR


def test_a_wide_distribution_is_sent_in_part() -> None:
    sampler = DraftSampler(SamplingParams(100.0, rule="rejection"), (), 5000)
    token, proposal = sampler.choose(some_logits(1, vocab=5000)[0], ())
    assert proposal is not None and len(proposal.token_ids) == MAX_PROPOSAL_TOKENS
    assert read_proposal(proposal, token, 5000) is not None


GOOD = Proposal((1, 2, 3), (0.5, 0.25, 0.25))
BAD = {
    "empty": Proposal((), ()),
    "too few probabilities": Proposal((1, 2, 3), (0.5, 0.5)),
    "token absent": Proposal((2, 3), (0.5, 0.5)),
    "repeated": Proposal((1, 1, 3), (0.5, 0.25, 0.25)),
    "outside the vocabulary": Proposal((1, 2, VOCAB), (0.5, 0.25, 0.25)),
    "negative id": Proposal((1, 2, -1), (0.5, 0.25, 0.25)),
    "NaN": Proposal((1, 2, 3), (0.5, float("nan"), 0.25)),
    "infinite": Proposal((1, 2, 3), (0.5, float("inf"), 0.25)),
    "negative": Proposal((1, 2, 3), (1.0, 0.25, -0.25)),
    "zero": Proposal((1, 2, 3), (0.75, 0.25, 0.0)),
    "sums to more": Proposal((1, 2, 3), (0.5, 0.5, 0.5)),
    "sums to less": Proposal((1, 2, 3), (0.5, 0.2, 0.2)),
}


@pytest.mark.parametrize("proposal", BAD.values(), ids=BAD)
def test_garbage_is_judged_by_the_targets_own_choice(proposal: Proposal) -> None:
    assert read_proposal(proposal, 1, VOCAB) is None
    logits = some_logits(3)
    for seed in range(20):
        params = SamplingParams(2.0, seed=seed, rule="rejection")
        own = TargetSampler(SamplingParams(2.0, seed=seed), (), VOCAB).judge(logits, (), (1, 2))
        assert TargetSampler(params, (), VOCAB).judge(logits, (), (1, 2), (proposal,)) == own
        assert TargetSampler(params, (), VOCAB).judge(logits, (), (1, 2)) == own


def test_a_proposal_with_sense_is_read_exactly() -> None:
    draft = read_proposal(GOOD, 1, VOCAB)
    assert draft is not None
    assert draft.tolist() == [0, 0.5, 0.25, 0.25, *[0] * (VOCAB - 4)]


def test_what_rounding_leaves_of_equal_distributions() -> None:
    target = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert residual(target, target) is target
    assert residual(target, torch.tensor([0.9, 0.1], dtype=torch.float64)).tolist() == [0.0, 0.4]


# -- how sure a draft is of what it names -----------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(20))
def test_rule_rejection_tells_the_largest_chances_never_that_of_the_drawn_token(position: int) -> None:
    (logits,), text = some_logits(1, seed=position), [1] * position
    chances = logits.softmax(-1)
    best = [pytest.approx(each, rel=1e-6) for each in chances.sort(descending=True).values[:3].tolist()]
    (coupled, own), (drawn, told) = (
        DraftSampler(rule, (), VOCAB).candidates(logits, text, 3) for rule in (HOT, REJECTION)
    )
    assert drawn == coupled and drawn[0] == DraftSampler(REJECTION, (), VOCAB).choose(logits, text)[0]
    assert own == [pytest.approx(each, rel=1e-6) for each in chances[coupled].tolist()]
    assert told == best


def test_what_is_told_differs_from_the_chance_of_what_is_drawn() -> None:
    differ = 0
    for position in range(20):
        (logits,) = some_logits(1, seed=position)
        drawn, told = DraftSampler(REJECTION, (), VOCAB).candidates(logits, [1] * position, 3)
        differ += told != [pytest.approx(each, rel=1e-6) for each in logits.softmax(-1)[drawn].tolist()]
    assert differ > 10
