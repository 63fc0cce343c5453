"""Windows and verdicts survive the wire, and what no peer could mean is refused."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ProtocolViolation
from slipstream.rpc.codec import finish_reason_number
from slipstream.rpc.session_codec import MAX_PASSES, judge_message, read_judge, read_target_event, target_event
from slipstream.rpc.v1 import target_pb2
from slipstream.sampling.params import Proposal
from slipstream.session_messages import Judgement, JudgeRequest, PassFacts
from slipstream.speculation.company import ALONE, Company
from slipstream.speculation.protocol import FinishReason, JudgeWindow, TokenTree, Verdict

uint32 = st.integers(0, 2**32 - 1)
text = st.text(max_size=20)
token_ids = st.lists(uint32, max_size=20).map(tuple)
floats32 = st.floats(0, 1, width=32)
proposals = st.lists(
    st.builds(Proposal, token_ids, st.lists(floats32, max_size=20).map(tuple)),
    max_size=4,
).map(tuple)


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 12)))]
    return TokenTree(tuple(draw(uint32) for _ in parents), tuple(parents))


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    verdict = Verdict(
        draw(uint32), draw(st.none() | uint32), draw(st.none() | st.sampled_from(FinishReason)), draw(text)
    )
    accepted = draw(token_ids)
    kind = draw(st.sampled_from(("chain", "tree", "drafted")))
    if kind == "chain":
        return verdict
    changes = {"path": accepted} if kind == "tree" else {"drafted": accepted}
    return Verdict(len(accepted), verdict.own_token, verdict.finish_reason, verdict.stop_string, **changes)


@given(token_ids, st.integers(1, MAX_PASSES), proposals)
def test_chains(window: tuple[int, ...], num_passes: int, drawn_from: tuple[Proposal, ...]) -> None:
    message = judge_message(JudgeWindow(window, num_passes), drawn_from)
    assert read_judge(over_the_wire(message).judge) == JudgeRequest(window, num_passes, drawn_from)


@given(trees())
def test_trees(tree: TokenTree) -> None:
    message = judge_message(JudgeWindow(tree.token_ids, 1, tree.parents))
    assert read_judge(over_the_wire(message).judge) == JudgeRequest(tree.token_ids, tree=tree)


@given(st.integers(1, 100), st.integers(1, 9))
def test_self_drafted_windows(num_passes: int, self_draft: int) -> None:
    for window in ((), (5, 6)):
        message = judge_message(JudgeWindow(window, num_passes, self_draft=self_draft))
        assert read_judge(over_the_wire(message).judge) == JudgeRequest(window, num_passes, self_draft=self_draft)


COMPANY = st.builds(Company, st.integers(1, 64), st.just(0.0) | st.floats(1e-6, 100), st.floats(0, 1))
FACTS = st.builds(PassFacts, st.floats(0, 100), uint32, st.floats(0, 100), COMPANY, st.floats(0, 100))


@given(verdicts(), st.lists(text, max_size=5), FACTS)
def test_verdicts(verdict: Verdict, pieces: list[str], facts: PassFacts) -> None:
    judgement = Judgement(verdict, tuple(pieces), facts)
    message = over_the_wire(target_event(judgement))
    assert read_target_event(message) == judgement
    assert message.verdict.finish_reason == finish_reason_number(verdict.finish_reason)
    message.verdict.ClearField("company")
    told = read_target_event(message)
    assert isinstance(told, Judgement) and told.facts.company == ALONE, "a target that says nothing of it"


@pytest.mark.parametrize(
    "company",
    [
        *(Company(8, plain_s, 0.001) for plain_s in (math.nan, math.inf, -1.0, 5e-324, 1e308)),
        *(Company(8, 0.1, row_s) for row_s in (math.nan, math.inf, -1e-9)),
        Company(2**31, 0.1, 0.001),
    ],
    ids=str,
)
def test_what_passes_cannot_cost_is_not_believed(company: Company) -> None:
    facts = PassFacts(0.1, company=company)
    told = read_target_event(over_the_wire(target_event(Judgement(Verdict(0, 5), ("a",), facts))))
    assert isinstance(told, Judgement) and told.facts.company == ALONE


@pytest.mark.parametrize(
    ("kept_s", "own_s"), [(0.0, 2.0), (0.5, 1.5), *((no_wait, 2.0) for no_wait in (2.5, -1.0, math.nan, math.inf))]
)
def test_a_round_is_counted_without_its_wait_for_others(kept_s: float, own_s: float) -> None:
    assert PassFacts(0.1, kept_s=kept_s).own_s(2.0) == own_s


@pytest.mark.parametrize(
    ("judge", "complaint"),
    [
        ({"num_passes": 0}, "1 to 1000000 passes"),
        ({"num_passes": MAX_PASSES + 1}, "1 to 1000000 passes"),
        ({"num_passes": 1, "window": [1, 2], "parents": [-1]}, "no tree"),
        ({"num_passes": 1, "window": [1, 2], "parents": [-1, 1]}, "no tree"),
        ({"num_passes": 1, "parents": [-1]}, "no tree"),
        ({"num_passes": 1, "window": [1], "parents": [-1], "self_draft": 2}, "takes no tree"),
        ({"num_passes": 1, "self_draft": 2000}, "at most 1024"),
        ({"num_passes": 1, "window": [1] * 257, "parents": [-1] * 257}, "257 nodes; at most 256"),
    ],
)
def test_windows_without_sense(judge: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolViolation, match=complaint):
        read_judge(target_pb2.Judge(**judge))


@pytest.mark.parametrize("tokens", [{"path": [0, 1]}, {"drafted": [5]}])
def test_verdicts_that_contradict_themselves(tokens: dict[str, Any]) -> None:
    with pytest.raises(ProtocolViolation, match="another number"):
        read_target_event(target_pb2.TargetEvent(verdict=target_pb2.Verdict(num_accepted=3, own_token=1, **tokens)))
