"""What the gateway keeps of a draft's proposals, and which ones it refuses before the target could see them."""

import math

import pytest

from slipstream.captioning.draft_link import Proposals
from slipstream.errors import DraftFault
from slipstream.rpc.v1 import common_pb2, draft_pb2


def _proposal(token: int, others: int = 1) -> common_pb2.Proposal:
    """The token and some others, equally likely."""
    token_ids = [token, *(10 + index for index in range(others))]
    return common_pb2.Proposal(token_ids=token_ids, probabilities=[1 / len(token_ids)] * len(token_ids))


def _message(position: int, *tokens: int) -> draft_pb2.DraftTokens:
    return draft_pb2.DraftTokens(position=position, token_ids=tokens, proposals=[_proposal(token) for token in tokens])


def _keeper(*, required: bool = True) -> Proposals:
    return Proposals(required=required, vocab_size=100)


def test_a_window_gets_those_of_its_positions() -> None:
    proposals = _keeper()
    for message in (_message(3, 1, 2), _message(5, 3), _message(6, 4, 5)):
        proposals.check(message)
        proposals.remember(message)
    assert [proposal.token_ids[0] for proposal in proposals.take(4, (2, 3, 4))] == [2, 3, 4]
    assert [proposal.token_ids[0] for proposal in proposals.take(7, (5,))] == [5]
    assert proposals.take(8, ()) == []


def test_a_new_line_knows_nothing_of_the_old_one() -> None:
    proposals = _keeper()
    proposals.remember(_message(3, 1, 2))
    proposals.forget()
    proposals.remember(_message(3, 8, 9))
    assert [proposal.token_ids[0] for proposal in proposals.take(3, (8, 9))] == [8, 9]


def test_where_none_are_required_none_are_kept() -> None:
    proposals = _keeper(required=False)
    proposals.check(draft_pb2.DraftTokens(token_ids=[1, 2]))
    proposals.check(_message(0, 1, 2))
    proposals.remember(_message(0, 1, 2))
    assert proposals.take(0, (1, 2)) == []


@pytest.mark.parametrize(
    ("token_ids", "probabilities", "complaint"),
    [
        ([5, 6], [1.0], "2 tokens and 1 probabilities"),
        ([], [], "does not have"),
        ([6, 7], [0.5, 0.5], "does not have"),
        ([5, 5], [0.5, 0.5], "twice"),
        ([5, 100], [0.5, 0.5], "outside the vocabulary"),
        ([5, 6], [0.5, 0.6], "add up to 1"),
        ([5, 6], [1.0, 0.0], "positive"),
        ([5, 6], [1.5, -0.5], "positive"),
        ([5, 6], [math.nan, 0.5], "positive"),
        ([5, 6], [math.inf, 0.5], "positive"),
    ],
)
def test_what_the_target_could_not_judge_is_a_fault(
    token_ids: list[int], probabilities: list[float], complaint: str
) -> None:
    proposal = common_pb2.Proposal(token_ids=token_ids, probabilities=probabilities)
    with pytest.raises(DraftFault, match=complaint):
        _keeper().check(draft_pb2.DraftTokens(token_ids=[5], proposals=[proposal]))


@pytest.mark.parametrize(("required", "num_proposals"), [(True, 0), (True, 1), (True, 3), (False, 1), (False, 3)])
def test_a_count_that_does_not_fit_is_a_fault(required: bool, num_proposals: int) -> None:
    message = draft_pb2.DraftTokens(token_ids=[5, 6], proposals=[_proposal(5)] * num_proposals)
    with pytest.raises(DraftFault, match=f"2 tokens with {num_proposals} proposals"):
        _keeper(required=required).check(message)
