"""A simulator of captioning, in simulated time: the real `Pipeline`, its policies, gate and cost model."""

import bisect
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from slipstream.speculation.caption_book import Opening
from slipstream.speculation.gate import Gate
from slipstream.speculation.pacing import CostModel, Fixed, Policy
from slipstream.speculation.pipeline import UNDRAFTED_PASSES, Pipeline
from slipstream.speculation.protocol import (
    Action,
    AdvanceLine,
    JudgeWindow,
    LineAction,
    MoveLine,
    RestartLine,
    StopRule,
    Verdict,
    judge_window,
)

# -- one caption ------------------------------------------------------------------------------------------------------

CostsT = TypeVar("CostsT", bound=CostModel)
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
    interruptible: bool = True
    """A restart ends the draft's pass that runs; else it waits for its end, as the draft service does."""
    max_window: int = 16
    num_tokens: int = 20_000
    seed: int = 0
    gate: bool = False
    """Decode plainly while speculation does not pay."""
    known: bool = True
    """The process has captioned before: its averages hold what passes cost. Else the session begins with guesses."""


def known_costs(setup: SimulationInput, costs: CostsT) -> CostsT:
    """A session starts from its process's averages: one plain pass and one draft pass have been seen."""
    if setup.known:
        costs.target_pass_s.observe(0, setup.target_pass_s(0) + 2 * setup.message_s)
        costs.plain_token_s.observe(setup.target_pass_s(0))
        costs.draft_pass_s.observe(setup.draft_pass_s)
    return costs


def pass_cost_table(seconds_by_window: Mapping[int, float]) -> Callable[[int], float]:
    """T_p from measured points: straight lines between them, the last line continued."""
    points = sorted(seconds_by_window.items())

    def target_pass_s(window_len: int) -> float:
        index = min(max(bisect.bisect(points, (window_len, math.inf)), 1), len(points) - 1)
        (left, low), (right, high) = points[index - 1], points[index]
        return low + (high - low) * (window_len - left) / (right - left)

    return target_pass_s


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


class TellsDraft(Protocol):
    """A simulated draft, as the gateway sees it."""

    def order(self, action: LineAction) -> None:
        """It is told so now."""


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
        interruptible: bool = True,
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
        self._interruptible = interruptible
        self._waiting: list[LineAction] = []

    def order(self, action: LineAction) -> None:
        if isinstance(action, RestartLine):
            self._restart(action)
        elif isinstance(action, AdvanceLine):
            self._advance(action)

    def _restart(self, line: RestartLine) -> None:
        if self._writing and not self._interruptible:
            self._waiting.append(line)
            return
        self._epoch, self._position = line.epoch, line.keep + len(line.suffix)
        self._write_until, self._chunk = line.write_until, line.first_chunk
        self._unsent.clear()
        self._writing = False
        self._go_on(self._restart_ns)

    def _advance(self, line: AdvanceLine) -> None:
        if self._waiting:
            self._waiting.append(line)
        elif line.epoch == self._epoch:
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
        waiting, self._waiting = self._waiting, []
        if waiting:
            for action in waiting:
                self.order(action)
            return
        self._unsent.append(AGREED if self._agreement[self._position % len(self._agreement)] else DISAGREED)
        self._position += 1
        if len(self._unsent) >= self._chunk or self._position == self._write_until:
            self._send(epoch, self._position - len(self._unsent), tuple(self._unsent))
            self._unsent.clear()
            self._chunk = 1
        self._go_on()


class SimulatedCaption:
    """The gateway and the target of one caption: carries out the pipeline's actions and feeds it what comes back.

    `opening`: what captions before this one have taught; without it, what `setup` says of them.
    """

    def __init__(self, setup: SimulationInput, opening: Opening | None = None) -> None:
        self.held_ns = 0
        self.passes_by_window: Counter[int] = Counter()
        costs = opening.costs if opening else known_costs(setup, CostModel())
        own_gate = Gate(costs) if setup.gate and setup.policy else None
        self.gate = opening.gate if opening else own_gate
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
        self._draft: TellsDraft = SimulatedDraft(
            self._clock,
            self._post_tokens,
            agreement=setup.agreement or draw_agreement(setup),
            pass_ns=round(setup.draft_pass_s * NS),
            restart_ns=round(setup.restart_s * NS),
            interruptible=setup.interruptible,
        )
        self._rule = StopRule((), setup.num_tokens)
        self._asked_ns = self._held_ns = 0
        self._hold: object | None = None
        self._restarted_ns: int | None = None

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self._clock.now_ns / NS

    @property
    def tokens_per_s(self) -> float:
        return (self._setup.num_tokens - 1) / self.seconds

    def run(self) -> None:
        if self._setup.policy is not None:
            point = self.pipeline.on_draft_joining()
            self._draft.order(RestartLine(point.epoch, 0, point.committed, point.write_until, point.first_chunk))
            self._carry_out(self.pipeline.on_draft_ready(len(point.committed)))
        self._carry_out(self.pipeline.on_verdict(judge_window((), (AGREED,), 0, self._rule)))
        self._play()

    def _play(self) -> None:
        """To the last token."""
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
                    self._tell(action)
                case AdvanceLine() | MoveLine():
                    self._tell(action)
        if self.pipeline.holding and self._hold is None:
            self._hold = object()
            self._clock.after(round(self.pipeline.longest_hold_s * NS), partial(self._hold_expires, self._hold))

    def _tell(self, action: LineAction) -> None:
        self._clock.after(self._message_ns, partial(self._draft.order, action))

    def _hold_expires(self, hold: object) -> None:
        if hold is self._hold:
            self._carry_out(self.pipeline.on_hold_expired())

    def _judge(self, judge: JudgeWindow) -> None:
        self._asked_ns = self._clock.now_ns
        self._hold = None
        delay_ns = 2 * self._message_ns
        for each in (judge, *[JudgeWindow((), 1)] * (judge.num_passes - 1)):
            delay_ns += round(self._setup.target_pass_s(len(each.window)) * NS)
            self._clock.after(delay_ns, partial(self._verdict_arrives, each), rank=1)

    def _verdict_on(self, judge: JudgeWindow) -> Verdict:
        return judge_window(judge.window, [AGREED] * (len(judge.window) + 1), len(self.pipeline.committed), self._rule)

    def _verdict_arrives(self, judge: JudgeWindow) -> None:
        window = judge.window
        if self.pipeline.finish_reason is not None:
            return
        round_s, held_s = (self._clock.now_ns - self._asked_ns) / NS, self._held_ns / NS
        self.pipeline.costs.target_pass_s.observe(len(window), round_s)
        self.held_ns += self._held_ns
        self._asked_ns, self._held_ns = self._clock.now_ns, 0
        verdict = self._verdict_on(judge)
        self.passes_by_window[len(window)] += 1
        self._carry_out(self.pipeline.on_verdict(verdict, round_s, held_s))

    def _post_tokens(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        self._clock.after(self._message_ns, partial(self._tokens_arrive, epoch, position, tokens))

    def _tokens_arrive(self, epoch: int, position: int, tokens: tuple[int, ...]) -> None:
        pass_s = self._setup.draft_pass_s
        self._heard(epoch, len(tokens) * pass_s)
        self._carry_out(self.pipeline.on_draft_tokens(epoch, position, tokens, pass_s=pass_s))

    def _heard(self, epoch: int, writing_s: float) -> None:
        """A line's first message says what its restart cost beside the writing."""
        if self._restarted_ns is not None and epoch == self.pipeline.epoch:
            self.pipeline.costs.restart_s.observe((self._clock.now_ns - self._restarted_ns) / NS - writing_s)
            self._restarted_ns = None


# -- what it comes to -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SimulationResult:
    """How the caption went, counted from its first token."""

    tokens_per_s: float
    speedup: float
    """Over the same target without a draft."""
    passes_by_window: Mapping[int, int]
    """Target passes by the length of their window; 0 is a plain pass."""
    held_s: float
    """Seconds that the target waited for draft tokens."""
    tau: float
    """Share of the draft's tokens that agreed, among those that were compared."""
    mean_accepted_length: float
    """Tokens between two deaths of the line (ParallelVLM's M)."""
    gate_closings: int = 0
    gated_tokens: int = 0

    @property
    def num_passes(self) -> int:
        return sum(self.passes_by_window.values())

    @property
    def mean_window(self) -> float:
        num_drafted = sum(window * count for window, count in self.passes_by_window.items())
        return num_drafted / max(self.num_passes, 1)


def simulate(setup: SimulationInput) -> SimulationResult:
    """Runs one caption to its last token. The same input gives the same result."""
    caption, plain = play(setup), play(replace(setup, policy=None))
    return SimulationResult(
        tokens_per_s=caption.tokens_per_s,
        speedup=caption.tokens_per_s / plain.tokens_per_s,
        passes_by_window=dict(sorted(caption.passes_by_window.items())),
        held_s=caption.held_ns / NS,
        tau=caption.pipeline.num_accepted / max(caption.pipeline.num_judged, 1),
        mean_accepted_length=setup.num_tokens / max(caption.pipeline.num_deaths, 1),
        gate_closings=caption.gate.num_closings if caption.gate else 0,
        gated_tokens=caption.gate.num_gated_tokens if caption.gate else 0,
    )


def play(setup: SimulationInput, opening: Opening | None = None) -> SimulatedCaption:
    """The caption, played to its last token."""
    caption = SimulatedCaption(setup, opening)
    caption.run()
    return caption
