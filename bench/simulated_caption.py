"""One simulated caption: the real `Pipeline`, its policies, gate and cost model, in simulated time. Knows no model."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.speculation.pacing import CostModel, Fixed, Gate, Policy
from slipstream.speculation.pipeline import UNDRAFTED_PASSES, Pipeline
from slipstream.speculation.protocol import Action, AdvanceLine, JudgeWindow, RestartLine, StopRule, judge_window

AGREED, DISAGREED = 1, 0
"""A simulated token: whether the draft agrees with the target at that output position."""
NS = 1_000_000_000
"""Time is counted in whole nanoseconds, so that simultaneous events are recognised as such."""


@dataclass(frozen=True)
class SimulationInput:
    """What one simulated caption is made of. Times are seconds."""

    target_pass_s: Callable[[int], float]
    """T_p as a function of the window length."""
    draft_pass_s: float
    """T_q."""
    policy: Policy | None
    """None: no draft takes part."""
    tau: float = 0.0
    """Chance that a draft token equals the target's, drawn anew for every output position."""
    agreement: tuple[bool, ...] = ()
    """Recorded agreement by output position instead of `tau`; repeated when the text is longer."""
    message_s: float = 0.0
    """One message's way between the gateway and either peer; a round of the target has two."""
    restart_s: float = 0.0
    """From a restart's arrival at the draft to its first pass: the rollback and the rest of the pass that ran."""
    max_window: int = 16
    num_tokens: int = 20_000
    seed: int = 0
    gate: bool = False
    """Decode plainly while speculation does not pay."""
    known: bool = True
    """The process has captioned before: its averages hold what passes cost. Else the session begins with guesses."""


def _known_costs(setup: SimulationInput) -> CostModel:
    """A session starts from its process's averages: one plain pass and one draft pass have been seen."""
    costs = CostModel()
    if not setup.known:
        return costs
    costs.target_pass_s.observe(0, setup.target_pass_s(0) + 2 * setup.message_s)
    costs.plain_token_s.observe(setup.target_pass_s(0))
    costs.draft_pass_s.observe(setup.draft_pass_s)
    return costs


def draw_agreement(setup: SimulationInput) -> tuple[bool, ...]:
    """Agreement by output position, of chance tau."""
    chance = random.Random(setup.seed)
    return tuple(chance.random() < setup.tau for _ in range(setup.num_tokens + 2 * setup.max_window))


class SimulatedClock:
    """A heap of what happens when. Among simultaneous events, a lower `rank` comes first."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def after(self, delay_ns: int, event: Callable[[], None], *, rank: int = 0) -> None:
        heapq.heappush(self._events, (self.now_ns + delay_ns, rank, next(self._serial), event))

    def step(self) -> None:
        self.now_ns, _, _, event = heapq.heappop(self._events)
        event()


class SimulatedDraft:
    """Writes a token every T_q up to its limit; sends `first_chunk` tokens of a line at once, then one by one."""

    def __init__(
        self,
        clock: SimulatedClock,
        send: Callable[[int, int, tuple[int, ...]], None],
        *,
        agreement: Sequence[bool],
        pass_ns: int,
        restart_ns: int,
    ) -> None:
        self._clock = clock
        self._send = send
        self._agreement = agreement
        self._pass_ns = pass_ns
        self._restart_ns = restart_ns
        self._epoch = self._position = self._write_until = 0
        self._chunk = 1
        self._unsent: list[int] = []
        self._writing = False

    def restart(self, line: RestartLine) -> None:
        self._epoch, self._position = line.epoch, line.keep + len(line.suffix)
        self._write_until, self._chunk = line.write_until, line.first_chunk
        self._unsent.clear()
        self._writing = False
        self._go_on(self._restart_ns)

    def advance(self, line: AdvanceLine) -> None:
        if line.epoch == self._epoch:
            self._write_until = line.write_until
            self._go_on()

    def _go_on(self, delay_ns: int = 0) -> None:
        if not self._writing and self._position < self._write_until:
            self._writing = True
            self._clock.after(delay_ns + self._pass_ns, partial(self._wrote, self._epoch))

    def _wrote(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        self._writing = False
        self._unsent.append(AGREED if self._agreement[self._position % len(self._agreement)] else DISAGREED)
        self._position += 1
        if len(self._unsent) >= self._chunk or self._position == self._write_until:
            self._send(epoch, self._position - len(self._unsent), tuple(self._unsent))
            self._unsent.clear()
            self._chunk = 1
        self._go_on()


class SimulatedCaption:
    """The gateway and the target of one caption: carries out the pipeline's actions and feeds it what comes back."""

    def __init__(self, setup: SimulationInput) -> None:
        self.held_ns = 0
        self.passes_by_window: Counter[int] = Counter()
        costs = _known_costs(setup)
        self.gate = Gate(costs) if setup.gate and setup.policy else None
        self.pipeline = Pipeline(
            setup.policy or Fixed(),
            costs,
            max_window=setup.max_window,
            vocab_size=2,
            gate=self.gate,
            undrafted_passes=UNDRAFTED_PASSES if setup.policy else setup.num_tokens,
        )
        self._setup = setup
        self._clock = SimulatedClock()
        self._message_ns = round(setup.message_s * NS)
        self._draft = SimulatedDraft(
            self._clock,
            self._post_tokens,
            agreement=setup.agreement or draw_agreement(setup),
            pass_ns=round(setup.draft_pass_s * NS),
            restart_ns=round(setup.restart_s * NS),
        )
        self._rule = StopRule((), setup.num_tokens)
        self._asked_ns = self._held_ns = 0
        self._hold: object | None = None
        self._restarted_ns: int | None = None

    @property
    def tokens_per_s(self) -> float:
        return (self._setup.num_tokens - 1) / (self._clock.now_ns / NS)

    def run(self) -> None:
        if self._setup.policy is not None:
            point = self.pipeline.on_draft_joining()
            self._draft.restart(RestartLine(point.epoch, 0, point.committed, point.write_until, point.first_chunk))
            self._carry_out(self.pipeline.on_draft_ready(len(point.committed)))
        self._carry_out(self.pipeline.on_verdict(judge_window((), (AGREED,), 0, self._rule)))
        while self.pipeline.finish_reason is None:
            holding, since_ns = self.pipeline.holding, self._clock.now_ns
            self._clock.step()
            self._held_ns += (self._clock.now_ns - since_ns) * holding

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case JudgeWindow():
                    self._judge(action)
                case RestartLine():
                    self._restarted_ns = self._clock.now_ns if action.may_write else None
                    self._clock.after(self._message_ns, partial(self._draft.restart, action))
                case AdvanceLine():
                    self._clock.after(self._message_ns, partial(self._draft.advance, action))
        if self.pipeline.holding and self._hold is None:
            self._hold = object()
            self._clock.after(round(self.pipeline.longest_hold_s * NS), partial(self._hold_expires, self._hold))

    def _hold_expires(self, hold: object) -> None:
        if hold is self._hold:
            self._carry_out(self.pipeline.on_hold_expired())

    def _judge(self, judge: JudgeWindow) -> None:
        self._asked_ns = self._clock.now_ns
        self._hold = None
        delay_ns = 2 * self._message_ns
        for window in (judge.window, *[()] * (judge.num_passes - 1)):
            delay_ns += round(self._setup.target_pass_s(len(window)) * NS)
            self._clock.after(delay_ns, partial(self._verdict_arrives, window), rank=1)

    def _verdict_arrives(self, window: tuple[int, ...]) -> None:
        if self.pipeline.finish_reason is not None:
            return
        round_s, held_s = (self._clock.now_ns - self._asked_ns) / NS, self._held_ns / NS
        self.pipeline.costs.target_pass_s.observe(len(window), round_s)
        self.held_ns += self._held_ns
        self._asked_ns, self._held_ns = self._clock.now_ns, 0
        choices = [AGREED] * (len(window) + 1)
        verdict = judge_window(window, choices, len(self.pipeline.committed), self._rule)
        self.passes_by_window[len(window)] += 1
        self._carry_out(self.pipeline.on_verdict(verdict, round_s, held_s))

    def _post_tokens(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        self._clock.after(self._message_ns, partial(self._tokens_arrive, epoch, position, tokens))

    def _tokens_arrive(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        costs = self.pipeline.costs
        costs.draft_pass_s.observe(self._setup.draft_pass_s)
        if self._restarted_ns is not None and epoch == self.pipeline.epoch:
            writing_s = len(tokens) * self._setup.draft_pass_s
            costs.restart_s.observe((self._clock.now_ns - self._restarted_ns) / NS - writing_s)
            self._restarted_ns = None
        self._carry_out(self.pipeline.on_draft_tokens(epoch, position, tokens))
