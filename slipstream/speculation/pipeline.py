"""The pre-verify/post-verify protocol as one state machine: events in, actions out. No I/O, no clock, no torch.

The rule that makes it lossless: a target pass takes the last committed token and a pending window of k >= 0 draft
tokens, and whatever comes back is committed. k = 0 is pre-verify, k > 0 post-verify, and a caption whose draft is
slow, lying or dead is simply a run of k = 0 passes, which is plain decoding.

Positions count output tokens from 0. What the draft has written falls into three parts, in this order:

    committed ... [in flight: being judged] [pending: to be judged next]

and when the target is ahead of the draft there is *debt* instead: committed tokens that the line must still
reproduce to live on.
"""

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import DraftFault, ProtocolViolation
from slipstream.speculation.acceptance import FinishReason, Verdict
from slipstream.speculation.costs import CostModel
from slipstream.speculation.pacing import Moment, Policy, WindowPlan

MAX_DEBT = 2
"""A line that is this many tokens behind the target is restarted after them instead of catching up one by one."""
SOLO_PASSES = 4
"""Passes asked for at once while there is no draft: fewer round trips, yet a draft that comes back waits little."""


@dataclass(frozen=True)
class JudgeWindow:
    """Run `num_passes` target passes: the first over `window`, the others over nothing."""

    window: tuple[int, ...]
    num_passes: int


@dataclass(frozen=True)
class RestartLine:
    """The draft keeps its first `keep` output tokens, appends `suffix` and writes until `write_until` (exclusive)."""

    epoch: int
    keep: int
    suffix: tuple[int, ...]
    write_until: int
    first_chunk: int


@dataclass(frozen=True)
class AdvanceLine:
    """The line lives; the draft may write until `write_until` (exclusive)."""

    epoch: int
    write_until: int


@dataclass(frozen=True)
class Commit:
    """These tokens are text from now on; the first `num_from_draft` were the draft's."""

    tokens: tuple[int, ...]
    num_from_draft: int


@dataclass(frozen=True)
class Finish:
    """The text is complete."""

    reason: FinishReason


Action = JudgeWindow | RestartLine | AdvanceLine | Commit | Finish


@dataclass(frozen=True)
class JoinPoint:
    """What a draft that joins must be told: where its first line starts and how far it may go."""

    epoch: int
    committed: tuple[int, ...]
    write_until: int
    first_chunk: int


class DraftPhase(enum.Enum):
    """Where the draft stands in this caption."""

    ABSENT = enum.auto()
    JOINING = enum.auto()
    WRITING = enum.auto()


class Pipeline:
    """One caption's protocol. Feed every event to the method of its name and carry out the actions in order.

    The first verdict is the prefill's: until it arrives the target counts as busy with an empty window.
    """

    def __init__(
        self,
        policy: Policy,
        costs: CostModel,
        *,
        max_window: int,
        vocab_size: int,
        solo_passes: int = SOLO_PASSES,
    ) -> None:
        self.policy = policy
        self.costs = costs
        self.max_window = max_window
        self.vocab_size = vocab_size
        self.solo_passes = solo_passes
        self.committed: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.draft_phase = DraftPhase.ABSENT
        self.epoch = 0
        self.num_deaths = 0
        self.num_judged = 0
        self.num_accepted = 0
        self._in_flight: tuple[int, ...] | None = ()
        self._num_in_flight_of_line = 0
        self._passes_left = 1
        self._pending: deque[int] = deque()
        self._debt: deque[int] = deque()
        self._write_until = 0
        self._fresh = True
        self._silent = False

    # -- what the driver may look at ------------------------------------------------------------------------------

    @property
    def holding(self) -> bool:
        """The target is idle and waits for the draft. The driver must bound this and call `on_hold_expired`."""
        return self._in_flight is None and self.finish_reason is None

    @property
    def draft_owes(self) -> bool:
        """The draft has not written as far as it may. If nothing comes for long, it is frozen."""
        return self.draft_phase is DraftPhase.WRITING and self._next_position < self._write_until

    @property
    def num_pending(self) -> int:
        """Draft tokens that wait to be judged."""
        return len(self._pending)

    # -- events ---------------------------------------------------------------------------------------------------

    def on_draft_joining(self) -> JoinPoint:
        """A draft was found and is about to be sent the video. Valid while no draft takes part."""
        if self.draft_phase is not DraftPhase.ABSENT:
            raise AssertionError("one draft at a time")
        self.epoch += 1
        self.draft_phase = DraftPhase.JOINING
        self._fresh = True
        self._silent = False
        self._write_until = self._reach()
        return JoinPoint(self.epoch, tuple(self.committed), self._write_until, self._plan().cap or 1)

    def on_draft_ready(self, num_known: int) -> list[Action]:
        """The draft holds the prompt and the first `num_known` output tokens, and starts to write."""
        if self.draft_phase is not DraftPhase.JOINING or self.finish_reason is not None:
            return []
        self.draft_phase = DraftPhase.WRITING
        self._debt.extend(self.committed[num_known:])
        if len(self._debt) >= MAX_DEBT:
            return [self._restart(), *self._next_pass()]
        return self._next_pass()

    def on_draft_tokens(self, epoch: int, position: int, token_ids: Sequence[int]) -> list[Action]:
        """The draft wrote. Raises `DraftFault` when it broke the protocol; the driver then calls `on_draft_lost`."""
        if self.finish_reason is not None or self.draft_phase is not DraftPhase.WRITING or epoch < self.epoch:
            return []
        self._check_tokens(epoch, position, token_ids)
        self._silent = False
        for index, token in enumerate(token_ids):
            if not self._debt:
                self._pending.extend(token_ids[index:])
                break
            if not self._observe_match(token == self._debt[0]):
                return [self._die(tuple(self._debt)), *self._next_pass()]
            self._debt.popleft()
        return self._next_pass()

    def on_draft_lost(self) -> list[Action]:
        """The draft is gone: killed, frozen, unreachable or dropped. Its unjudged tokens go with it."""
        self.draft_phase = DraftPhase.ABSENT
        self.epoch += 1
        self._num_in_flight_of_line = 0
        self._pending.clear()
        self._debt.clear()
        return self._next_pass()

    def on_hold_expired(self) -> list[Action]:
        """The draft kept the target waiting for too long: go on with what there is, and do not wait again until it
        writes."""
        if not self.holding:
            return []
        self._silent = True
        return self._next_pass()

    def on_verdict(self, verdict: Verdict) -> list[Action]:
        """A target pass ended. Raises `ProtocolViolation` for a verdict that answers nothing."""
        window = self._in_flight
        if window is None or verdict.num_accepted > len(window):
            raise ProtocolViolation("the target sent a verdict that no window was waiting for")
        if verdict.own_token is None and verdict.finish_reason is None:
            raise ProtocolViolation("the target sent a verdict without its own token, and the text goes on")
        tokens = verdict.committed(window)
        self.committed.extend(tokens)
        self._passes_left -= 1
        self._in_flight = () if self._passes_left else None
        if window:
            self.costs.observe_window(verdict.num_accepted, len(window))
            self.num_accepted += verdict.num_accepted
            self.num_judged += min(verdict.num_accepted + 1, len(window))
        actions: list[Action] = [Commit(tokens, verdict.num_accepted)]
        if verdict.finish_reason is not None:
            self.finish_reason = verdict.finish_reason
            self._in_flight = None
            return [*actions, Finish(verdict.finish_reason)]
        if self.draft_phase is DraftPhase.WRITING:
            self._fresh = False
            actions.extend(self._continue_line(tokens, verdict.num_accepted))
        return actions + self._next_pass()

    # -- the line -------------------------------------------------------------------------------------------------

    def _continue_line(self, tokens: tuple[int, ...], num_accepted: int) -> list[Action]:
        """Compares newly committed tokens with the line, which dies where they differ and owes what it has not written.

        Tokens of the line that were in flight were compared by the target itself. (A window of an earlier draft, whose
        successor joined meanwhile, counts as none of this line's.)
        """
        num_in_flight, self._num_in_flight_of_line = self._num_in_flight_of_line, 0
        if num_accepted < num_in_flight:
            return [self._die(tokens[-1:])]
        for index in range(num_in_flight, len(tokens)):
            if not self._pending:
                self._debt.append(tokens[index])
                continue
            if not self._observe_match(self._pending[0] == tokens[index]):
                return [self._die(tokens[index:])]
            self._pending.popleft()
        return [self._restart()] if len(self._debt) >= MAX_DEBT else []

    def _observe_match(self, matched: bool) -> bool:
        self.costs.observe_match(matched)
        self.num_judged += 1
        self.num_accepted += matched
        return matched

    @property
    def _next_position(self) -> int:
        """Output position of the token that the line writes next."""
        return len(self.committed) + self._num_in_flight_of_line + len(self._pending) - len(self._debt)

    def _die(self, suffix: tuple[int, ...]) -> RestartLine:
        self.num_deaths += 1
        self._debt = deque(suffix)
        return self._restart()

    def _restart(self) -> RestartLine:
        """Ends the line and starts the next one after the committed tokens; the debt is what the draft lacks."""
        suffix = tuple(self._debt)
        self.epoch += 1
        self._pending.clear()
        self._debt.clear()
        self._fresh = True
        plan = self._plan()
        self._write_until = self._reach()
        keep = len(self.committed) - len(suffix)
        return RestartLine(self.epoch, keep, suffix, self._write_until, plan.hold or self._unheld_chunk(plan))

    def _unheld_chunk(self, plan: WindowPlan) -> int:
        """First chunk of a line that no pass is held for: what comes while half a plain pass runs.

        A whole window would often arrive just after that pass, and the next one would start without it.
        """
        return max(min(plan.cap, int(self.costs.speed_ratio / 2)), 1)

    def _check_tokens(self, epoch: int, position: int, token_ids: Sequence[int]) -> None:
        if epoch > self.epoch:
            raise DraftFault(f"the draft wrote for line {epoch}, which was never started")
        if not token_ids:
            raise DraftFault("the draft sent a message without tokens")
        if position != self._next_position:
            raise DraftFault(f"the draft wrote at output position {position}; {self._next_position} was next")
        if position + len(token_ids) > self._write_until:
            raise DraftFault(f"the draft wrote past output position {self._write_until}")
        if any(not 0 <= token < self.vocab_size for token in token_ids):
            raise DraftFault(f"the draft wrote a token id outside the vocabulary of {self.vocab_size}")

    # -- the target's next pass -----------------------------------------------------------------------------------

    def _plan(self) -> WindowPlan:
        return self.policy.plan(Moment(len(self._pending), self._fresh, self.max_window), self.costs)

    def _next_pass(self) -> list[Action]:
        """Starts the next pass if the target is free and the policy does not wait; tells a living line its limit."""
        if self._in_flight is not None or self.finish_reason is not None:
            return []
        if self.draft_phase is DraftPhase.WRITING:
            plan = self._plan()
            if len(self._pending) < plan.hold and not self._silent:
                return self._advance(len(self.committed) + self.max_window)
            window_len, num_passes = min(len(self._pending), plan.cap), 1
        else:
            window_len, num_passes = 0, self.solo_passes if self.draft_phase is DraftPhase.ABSENT else 1
        window = tuple(self._pending.popleft() for _ in range(window_len))
        self._in_flight, self._passes_left = window, num_passes
        self._num_in_flight_of_line = window_len
        judge = JudgeWindow(window, num_passes)
        return [judge, *(self._advance(self._reach()) if self.draft_phase is DraftPhase.WRITING else [])]

    def _reach(self) -> int:
        """Where a line's limit belongs: a whole window past all that the passes in flight (or the next) can commit."""
        return len(self.committed) + len(self._in_flight or ()) + max(self._passes_left, 1) + self.max_window

    def _advance(self, write_until: int) -> list[Action]:
        if write_until <= self._write_until:
            return []
        self._write_until = write_until
        return [AdvanceLine(self.epoch, write_until)]
