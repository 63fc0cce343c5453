"""Hints beside a draft: whatever either says, the text is plain decoding's, and neither waits for the other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from slipstream.errors import InvalidRequest, ProtocolViolation
from slipstream.speculation.gate import Gate
from slipstream.speculation.hints.draft_tree import Candidate, TreeLimits, grow_tree
from slipstream.speculation.hints.index import HintIndex
from slipstream.speculation.hints.strategies import LineRecord, Resynchronising
from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.methods import HINT_DEPTH, get_method
from slipstream.speculation.pacing import CostModel, Policy, SelfClocked
from slipstream.speculation.pipeline import Pipeline
from slipstream.speculation.protocol import (
    Action,
    Commit,
    JudgeWindow,
    RestartLine,
    StopRule,
    TokenTree,
    Verdict,
    accept_tree,
    end_verdict,
)
from tests.speculation.test_interleavings import COSTS, POLICIES, AnyInterleaving
from tests.speculation.toys import EOS, Always, Stage, measured_costs
from tests.support.hint_schedules import LIES, Arrival, HintSchedule, ToyText, make_hint
from tests.support.plain_decoding import decode_plain


@dataclass
class Told:
    """What a target's drafter of hints knows of one session."""

    strategy: Resynchronising
    line: LineRecord = field(default_factory=LineRecord)
    num_told: int = 0


class HybridStage(Stage):
    """A stage whose target hangs hints beside the windows, through the functions that a real one uses."""

    hints: Told
    limits: TreeLimits
    self_draft = 0
    num_from_hints = num_from_draft = 0

    def begin_session(self) -> None:
        self.hints = Told(Resynchronising(self.pipeline.vocab_size))
        self.self_draft = 0

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, JudgeWindow):
                assert action.self_draft == HINT_DEPTH and not action.parents
                self.self_draft = action.self_draft
        super().carry_out(actions)

    def lose_target(self) -> None:
        self.begin_session()
        super().lose_target()

    def judge(self, round_s: float = 1.0, held_s: float = 0.0) -> None:
        if not self.self_draft:
            super().judge(round_s, held_s)
            return
        window = self.passes.popleft()
        rows = self._rows(window)
        path, own_token = accept_tree(rows, partial(self._choose, rows.token_ids)) if rows else ((), self._choose())
        token_ids = rows.token_ids if rows else ()
        verdict = end_verdict(token_ids, len(path), own_token, len(self.output), self.rule, path)
        drafted = tuple(token_ids[node] for node in verdict.path)
        verdict = Verdict(verdict.num_accepted, verdict.own_token, verdict.finish_reason, drafted=drafted)
        if verdict.finish_reason is not None:
            self.passes.clear()
        self.num_from_draft += verdict.num_of(window)
        self.num_from_hints += verdict.num_accepted - verdict.num_of(window)
        actions = self.pipeline.on_verdict(verdict, round_s, held_s, len(token_ids) - len(window))
        self.carry_out(actions)

    def _rows(self, window: tuple[int, ...]) -> TokenTree | None:
        room = self.rule.max_new_tokens - len(self.output) - 1
        depth = min(max(self.self_draft, len(window)), room)
        fresh = self.output[self.hints.num_told :]
        self.hints.strategy.commit(fresh)
        self.hints.line.learn(fresh)
        self.hints.num_told = len(self.output)
        line = window[:depth]
        survival = self.hints.line.begin(line) if line else 0.0
        limits = TreeLimits(depth, self.limits.max_rows, self.limits.pass_s, self.limits.as_chain, line, survival)
        rows = self.hints.strategy.propose(limits)
        if rows is not None:
            assert rows.token_ids[: len(line)] == line and len(rows) <= max(self.limits.max_rows, len(line))
            assert rows.is_chain or not self.limits.as_chain
        else:
            assert not line
        return rows

    def _choose(self, token_ids: Sequence[int] = (), row: int = 0, path: tuple[int, ...] = ()) -> int:
        return self.next_token([*self.output, *(token_ids[node] for node in path)])


def hybrid_stage(
    policy: Policy,
    costs: CostModel,
    *,
    max_window: int,
    vocab_size: int,
    salt: int,
    max_new_tokens: int,
    gated: bool = False,
    temperature: float = 0.0,
    max_rows: int = 24,
    slope: float = 0.0,
    as_chain: bool = False,
) -> HybridStage:
    gate = Gate(costs) if gated else None
    pipeline = Pipeline(policy, costs, max_window=max_window, vocab_size=vocab_size, gate=gate, hint_depth=HINT_DEPTH)
    model = ToyText(HintSchedule("hints", vocab_size, salt, temperature, max_new_tokens, 1, 1, 0.0))
    stage = HybridStage(pipeline, model.choose, StopRule((EOS,), max_new_tokens))
    stage.limits = TreeLimits(HINT_DEPTH, max_rows, lambda rows: 1.0 + slope * rows, as_chain)
    stage.begin_session()
    return stage


STAGES = st.builds(
    hybrid_stage,
    POLICIES,
    COSTS,
    max_window=st.integers(1, 16),
    vocab_size=st.sampled_from((2, 5, 40)),
    salt=st.integers(0, 1000),
    max_new_tokens=st.integers(1, 60),
    gated=st.booleans(),
    temperature=st.sampled_from((0.0, 0.7, 1.3)),
    max_rows=st.sampled_from((1, 3, 24)),
    slope=st.sampled_from((0.0, 0.02, 0.3)),
    as_chain=st.booleans(),
)


class AnyHybridInterleaving(AnyInterleaving):
    """Every event of a draft, at every moment, while true hints and lies arrive."""

    @initialize(stage=STAGES, lies=st.lists(st.sampled_from(LIES), max_size=2))
    def start(self, stage: HybridStage, lies: list[str]) -> None:
        self.stage = stage
        self.heard = []
        for lie in lies:
            self.hint(lie, 7)

    @rule(lie=st.sampled_from(LIES), seed=st.integers(0, 2**30))
    def hint(self, lie: str, seed: int) -> None:
        assert isinstance(self.stage, HybridStage)
        text, _ = decode_plain(self.stage.next_token, self.stage.rule)
        self.stage.hints.strategy.add(make_hint(Arrival(0, lie, seed), text, self.stage.pipeline.vocab_size))

    @rule()
    def lose_target(self) -> None:
        if self.stage.finish_reason is None:
            self.stage.lose_target()


TestAnyHybridInterleaving = AnyHybridInterleaving.TestCase
TestAnyHybridInterleaving.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)


# -- one thing at a time ----------------------------------------------------------------------------------------------


def text_of(stage: HybridStage) -> list[int]:
    return decode_plain(stage.next_token, stage.rule)[0]


def long_stage(policy: Policy, **changes: object) -> HybridStage:
    """A caption of 60 tokens that no end of text cuts short."""
    for salt in range(1000):
        stage = hybrid_stage(
            policy,
            measured_costs(5.0, 0.8),
            max_window=8,
            vocab_size=40,
            salt=salt,
            max_new_tokens=60,
            **changes,  # type: ignore[arg-type]
        )
        if len(text_of(stage)) == 60:
            return stage
    raise AssertionError("no text is long enough")


def write_all(stage: HybridStage) -> None:
    """The draft obeys, writes as far as it may, and all of it arrives."""
    assert stage.draft is not None
    while stage.draft.inbox:
        stage.draft.obey()
    while stage.draft.can_write:
        stage.write(agree=True)
    while stage.draft.outbox:
        stage.deliver()


def test_without_a_draft_hints_alone_save_passes() -> None:
    stage = long_stage(SelfClocked())
    stage.hints.strategy.add(text_of(stage))
    num_passes = 0
    while stage.finish_reason is None:
        stage.judge()
        num_passes += 1
    stage.check_lossless()
    assert num_passes < 10
    assert stage.pipeline.num_judged == 0, "what is counted is the draft's"


def test_where_no_hint_matches_the_draft_s_line_fills_the_window() -> None:
    """The hint knows the first half of the text, the draft all of it: each is counted where it helped."""
    stage = long_stage(Always(hold=4, cap=4))
    stage.hints.strategy.add(text_of(stage)[:30])
    stage.join()
    stage.ready()
    for _ in range(100):
        if stage.finish_reason is not None:
            break
        write_all(stage)
        stage.judge()
    stage.check_lossless()
    assert stage.num_from_hints > 10
    assert stage.pipeline.num_accepted >= stage.num_from_draft > 10


def test_while_hints_lead_nobody_waits_for_the_draft() -> None:
    stage = long_stage(Always(hold=4, cap=4))
    stage.hints.strategy.add(text_of(stage))
    stage.judge()
    stage.join()
    stage.ready()
    while stage.pipeline.draft_phase is DraftPhase.WRITING and stage.finish_reason is None:
        if stage.pipeline.holding:
            assert not stage.num_from_hints, "once a hint was right, passes start at once"
            stage.expire_hold()
        stage.judge()
    stage.check_lossless()
    assert stage.num_from_hints > 20


def test_a_line_that_foresaw_what_hints_gave_lives_on() -> None:
    pipeline = Pipeline(
        Always(hold=2, cap=2), measured_costs(5.0, 0.8), max_window=2, vocab_size=100, hint_depth=HINT_DEPTH
    )
    pipeline.on_verdict(Verdict(0, 1))
    pipeline.on_verdict(Verdict(0, 2), num_drafted=0)
    pipeline.on_draft_joining()
    for _ in range(3):
        pipeline.on_verdict(Verdict(0, 3), num_drafted=0)
    [restart, *_] = pipeline.on_draft_ready(2)
    assert isinstance(restart, RestartLine)
    pipeline.on_draft_tokens(pipeline.epoch, len(pipeline.committed), tuple(range(10, 18)))
    assert pipeline.on_verdict(Verdict(0, 10), num_drafted=0)[0] == Commit((10,), 0)
    epoch = pipeline.epoch
    actions = pipeline.on_verdict(Verdict(3, 14, drafted=(11, 12, 13)), num_drafted=1)
    assert actions[:2] == [Commit((11, 12, 13, 14), 3), JudgeWindow((15, 16), 1, self_draft=HINT_DEPTH)]
    assert pipeline.epoch == epoch and pipeline.num_accepted == 5, "of 10 to 14, three were compared outside a window"
    actions = pipeline.on_verdict(Verdict(2, 52, drafted=(50, 51)), num_drafted=9)
    restart = actions[1]
    assert isinstance(restart, RestartLine), "the line is dead"
    assert restart.suffix == (50, 51, 52) and restart.keep + 3 == len(pipeline.committed)
    with pytest.raises(ProtocolViolation):
        pipeline.on_verdict(Verdict(HINT_DEPTH + 3, 0, drafted=(1,) * (HINT_DEPTH + 3)))


def test_hints_are_hung_beside_a_line_while_they_pay() -> None:
    index = HintIndex((2,), 100)
    index.add([1, 2, 3, 4])
    index.add([1, 7])
    hints = [Candidate(1, 0.5, 0.9), Candidate(6, 0.4, 0.9)]
    free = grow_tree(index, hints, TreeLimits(8, 8, line=(1, 2, 9), line_survival=0.8))
    assert free is not None
    assert free.token_ids == (1, 2, 9, 3, 4, 7) and free.parents == (-1, 0, 1, 1, 3, 0)
    for limits in (
        TreeLimits(8, 3, line=(1, 2, 9), line_survival=0.8),
        TreeLimits(8, 8, lambda rows: 1.0 + rows, line=(1, 2, 9), line_survival=0.8),
        TreeLimits(8, 8, as_chain=True, line=(1, 2, 9), line_survival=0.8),
        TreeLimits(8, 1, line=(1, 2, 9)),
    ):
        tree = grow_tree(index, hints, limits)
        assert tree is not None and tree.token_ids == (1, 2, 9) and tree.is_chain
    assert grow_tree(index, [], TreeLimits(2, 8, line=(1, 2, 9))).token_ids == (1, 2)  # type: ignore[union-attr]


def test_what_a_draft_s_lines_are_worth_is_learned() -> None:
    record = LineRecord()
    first = record.begin((1, 2, 3))
    for _ in range(50):
        record.begin((1, 2, 3))
        record.learn((4,))
    assert record.begin((1,)) < 0.1 < first
    for _ in range(200):
        record.begin((1, 2, 3))
        record.learn((1, 2, 3, 4))
    assert record.begin((1,)) > 0.9
    record.learn(())


def test_the_draft_s_windows_stay_chains() -> None:
    with pytest.raises(InvalidRequest, match="hints_draft"):
        get_method("hints_draft").changed(None, "sequential", "tree", False, None)
