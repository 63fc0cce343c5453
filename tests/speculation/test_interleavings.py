"""The protocol under every interleaving: the text equals plain decoding's, and the target never waits for nothing."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.errors import DraftFault, ProtocolViolation
from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.pacing import Fixed, SelfClocked, Sequential
from slipstream.speculation.protocol import Verdict
from tests.speculation.toys import Always, Message, Stage, measured_costs, new_stage

POLICIES = st.one_of(
    st.just(Fixed()),
    st.just(SelfClocked()),
    st.builds(Sequential, st.integers(1, 8)),
    st.builds(Always, st.integers(0, 16), st.integers(0, 16)),
)
COSTS = st.builds(
    measured_costs,
    st.sampled_from((0.5, 1.0, 3.0, 9.0, 25.0)),
    st.sampled_from((0.02, 0.5, 0.8, 0.99)),
    slope=st.sampled_from((0.0, 0.1)),
    restart_s=st.sampled_from((0.0, 0.2)),
)
STAGES = st.builds(
    new_stage,
    POLICIES,
    COSTS,
    max_window=st.integers(1, 16),
    vocab_size=st.sampled_from((2, 5, 50, 100_000)),
    salt=st.integers(0, 1000),
    max_new_tokens=st.integers(1, 60),
    gated=st.booleans(),
)
ROUND_S, HELD_S = st.sampled_from((0.1, 1.0, 3.0)), st.sampled_from((0.0, 0.0, 2.0))
FAULTS: dict[str, Callable[[Message, Stage], Message]] = {
    "future line": lambda message, stage: (stage.pipeline.epoch + 1, *message[1:]),
    "gap": lambda message, stage: (message[0], message[1] + 1, message[2]),
    "repeat": lambda message, stage: (message[0], message[1] - 1, message[2]),
    "too many": lambda message, stage: (*message[:2], message[2] * (stage.pipeline.max_window * 2 + 20)),
    "beyond the vocabulary": lambda message, stage: (*message[:2], (*message[2][1:], stage.pipeline.vocab_size)),
    "negative id": lambda message, stage: (*message[:2], (*message[2][1:], -1)),
    "empty": lambda message, stage: (*message[:2], ()),
}


def _goes_on(machine: "AnyInterleaving") -> bool:
    return machine.stage.finish_reason is None


def _has_draft(machine: "AnyInterleaving") -> bool:
    return machine.stage.draft is not None


def _has_mail(machine: "AnyInterleaving") -> bool:
    return machine.stage.draft is not None and bool(machine.stage.draft.outbox)


class AnyInterleaving(RuleBasedStateMachine):
    """Every event at every moment. After the end, events of the draft must be without effect."""

    @initialize(stage=STAGES)
    def start(self, stage: Stage) -> None:
        self.stage = stage
        self.heard: list[Message] = []

    @precondition(lambda self: bool(self.stage.passes))
    @rule(round_s=ROUND_S, held_s=HELD_S)
    def judge(self, round_s: float, held_s: float) -> None:
        self.stage.judge(round_s, held_s)

    @precondition(lambda self: _goes_on(self) and not _has_draft(self))
    @rule()
    def join(self) -> None:
        self.stage.join()

    @precondition(lambda self: self.stage.draft is not None and not self.stage.draft.ready)
    @rule()
    def ready(self) -> None:
        self.stage.ready()

    @precondition(lambda self: _goes_on(self) and self.stage.draft is not None and self.stage.draft.ready)
    @rule()
    def ready_again(self) -> None:
        with pytest.raises(DraftFault, match="second time"):
            self.stage.pipeline.on_draft_ready(0)
        self.stage.lose()

    @precondition(lambda self: self.stage.draft is not None and bool(self.stage.draft.inbox))
    @rule()
    def obey(self) -> None:
        assert self.stage.draft is not None
        self.stage.draft.obey()

    @precondition(_has_draft)
    @rule(agreements=st.lists(st.sampled_from((True, True, True, False)), min_size=1, max_size=20))
    def write(self, agreements: list[bool]) -> None:
        for agree in agreements:
            if self.stage.draft is not None and self.stage.draft.can_write:
                self.stage.write(agree=agree)

    @precondition(_has_mail)
    @rule()
    def deliver(self) -> None:
        assert self.stage.draft is not None
        self.heard.append(self.stage.draft.outbox[0])
        self.stage.deliver()

    @precondition(_has_mail)
    @rule(fault=st.sampled_from(sorted(FAULTS)))
    def deliver_garbled(self, fault: str) -> None:
        assert self.stage.draft is not None
        self.expect_fault(FAULTS[fault](self.stage.draft.outbox.popleft(), self.stage))

    @precondition(lambda self: self.stage.draft is not None and len(self.stage.draft.outbox) > 1)
    @rule()
    def deliver_out_of_order(self) -> None:
        assert self.stage.draft is not None
        if self.stage.draft.outbox[0][0] == self.stage.draft.outbox[1][0]:
            self.expect_fault(self.stage.draft.outbox[1])

    @precondition(lambda self: bool(self.heard))
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        self.expect_fault(data.draw(st.sampled_from(self.heard)))

    @precondition(_has_draft)
    @rule()
    def lose(self) -> None:
        self.stage.lose()

    @rule()
    def expire_hold(self) -> None:
        self.stage.expire_hold()

    @precondition(lambda self: not self.stage.passes)
    @rule()
    def unasked_verdict(self) -> None:
        with pytest.raises(ProtocolViolation):
            self.stage.pipeline.on_verdict(Verdict(0, 1))

    @invariant()
    def is_sound(self) -> None:
        self.stage.check()

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.stage.play_out()
            self.stage.check_lossless()

    def expect_fault(self, message: Message) -> None:
        """A message that no line of this draft can have sent is a fault, whichever line it names; the driver then drops
        the draft. Without a draft, and after the end, it is nothing."""
        pipeline = self.stage.pipeline
        if pipeline.draft_phase is not DraftPhase.ABSENT and _goes_on(self):
            with pytest.raises(DraftFault):
                pipeline.on_draft_tokens(*message)
            self.stage.lose()
        else:
            assert pipeline.on_draft_tokens(*message) == []


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, derandomize=True)
