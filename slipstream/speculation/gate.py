"""Whether speculation pays within a caption. Pure arithmetic, no clock.

Seconds come in with the events, and all losses are counted in plain passes, the seconds that one more token costs
when several plain passes are asked for at once (as `method="autoregressive"` does: no round trip a token) and
no draft is at work: a draft that prefills or writes may slow the target down, and that is part of its price.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

from slipstream.speculation.company import ALONE, SHORTEST_PASS_S, Company
from slipstream.speculation.pacing import CostModel

# **Open**, every round of speculation (hold, round trip, pass) is charged `seconds / plain_s - tokens committed`. The
# running sum is the *loss*. Past a *budget* the gate closes. Gains make the loss negative, down to -CREDIT: a draft
# that was good may fail a little later, and one that turned bad is still noticed within some rounds. Once it has
# gained PROOF the budget is 0: speculation may lose what it has gained, and no more. The gate closes, too, when the
# first FRUITLESS rounds since it opened in which tokens of the draft's were judged brought none of them: they lose
# whatever the clock says, and a noisy one may say that it is next to nothing. Then there is nothing to reconsider.
# Where the draft has said nothing it is late, and not bad: a good one may have waited behind the prompts of others.
#
# **Closed**, the target runs plain passes in one batch and the draft rests: its line is dropped and none begins. The
# first RECONSIDER passes measure plain decoding anew, at this moment's load; if the loss was but a wrong notion of
# what plain costs, the gate opens again at once (once, until speculation has proved itself). Otherwise it stays
# closed for FIRST_REST tokens, then opens for a trial with TRIAL_BUDGET. Each trial that fails doubles the rest, up
# to LONGEST_REST; proof restores the first one.
#
# **In company** the caption's own plain passes say little, beside windows of others that they also wait for. From the
# first shared pass on, each pass is counted in what the target reckons that plain passes of all would cost then
# (`Company`), and stays so counted: the others come and go.
#
# **What it can cost.** A closed gate is plain decoding but for two round trips a rest; an open one loses at most its
# budget and the excess of the round that exceeds it (hold and round trip are within the budget: `patience_s`). The
# bound over a whole text, and its derivation, are in docs/algorithms.md.
#
# **The first caption of its length** in a process, plain ones included, teaches what plain decoding costs. If that is
# a speculative one, its gate begins closed, for RECONSIDER passes with a resting draft.

FIRST_BUDGET = 4.0
TRIAL_BUDGET = 1.0
CREDIT = 8.0
PROOF = 4.0
FRUITLESS = 6
"""Of a draft of which every second token is accepted 1.6% of the stretches begin with so many fruitless rounds."""
LONGEST_HOLD = 1.5
LONGEST_ROUND = 3.0
"""A round's pass counts as no more plain passes than this, since the draft is not to blame when the machine stalls.
Holds count in full."""
FIRST_REST, LONGEST_REST = 64, 512
RECONSIDER = 6
ENOUGH_SAMPLES = 3
"""Plain passes that must have been measured in this caption before their median counts."""
RECENT_SAMPLES = 15
FASTER = 0.75
"""Once the target reckons that a plain pass takes no more than this share of what it reckoned of those that were
measured, they are measured anew."""
UNMEASURED_SHARE = 0.75
"""Of a target pass as speculation sees it (round trip and window included), a plain pass is taken to be this much."""


@dataclass
class _Account:
    """What speculation has spent and brought."""

    seconds: float = 0.0
    """Spent, and to be counted in what is known of plain passes whenever the account is looked at."""
    passes: float = 0.0
    """Spent, and counted already: of passes in company, which changes."""
    num_tokens: float = 0.0

    def loss(self, plain_s: float) -> float:
        """Plain passes spent beyond the tokens that they would have brought."""
        return self.passes + self.seconds / max(plain_s, SHORTEST_PASS_S) - self.num_tokens

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens += num_tokens
        self.seconds += seconds

    def settle(self, plain_s: float) -> None:
        """Counts what was spent so far in plain passes of so many seconds."""
        self.passes += self.seconds / max(plain_s, SHORTEST_PASS_S)
        self.seconds = 0.0

    def forget(self, share: float) -> None:
        """Keeps so much of everything."""
        self.seconds, self.passes, self.num_tokens = share * self.seconds, share * self.passes, share * self.num_tokens


class Gate:
    """One caption's gate. Starts open if the process knows what a plain pass costs, and else by measuring it."""

    def __init__(self, costs: CostModel, *, budget: float = FIRST_BUDGET, rest: int = FIRST_REST) -> None:
        """`budget`: plain passes that speculation may lose at first; `rest`: tokens of the first rest after that."""
        self.closed = not costs.plain_token_s.weight
        self.num_closings = 0
        self.num_gated_tokens = 0
        self._costs = costs
        self._budget = budget
        self._rest = rest
        self.num_rounds = 0
        self._has_brought = False
        """A token of the draft's, in any round."""
        self._fruitless_left: float = FRUITLESS
        """Rounds that may still judge tokens of the draft's in vain, as all have since the gate opened; any number of
        them once one did not."""
        self._num_judged = 0
        """As the last round was told."""
        self._caption, self._stretch = _Account(), _Account()
        """Of the whole caption, and of the stretch since the gate opened."""
        self._plain_samples: deque[float] = deque(maxlen=RECENT_SAMPLES)
        self._is_reckoned = False
        self._reckoned_samples: deque[float] = deque(maxlen=RECENT_SAMPLES)
        """What the target reckoned of a plain pass with each of the newest passes alone."""
        self._shortest_round_s = float("inf")
        self._num_left = RECONSIDER if self.closed else 0
        self._may_reconsider = True
        self._reconsidering = self.closed

    @property
    def plain_s(self) -> float:
        """Seconds of one more plain pass: the median of this caption's, in company of what the target reckons. Before
        there are enough, the process's average or a share of a pass over a window, and never more than the shortest
        round of this caption."""
        if self._is_reckoned or len(self._plain_samples) >= ENOUGH_SAMPLES:
            return statistics.median(self._plain_samples)
        known = self._costs.plain_token_s
        guess_s = known.value if known.weight else UNMEASURED_SHARE * self._costs.target_pass_s(0)
        return min(guess_s, self._shortest_round_s)

    @property
    def _present_s(self) -> float:
        """The same at this moment: in company, which changes, as the newest pass told."""
        return self._plain_samples[-1] if self._is_reckoned else self.plain_s

    @property
    def loss(self) -> float:
        """Plain passes that speculation has cost more than plain decoding since the gate opened; negative is gain."""
        return self._stretch.loss(self.plain_s)

    @property
    def patience_s(self) -> float:
        """Seconds that the target may be held for the draft now."""
        return min(max(self._budget - self.loss, 0.0), LONGEST_HOLD) * min(self.plain_s, self._present_s)

    @property
    def gain(self) -> float:
        """Plain passes that speculation has saved in the whole caption, of its open stretches and of the passes beside
        a draft that joined; negative is loss. 0 where no plain pass was ever measured."""
        if not self._costs.plain_token_s.weight:
            return 0.0
        return -self._caption.loss(self.plain_s)

    @property
    def brought_nothing(self) -> bool:
        """It has closed, and no round of the whole caption brought a token of the draft's."""
        return self.num_closings > 0 and not self._has_brought

    @property
    def num_passes(self) -> int:
        """Plain passes to ask for at once while the gate is closed; it thinks again after them."""
        return self._num_left

    @property
    def rest(self) -> int:
        """Tokens of the rest that it is in, or of the next one."""
        return self._rest

    @property
    def num_left_to_rest(self) -> int:
        """Tokens of the present rest that are still to come."""
        if not self.closed:
            return 0
        return self._rest - RECONSIDER + self._num_left if self._reconsidering else self._num_left

    def on_round(
        self,
        num_tokens: int,
        round_s: float,
        held_s: float,
        company: Company = ALONE,
        *,
        num_judged: int | None = None,
    ) -> None:
        """A round of speculation ended: the target was held for `held_s` and answered after `round_s` more.

        `num_judged`: tokens of the draft's of which it is known by now whether they are right; None: more than before.
        """
        self._reckon(company)
        self._shortest_round_s = min(self._shortest_round_s, round_s)
        spent_s = held_s + min(round_s, LONGEST_ROUND * self._present_s)
        self.num_rounds += 1
        self._has_brought = self._has_brought or num_tokens > 1
        if num_judged is None or num_judged > self._num_judged:
            self._fruitless_left = self._fruitless_left - 1 if num_tokens == 1 else math.inf
        self._num_judged = num_judged or 0
        self._count(num_tokens, spent_s, self._stretch, self._caption)
        loss = self.loss
        if loss <= -PROOF:
            self._budget, self._rest, self._may_reconsider = 0.0, FIRST_REST, True
        if loss < -CREDIT:
            self._stretch.forget(CREDIT / -loss)
        if self._is_outdated:
            self._measure_anew()
        elif self._fruitless_left == 0:
            self._may_reconsider = False
            self._close()
        elif loss > self._budget:
            self._close()

    def on_plain_pass(self, pass_s: float, company: Company = ALONE, *, in_batch: bool, undisturbed: bool) -> None:
        """A plain pass ended after `pass_s`.

        `in_batch`: it followed another without a round trip; `undisturbed`: no draft was at work.
        """
        self._reckon(company)
        if in_batch and undisturbed and not self._is_reckoned:
            self._plain_samples.append(pass_s)
        elif not undisturbed:
            self._count(1, min(pass_s, LONGEST_ROUND * self._present_s), self._caption)
        if not self.closed:
            return
        self.num_gated_tokens += 1
        if self._reconsidering and not undisturbed:
            return
        self._num_left -= 1
        if self._num_left == 0:
            self._think_again()

    def _reckon(self, company: Company) -> None:
        """Takes the target's word for what plain passes cost, from the first pass in company on."""
        if company.is_shared and not self._is_reckoned:
            for account in (self._stretch, self._caption):
                account.settle(self.plain_s)
            self._is_reckoned = True
            self._plain_samples.clear()
        if company.plain_s <= 0:
            return
        (self._plain_samples if self._is_reckoned else self._reckoned_samples).append(company.plain_s)
        if not self._costs.reckoned_s.weight:  # a target's first passes are too few for it to reckon
            self._costs.reckoned_s.observe(company.plain_s)

    def _count(self, num_tokens: int, spent_s: float, *accounts: _Account) -> None:
        for account in accounts:
            account.add(num_tokens, spent_s)
            if self._is_reckoned:
                account.settle(self._present_s)

    @property
    def _is_outdated(self) -> bool:
        """The target has become faster since plain passes were measured. While the gate is open none are, and with too
        long ones the slower way looks like the faster one for good."""
        measured = self._costs.reckoned_s
        if self._is_reckoned or not measured.weight or len(self._reckoned_samples) < RECONSIDER:
            return False
        return statistics.median(self._reckoned_samples) <= FASTER * measured.value

    def _measure_anew(self) -> None:
        """Forgets what plain passes took. What was spent until now is counted in those."""
        for account in (self._stretch, self._caption):
            account.settle(self.plain_s)
        self._costs.plain_token_s.weight = self._costs.reckoned_s.weight = 0.0
        self._plain_samples.clear()
        self._may_reconsider = True
        self._close()

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
        self._stretch, self._fruitless_left = _Account(), FRUITLESS
        self._costs.forget_acceptance()
