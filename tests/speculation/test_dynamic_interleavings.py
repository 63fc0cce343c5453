"""Dynamic trees under every interleaving, with lying chances, parents and widths: the text is plain decoding's."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from slipstream.errors import DraftFault
from slipstream.speculation.pacing import SelfClocked
from slipstream.speculation.trees.confidence import Confident
from slipstream.speculation.trees.growth import GROWTHS
from tests.speculation.dynamic_toys import DynamicStage, new_dynamic_stage, tree_costs
from tests.speculation.toys import Always

POLICIES = st.one_of(
    st.just(Confident()), st.just(SelfClocked()), st.builds(Always, st.integers(0, 16), st.integers(1, 16))
)
STAGES = st.builds(
    new_dynamic_stage,
    POLICIES,
    st.builds(
        tree_costs,
        st.sampled_from((0.5, 3.0, 25.0)),
        st.sampled_from((0.02, 0.5, 0.99)),
        slope=st.sampled_from((0.0, 0.1)),
    ),
    shape=st.sampled_from(sorted(GROWTHS)),
    max_window=st.integers(1, 16),
    vocab_size=st.sampled_from((2, 5, 50, 100_000)),
    salt=st.integers(0, 1000),
    max_new_tokens=st.integers(1, 60),
    gated=st.booleans(),
)
CHANCES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4)


@dataclass(frozen=True)
class Read:
    """Which open node is read, at which rank its candidates have the right token, and how many there are."""

    place: int
    rank: int
    width: int


READS = st.lists(st.builds(Read, st.integers(0, 50), st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=6)


class AnyTree(RuleBasedStateMachine):
    """Every event at every moment."""

    @initialize(stage=STAGES)
    def start(self, stage: DynamicStage) -> None:
        self.stage = stage

    @precondition(lambda self: bool(self.stage.passes))
    @rule(round_s=st.sampled_from((0.1, 1.0, 3.0)), held_s=st.sampled_from((0.0, 2.0)))
    def judge(self, round_s: float, held_s: float) -> None:
        self.stage.judge(round_s, held_s)

    @precondition(lambda self: self.stage.draft is None and self.stage.finish_reason is None)
    @rule()
    def join(self) -> None:
        self.stage.join()

    @precondition(lambda self: self.stage.draft is not None and not self.stage.draft.ready)
    @rule()
    def ready(self) -> None:
        self.stage.ready()

    @precondition(lambda self: self.stage.draft is not None and bool(self.stage.draft.inbox))
    @rule()
    def obey(self) -> None:
        assert self.stage.draft is not None
        self.stage.draft.obey()

    @precondition(lambda self: self.stage.draft is not None)
    @rule(reads=READS, chances=CHANCES)
    def write(self, reads: list[Read], chances: list[float]) -> None:
        """Of each node once, in one message; all of its candidates by the widest read."""
        draft = self.stage.draft
        assert draft is not None
        width = max(read.width for read in reads)
        open_nodes = draft.may_read(width * len(reads))
        chosen = {open_nodes[read.place % len(open_nodes)]: read.rank for read in reads if open_nodes}
        if chosen:
            self.stage.write(list(chosen), list(chosen.values()), width, chances)

    @precondition(lambda self: self.stage.draft is not None and bool(self.stage.draft.outbox))
    @rule()
    def deliver(self) -> None:
        self.stage.deliver()

    @precondition(lambda self: self.stage.draft is not None and bool(self.stage.draft.outbox))
    @rule(data=st.data())
    def deliver_lies(self, data: st.DataObject) -> None:
        """Any numbers in the place of a message's: it is taken, or it is a fault and the draft is dropped."""
        assert self.stage.draft is not None
        epoch, first, tokens, parents, pass_s, chances = self.stage.draft.outbox.popleft()
        near = st.integers(-3, 3)
        lie = (
            epoch + data.draw(st.sampled_from((0, 0, 0, -1, 1))),
            first + data.draw(st.sampled_from((0, 0, 0, -1, 1))),
            tuple(data.draw(st.lists(st.integers(-1, self.stage.pipeline.vocab_size), max_size=6)) or tokens),
            tuple(parent + data.draw(near) for parent in parents),
            pass_s,
            tuple(data.draw(st.lists(st.floats(), max_size=6)) if data.draw(st.booleans()) else chances),
        )
        try:
            actions = self.stage.pipeline.on_draft_tokens(*lie)
        except DraftFault:
            self.stage.lose()
            return
        self.stage.carry_out(actions)
        if (lie[:4], lie[5]) != ((epoch, first, tokens, parents), chances):  # what it says from now on fits no more
            self.stage.lose()

    @precondition(lambda self: self.stage.draft is not None)
    @rule()
    def lose(self) -> None:
        self.stage.lose()

    @rule()
    def expire_hold(self) -> None:
        self.stage.expire_hold()

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        stage = self.stage
        while stage.finish_reason is None:
            if stage.passes:
                stage.judge()
            elif stage.draft is not None:
                stage.lose()
        stage.check_lossless()


TestAnyTree = AnyTree.TestCase
TestAnyTree.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
