"""Whether speculation pays, judged from measured seconds: a caption whose draft does not help is decoded plainly.

Pure: seconds come in with the events, and all losses are counted in plain passes, the seconds that one more token
costs when several plain passes are asked for at once (as `method="autoregressive"` does: no round trip a token)
and no draft is at work: a draft that prefills or writes may slow the target down, and that is part of its price.

**Open**, every round of speculation (hold, round trip, pass) is charged `seconds / plain_s - tokens committed`. The
running sum is the *loss*. Past a *budget* the gate closes. Gains make the loss negative, down to -CREDIT: a draft that
was good may fail a little later, and one that turned bad is still noticed within some rounds. Once it has gained PROOF
the budget is 0: speculation may lose what it has gained, and no more.

**Closed**, the target runs plain passes in one batch and the draft rests: its line is dropped and none begins. The
first RECONSIDER passes measure plain decoding anew, at this moment's load; if the loss was but a wrong notion of what
plain costs, the gate opens again at once (once, until speculation has proved itself). Otherwise it stays closed for
FIRST_REST tokens, then opens for a trial with TRIAL_BUDGET. Each trial that fails doubles the rest, up to LONGEST_REST;
proof restores the first one.

**What it can cost.** A closed gate is plain decoding but for two round trips a rest. An open one loses at most its
budget and o, the excess of the round that exceeds it: hold and round trip are within the budget (`patience_s`), so o
is about the excess of one pass over a window (0.4 to 1 plain passes on a CPU, near 0 on a GPU). The first stretch so
loses at most FIRST_BUDGET + o and every later one TRIAL_BUDGET + o (one that proved itself, o), with at least
FIRST_REST plain tokens before it. While no trial proves itself, k of them take n >= FIRST_REST (2^k - 1) tokens, so
the excess over plain decoding, in plain passes, is at most

    FIRST_BUDGET + o + (TRIAL_BUDGET + o) log2(1 + n / FIRST_REST):

for n = 200 and o = 0.7, k = 2, it is 4.7 + 3.4 = 8.1, 4.1% of the text; the share falls as n grows. A draft that
proves itself and fails in turn, as if it knew, could raise it to FIRST_BUDGET + o + (TRIAL_BUDGET + o) n /
FIRST_REST, 2.7% of a long text.

**The first caption of its length** in a process, plain ones included, teaches what plain decoding costs. If that is a
speculative one, its gate begins closed, for RECONSIDER passes with a resting draft.
"""

import statistics
from collections import deque

from slipstream.speculation.pacing import CostModel

FIRST_BUDGET = 4.0
TRIAL_BUDGET = 1.0
CREDIT = 8.0
PROOF = 4.0
LONGEST_HOLD = 1.5
LONGEST_ROUND = 3.0
"""A round's pass counts as no more plain passes than this, since the draft is not to blame when the machine stalls.
Holds count in full."""
FIRST_REST, LONGEST_REST = 64, 512
RECONSIDER = 6
SHORTEST_PASS_S = 1e-9
ENOUGH_SAMPLES = 3
"""Plain passes that must have been measured in this caption before their median counts."""
RECENT_SAMPLES = 15
UNMEASURED_SHARE = 0.75
"""Of a target pass as speculation sees it (round trip and window included), a plain pass is taken to be this much."""


class Gate:
    """One caption's gate. Starts open if the process knows what a plain pass costs, and else by measuring it."""

    def __init__(self, costs: CostModel) -> None:
        self.closed = not costs.plain_token_s.weight
        self.num_closings = 0
        self.num_gated_tokens = 0
        self._costs = costs
        self._budget = FIRST_BUDGET
        self._rest = FIRST_REST
        self._plain_samples: deque[float] = deque(maxlen=RECENT_SAMPLES)
        self._shortest_round_s = float("inf")
        self._spent_s = self._num_tokens = 0.0
        self._num_left = RECONSIDER if self.closed else 0
        self._may_reconsider = True
        self._reconsidering = self.closed

    @property
    def plain_s(self) -> float:
        """Seconds of one more plain pass: the median of this caption's; before there are enough, the process's average
        or a share of a pass over a window, and never more than the shortest round of this caption."""
        if len(self._plain_samples) >= ENOUGH_SAMPLES:
            return statistics.median(self._plain_samples)
        known = self._costs.plain_token_s
        guess_s = known.value if known.weight else UNMEASURED_SHARE * self._costs.target_pass_s(0)
        return min(guess_s, self._shortest_round_s)

    @property
    def loss(self) -> float:
        """Plain passes that speculation has cost more than plain decoding since the gate opened; negative is gain."""
        return self._spent_s / max(self.plain_s, SHORTEST_PASS_S) - self._num_tokens

    @property
    def patience_s(self) -> float:
        """Seconds that the target may be held for the draft now."""
        return min(max(self._budget - self.loss, 0.0), LONGEST_HOLD) * self.plain_s

    @property
    def num_passes(self) -> int:
        """Plain passes to ask for at once while the gate is closed; it thinks again after them."""
        return self._num_left

    def on_round(self, num_tokens: int, round_s: float, held_s: float) -> None:
        """A round of speculation ended: the target was held for `held_s` and answered after `round_s` more."""
        self._shortest_round_s = min(self._shortest_round_s, round_s)
        plain_s = self.plain_s
        self._spent_s += held_s + min(round_s, LONGEST_ROUND * plain_s)
        self._num_tokens += num_tokens
        loss = self.loss
        if loss <= -PROOF:
            self._budget, self._rest, self._may_reconsider = 0.0, FIRST_REST, True
        if loss < -CREDIT:
            self._spent_s *= CREDIT / -loss
            self._num_tokens *= CREDIT / -loss
        if loss > self._budget:
            self._close()

    def on_plain_pass(self, pass_s: float, *, in_batch: bool, undisturbed: bool) -> None:
        """A plain pass ended after `pass_s`.

        `in_batch`: it followed another without a round trip; `undisturbed`: no draft was at work.
        """
        if in_batch and undisturbed:
            self._plain_samples.append(pass_s)
        if not self.closed:
            return
        self.num_gated_tokens += 1
        if self._reconsidering and not undisturbed:
            return
        self._num_left -= 1
        if self._num_left == 0:
            self._think_again()

    def _close(self) -> None:
        self.closed = True
        self.num_closings += 1
        self._reconsidering = self._may_reconsider
        self._num_left = RECONSIDER if self._reconsidering else self._rest

    def _think_again(self) -> None:
        if self._reconsidering:
            self._reconsidering, self._may_reconsider = False, self.num_closings == 0
            if self.loss > self._budget / 2:
                self._num_left = self._rest - RECONSIDER
            else:
                self.closed = False
            return
        self.closed = False
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._budget = TRIAL_BUDGET
        self._spent_s = self._num_tokens = 0.0
        self._costs.forget_acceptance()
