"""All that a draft can say is bounded by what it was asked: lines against a model that remembers every position."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import DraftFault, FaultKind
from slipstream.speculation.lines import FAULT_MEMORY_S, Line, Standing, TreeLine
from slipstream.speculation.methods import Shape
from slipstream.speculation.pacing import CostModel, Sequential
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import RestartLine, Verdict
from tests.speculation.toys import Always

VOCAB = 50


@dataclass
class Asked:
    """What was asked of one line: the positions it may write, and those it wrote."""

    begins: int
    write_until: int
    heard: list[int] = field(default_factory=list)


@dataclass
class Model:
    """Every line of a session, and which was heard last."""

    lines: dict[int, Asked] = field(default_factory=dict)
    last_heard: int = 0

    def may_say(self, epoch: int, position: int, num_tokens: int) -> bool:
        line = self.lines.get(epoch)
        if line is None or epoch < self.last_heard or not num_tokens:
            return False
        positions = list(range(position, position + num_tokens))
        allowed = list(range(line.begins + len(line.heard), line.write_until))
        return positions == allowed[:num_tokens]


BEGINS = st.tuples(st.just("begin"), st.integers(0, 6), st.integers(0, 4))
ADVANCES = st.tuples(st.just("advance"), st.integers(1, 4), st.just(0))
SAYS = st.tuples(st.just("say"), st.integers(-3, 1), st.integers(-1, 3))
LOSES = st.tuples(st.just("lose"), st.just(0), st.just(0))


@given(st.lists(st.one_of(BEGINS, ADVANCES, SAYS, SAYS, SAYS, LOSES), max_size=40), st.data())
def test_a_line_is_heard_once_in_order_and_to_its_limit(
    events: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    line, model = Line(), Model()
    num_committed = 0
    line.begin(5, 0)
    model.lines[line.epoch] = Asked(0, 5)
    for kind, one, other in events:
        match kind:
            case "begin":
                num_committed += other
                line.begin(num_committed + one, num_committed)
                model.lines[line.epoch] = Asked(num_committed, num_committed + one)
            case "advance":
                line.advance(line.write_until + one)
                model.lines[line.epoch].write_until += one
            case "lose":
                line.drop()
                line.begin(num_committed + 3, num_committed)
                model = Model({line.epoch: Asked(num_committed, num_committed + 3)})
            case _:
                epoch = line.epoch + one
                known = model.lines.get(epoch, Asked(0, 0))
                position = known.begins + len(known.heard) + data.draw(st.sampled_from((0, 0, 0, 1, -1)))
                tokens = [7] * (other + 1)
                if model.may_say(epoch, position, len(tokens)):
                    assert line.hear(epoch, position, tokens, (), VOCAB) is (epoch == line.epoch)
                    known.heard += tokens
                    model.last_heard = epoch
                else:
                    with pytest.raises(DraftFault):
                        line.hear(epoch, position, tokens, (), VOCAB)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_one_tree_a_line(steps: list[tuple[int, bool]]) -> None:
    line = TreeLine()
    line.begin(2, 0)
    may_come, last_heard = {line.epoch}, 0
    for back, begins in steps:
        if begins:
            line.begin(2, 0)
            may_come.add(line.epoch)
            continue
        epoch = line.epoch - back
        if epoch in may_come and epoch >= last_heard:
            assert line.hear(epoch, 0, (1, 2), (-1, 0), VOCAB) is (back == 0)
            may_come.discard(epoch)
            last_heard = epoch
        else:
            with pytest.raises(DraftFault):
                line.hear(epoch, 0, (1, 2), (-1, 0), VOCAB)


@pytest.mark.parametrize("tokens", [(VOCAB,), (-1,), (2**32 - 1,), ()])
def test_a_line_that_ended_is_read_no_less_strictly(tokens: tuple[int, ...]) -> None:
    line = Line()
    line.begin(5, 0)
    line.begin(8, 3)
    with pytest.raises(DraftFault) as caught:
        line.hear(1, 0, tokens, (), VOCAB)
    assert caught.value.kind is FaultKind.CONTENT
    assert not line.hear(1, 0, (1, 2, 3, 4, 5), (), VOCAB), "all that it was asked for may be on its way"
    with pytest.raises(DraftFault, match="nothing was to come") as caught:
        line.hear(1, 5, (6,), (), VOCAB)
    assert caught.value.kind is FaultKind.ORDER


def _pipeline_with_an_ended_line() -> Pipeline:
    """Line 1 wrote two tokens and died; line 2 lives."""
    pipeline = Pipeline(Always(0, 4), CostModel(), max_window=4, vocab_size=VOCAB)
    pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    pipeline.on_draft_tokens(1, 0, (5, 6))
    assert any(isinstance(action, RestartLine) for action in pipeline.on_verdict(Verdict(0, 7)))
    return pipeline


def test_nothing_is_learned_from_a_line_that_ended() -> None:
    pipeline = _pipeline_with_an_ended_line()
    before = pipeline.costs.draft_pass_s.value
    assert pipeline.on_draft_tokens(1, 2, (8,), pass_s=999.0) == []
    assert pipeline.costs.draft_pass_s.value == before
    pipeline.on_draft_tokens(2, 1, (8,), pass_s=0.25)
    assert pipeline.costs.draft_pass_s.value != before


def test_nothing_is_learned_from_a_lie() -> None:
    pipeline = _pipeline_with_an_ended_line()
    before = pipeline.costs.draft_pass_s.value
    for message in ((1, 1, (8,)), (1, 2, (8,) * 4), (2, 2, (8,)), (2, 1, (VOCAB,)), (3, 1, (8,))):
        with pytest.raises(DraftFault):
            pipeline.on_draft_tokens(*message, pass_s=999.0)
    assert pipeline.costs.draft_pass_s.value == before


def test_a_line_is_not_heard_behind_its_successor() -> None:
    pipeline = _pipeline_with_an_ended_line()
    pipeline.on_draft_tokens(2, 1, (8,))
    with pytest.raises(DraftFault, match="nothing was to come"):
        pipeline.on_draft_tokens(1, 2, (8,))


@pytest.mark.parametrize("shape", [Shape.CHAIN, Shape.TREE])
def test_tokens_come_after_ready_and_ready_comes_once(shape: Shape) -> None:
    pipeline = Pipeline(Sequential(3), CostModel(), max_window=4, vocab_size=VOCAB, shape=shape)
    pipeline.on_draft_joining()
    parents = (-1,) if shape is Shape.TREE else ()
    with pytest.raises(DraftFault, match="before it was ready"):
        pipeline.on_draft_tokens(1, 0, (5,), parents)
    pipeline.on_draft_lost()
    point = pipeline.on_draft_joining()
    pipeline.on_draft_ready(0)
    with pytest.raises(DraftFault, match="nothing was to come"):
        pipeline.on_draft_tokens(point.epoch - 1, 0, (5,), parents)
    with pytest.raises(DraftFault, match="second time"):
        pipeline.on_draft_ready(0)


def test_three_faults_and_a_draft_is_left_alone() -> None:
    now = 100.0
    standing = Standing(60.0, lambda: now)
    for _ in range(2):
        standing.fault()
        now += 1
        assert standing.left_s == 0
    standing.fault()
    assert standing.left_s == 60
    now += 60
    assert standing.left_s == 0
    standing.fault()
    assert standing.left_s == 60, "once more, and at once"
    now += FAULT_MEMORY_S + 1
    standing.fault()
    assert standing.left_s == 0, "old faults are forgotten"


def test_a_draft_that_may_always_come_back() -> None:
    standing = Standing(0.0, lambda: 5.0)
    for _ in range(9):
        standing.fault()
    assert standing.left_s == 0
