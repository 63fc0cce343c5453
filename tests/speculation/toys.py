"""A toy target, a toy draft and a stage that plays both against a real `Pipeline`, checking every action it takes.

Messages travel in order and wait in `inbox` and `outbox` until the test delivers them, so a test is an interleaving.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from slipstream.speculation.company import ALONE, Company
from slipstream.speculation.gate import Gate
from slipstream.speculation.lines import DraftPhase
from slipstream.speculation.pacing import CostModel, DecayedMean, Moment, Policy, WindowCosts, WindowPlan
from slipstream.speculation.pipeline import MAX_DEBT, Pipeline
from slipstream.speculation.protocol import (
    Action,
    AdvanceLine,
    Commit,
    Finish,
    FinishReason,
    JudgeWindow,
    RestartLine,
    StopRule,
    TokenTree,
    Verdict,
    accept_tree,
    end_verdict,
    judge_window,
)
from tests.support.plain_decoding import NextToken, decode_plain

EOS = 0
Message = tuple[int, int, tuple[int, ...]]
"""Epoch, position, tokens."""


def toy_target(vocab_size: int, salt: int) -> NextToken:
    """A deterministic greedy model that looks at the length and the last three tokens."""

    def next_token(output: Sequence[int]) -> int:
        state = salt * 2654435761 + len(output) * 40503
        for token in output[-3:]:
            state = (state * 31 + token * 97 + 11) % 1_000_003
        return (state >> 4) % vocab_size

    return next_token


def measured_costs(
    speed_ratio: float, tau: float, *, slope: float = 0.0, restart_s: float = 0.0, num_sessions: int = 1
) -> CostModel:
    """A cost model that has measured T_p(0) = 1, T_p(k) = 1 + slope k, T_q = 1 / speed_ratio and tau, always in the
    company of as many sessions."""
    window_costs = WindowCosts(plain=DecayedMean(1.0, 1.0))
    company = Company(num_sessions, 1.0, slope) if num_sessions > 1 else ALONE
    for _ in range(200):
        for window_len in (1, 16):
            window_costs.observe(window_len, 1.0 + slope * window_len, company)
    costs = CostModel(window_costs, DecayedMean(1 / speed_ratio, 1.0), DecayedMean(restart_s, 1.0))
    costs._accepted, costs._judged = tau, 1.0
    return costs


@dataclass(frozen=True)
class Always:
    """The same plan whatever happens."""

    writes_ahead: ClassVar[bool] = True
    hold: int
    cap: int

    def plan(self, moment: Moment, costs: CostModel) -> WindowPlan:
        return WindowPlan(min(self.hold, moment.max_window), min(self.cap, moment.max_window))


@dataclass
class ToyDraft:
    """Keeps its own output, obeys its instructions in order, and writes up to its limit."""

    output: list[int]
    epoch: int
    write_until: int
    chunk: int
    ready: bool = False
    inbox: deque[tuple[RestartLine | AdvanceLine, list[int]]] = field(default_factory=deque)
    """Each instruction with the committed text when it was given."""
    outbox: deque[Message] = field(default_factory=deque)
    num_sent: int = 0
    """Output tokens that were sent or need not be."""

    def obey(self) -> None:
        instruction, committed = self.inbox.popleft()
        if isinstance(instruction, RestartLine):
            assert instruction.epoch > self.epoch
            assert instruction.keep <= self.num_sent, "tokens that were never sent cannot have been judged"
            self.output = [*self.output[: instruction.keep], *instruction.suffix]
            assert self.output == committed
            self.epoch, self.chunk, self.num_sent = instruction.epoch, instruction.first_chunk, len(self.output)
            assert 1 <= self.chunk <= max(instruction.write_until - len(self.output), 1)
        else:
            assert instruction.epoch == self.epoch
            assert instruction.write_until > self.write_until
        self.write_until = instruction.write_until

    @property
    def may_ever_write(self) -> bool:
        """With all it has been told."""
        if not self.inbox:
            return len(self.output) < self.write_until
        last, committed = self.inbox[-1]
        return isinstance(last, AdvanceLine) or len(committed) < last.write_until

    @property
    def can_write(self) -> bool:
        return self.ready and len(self.output) < self.write_until

    def write(self, token: int) -> None:
        self.output.append(token)
        if len(self.output) - self.num_sent >= self.chunk:
            self.outbox.append((self.epoch, self.num_sent, tuple(self.output[self.num_sent :])))
            self.num_sent, self.chunk = len(self.output), 1


class Played:
    """A caption that has just been sent to a toy target: the pipeline that drives it, and the text so far."""

    def __init__(self, pipeline: Pipeline, next_token: NextToken, rule: StopRule) -> None:
        self.pipeline = pipeline
        self.next_token = next_token
        self.rule = rule
        self.output: list[int] = []
        self.finish_reason: FinishReason | None = None

    def tree_verdict(self, window: tuple[int, ...], parents: tuple[int, ...]) -> Verdict:
        """The target's, over nodes that each follow another one."""
        path, own = accept_tree(
            TokenTree(window, parents), lambda _, nodes: self.next_token([*self.output, *(window[n] for n in nodes)])
        )
        return end_verdict(window, len(path), own, len(self.output), self.rule, path)

    def chain_verdict(self, window: tuple[int, ...]) -> Verdict:
        """The target's, over tokens that follow each other."""
        choices = [self.next_token([*self.output, *window[:index]]) for index in range(len(window) + 1)]
        return judge_window(window, choices, len(self.output), self.rule)

    def check_lossless(self) -> None:
        assert self.finish_reason is not None
        assert (self.output, self.finish_reason) == decode_plain(self.next_token, self.rule)


class Stage(Played):
    """Drives a pipeline the way the gateway does and checks what it does."""

    def __init__(self, pipeline: Pipeline, next_token: NextToken, rule: StopRule) -> None:
        super().__init__(pipeline, next_token, rule)
        self.draft: ToyDraft | None = None
        self.passes: deque[tuple[int, ...]] = deque([()])
        self.rested = False
        """The draft's line may not write, or may only just again."""
        self.heard: list[int] = []
        """What the draft's output is as far as the pipeline can know."""

    @property
    def most_debt(self) -> int:
        """Tokens behind the target at which a line is restarted."""
        return MAX_DEBT if self.pipeline.policy.writes_ahead else 1

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            assert self.finish_reason is None, f"{action} after the end"
            match action:
                case JudgeWindow(window, num_passes):
                    assert not self.passes, "one window at a time"
                    assert len(window) <= self.pipeline.max_window
                    assert num_passes >= 1
                    assert list(window) == self.heard[len(self.output) :][: len(window)]
                    if isinstance(self.pipeline.policy, Always):
                        assert len(window) <= self.pipeline.policy.cap
                    self.passes.extend([window, *[()] * (num_passes - 1)])
                case RestartLine() | AdvanceLine():
                    assert self.draft is not None
                    phase = DraftPhase.RESTING if self.pipeline.gated else DraftPhase.WRITING
                    assert self.pipeline.draft_phase is phase
                    if isinstance(action, RestartLine):
                        assert action.may_write != self.pipeline.gated
                        self.check_restart(action)
                    self.draft.inbox.append((action, list(self.pipeline.committed)))
                case Commit(tokens, num_from_draft):
                    assert num_from_draft <= len(tokens)
                    self.output.extend(tokens)
                case Finish(reason):
                    self.finish_reason = reason
        self.check()

    def check_restart(self, restart: RestartLine) -> None:
        """A line ends for two reasons only, or to rest and after it; the draft keeps all that was right."""
        differs = [ours != theirs for ours, theirs in zip(self.output, self.heard, strict=False)]
        died = any(differs)
        assert died or self.rested or not restart.may_write or len(self.output) - len(self.heard) >= self.most_debt
        num_right = differs.index(True) if died else len(self.heard)
        assert restart.keep == (num_right if restart.may_write else min(num_right, len(self.output) - 1))
        self.rested = not restart.may_write
        self.heard = list(self.output)

    def check(self) -> None:
        assert self.output == self.pipeline.committed
        assert self.pipeline.finish_reason is self.finish_reason
        if self.finish_reason is not None:
            assert not self.pipeline.holding
            return
        if self.pipeline.draft_phase is DraftPhase.WRITING:
            assert self.heard[: len(self.output)] == self.output[: len(self.heard)], "a dead line lives on"
            assert len(self.output) - len(self.heard) < self.most_debt
        if self.pipeline.draft_phase is DraftPhase.RESTING:
            assert self.pipeline.gated
            assert self.draft is not None and not self.draft.may_ever_write
        assert self.pipeline.holding == (not self.passes)
        if self.pipeline.holding:
            assert self.pipeline.draft_phase is DraftPhase.WRITING
            assert self.draft is not None
            assert self.pipeline._plan().hold > self.pipeline.num_pending
            assert self.draft.inbox or self.draft.outbox or self.draft.can_write, "nobody is going to act"

    def judge(self, round_s: float = 1.0, held_s: float = 0.0) -> None:
        """The target runs its next pass, and its verdict arrives."""
        verdict = self.chain_verdict(self.passes.popleft())
        if verdict.finish_reason is not None:
            self.passes.clear()
        self.carry_out(self.pipeline.on_verdict(verdict, round_s, held_s))

    def join(self) -> None:
        point = self.pipeline.on_draft_joining()
        committed = list(point.committed)
        assert committed == self.output
        assert 1 <= point.first_chunk <= max(point.write_until - len(committed), 1)
        assert (point.write_until == len(committed)) == self.pipeline.gated
        self.rested = self.pipeline.gated
        self.heard = list(committed)
        self.draft = ToyDraft(committed, point.epoch, point.write_until, point.first_chunk, num_sent=len(committed))

    def ready(self) -> None:
        assert self.draft is not None
        self.draft.ready = True
        self.carry_out(self.pipeline.on_draft_ready(len(self.draft.output)))

    def write(self, *, agree: bool) -> None:
        assert self.draft is not None
        token = self.next_token(self.draft.output)
        self.draft.write(token if agree else (token + 1) % self.pipeline.vocab_size)

    def deliver(self) -> None:
        assert self.draft is not None
        message = self.draft.outbox.popleft()
        if message[0] == self.pipeline.epoch and self.draft.ready:
            self.heard.extend(message[2])
        self.carry_out(self.pipeline.on_draft_tokens(*message))

    def lose(self) -> None:
        self.draft = None
        self.heard.clear()
        self.carry_out(self.pipeline.on_draft_lost())

    def lose_target(self) -> None:
        """Another one begins, and answers its prefill when it has caught up with the text."""
        self.draft = None
        self.heard.clear()
        self.passes = deque([()])
        self.pipeline.on_target_lost()

    def expire_hold(self) -> None:
        holding = self.pipeline.holding
        actions = self.pipeline.on_hold_expired()
        assert any(isinstance(action, JudgeWindow) for action in actions) == holding
        self.carry_out(actions)

    def play_out(self) -> None:
        """Ends the caption without another loss or hold expiry; the draft, if there is one, is honest."""
        for _ in range(100 * self.rule.max_new_tokens):
            if self.finish_reason is not None:
                return
            draft = self.draft
            if draft is not None and not draft.ready:
                self.ready()
            elif draft is not None and draft.outbox:
                self.deliver()
            elif draft is not None and draft.inbox:
                draft.obey()
            elif draft is not None and draft.can_write:
                self.write(agree=True)
            else:
                assert self.passes, "deadlock: the target waits for a draft that may not write"
                self.judge()
        raise AssertionError("the caption does not end")


def new_stage(
    policy: Policy,
    costs: CostModel,
    *,
    max_window: int,
    vocab_size: int,
    salt: int,
    max_new_tokens: int,
    gated: bool = False,
) -> Stage:
    """A caption that has just been sent to the target."""
    gate = Gate(costs) if gated else None
    pipeline = Pipeline(policy, costs, max_window=max_window, vocab_size=vocab_size, gate=gate)
    return Stage(pipeline, toy_target(vocab_size, salt), StopRule((EOS,), max_new_tokens))
