"""Whether speculation pays from one caption of a kind to the next: what a process remembers. Pure arithmetic."""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from slipstream.speculation.gate import FIRST_BUDGET, FIRST_REST, LONGEST_REST, PROOF, Gate
from slipstream.speculation.pacing import CostModel, DecayedMean, foreseen_speedup
from slipstream.speculation.placement import MeasuredCaptions

# A gate of one caption learns what its draft is worth, and the next caption would pay to learn it again. So the
# process keeps a *record* for every kind of captions: how much speculation may still lose there (its *margin*, in
# plain passes), and once that is used up, how many tokens are decoded plainly before the next trial.
# What captions gain and lose is added to the margin, up to MOST_MARGIN: a kind that was worth its draft survives some
# bad captions, and one that has turned bad is noticed after MOST_MARGIN / (FIRST_BUDGET + o) of them. A kind without
# margin *rests*: its captions are plain ones, with no draft at all. Then one caption is a *trial*, with TRIAL_MARGIN
# for margin. The rest after a failed trial is twice as long as the last, and long enough that what the trial lost is
# at most TRIAL_SHARE of it. Nothing here is random.

NEW_MARGIN = 2.5
"""What a kind may lose of which nothing is known: with the round that exceeds it, less than 5% of 70 tokens."""
MOST_MARGIN = 24.0
CAPTION_SHARE = 1 / 3
"""What one caption may lose of a large margin."""
TRIAL_MARGIN = 2.0
"""What a trial may lose: one round without luck does not end it, as a good draft has one in ten of these."""
TRIAL_SHARE = 0.01
MOST_ENTRIES = 256
"""Kinds and prompts that are remembered."""


class Start(StrEnum):
    """How a caption begins."""

    OPEN = "open"
    """A draft takes part, and the caption's gate watches it."""
    TRIAL = "trial"
    """The same after a rest, with a small budget."""
    REST = "rest"
    """No draft takes part."""
    ALONE = "alone"
    """The method has no gate, or one that knows nothing of other captions."""


@dataclass
class GateRecord:
    """What captions of one kind have shown."""

    margin: float = NEW_MARGIN
    rest: int = FIRST_REST
    """Tokens of the last rest, or of the next one."""
    num_left: int = 0
    """Tokens to be decoded plainly before the next trial."""
    num_drafted: int = 0
    """Captions so far in which a draft took part."""
    resting: bool = False
    is_doubtful: bool = False
    """It has been tried after a rest, and has not proved itself since."""
    on_trial: bool = False
    """A caption is under way that decides whether the rest goes on; others do not wait for it."""

    @property
    def budget(self) -> float:
        """What the next caption may lose."""
        return max(min(self.margin, FIRST_BUDGET), CAPTION_SHARE * self.margin)

    def begin(self) -> Start:
        """How a caption that begins now is to begin. A trial must be settled or given up."""
        if not self.resting:
            return Start.OPEN
        if self.num_left > 0 or self.on_trial:
            return Start.REST
        self.on_trial = True
        return Start.TRIAL

    def gate(self, start: Start, costs: CostModel) -> Gate | None:
        """The gate of a caption that begins so; None: it rests."""
        if start is Start.REST:
            return None
        if start is Start.OPEN:
            return Gate(costs, budget=self.budget, rest=self.rest)
        costs.forget_acceptance()
        return Gate(costs, budget=TRIAL_MARGIN, rest=min(2 * self.rest, LONGEST_REST))

    def reason(self, start: Start) -> str:
        """Why a caption begins so, in a few words."""
        if start is Start.TRIAL:
            return "trial after a rest"
        if start is Start.REST:
            ahead = "a trial is under way" if self.on_trial else f"{self.num_left} tokens to rest"
            return f"no gain in {self.num_drafted} captions; {ahead}"
        if not self.num_drafted:
            return "nothing known yet"
        return f"may lose {self.budget:.1f} passes after {self.num_drafted} captions"

    def end(self, start: Start, gate: Gate | None, num_tokens: int) -> None:
        """A caption of so many tokens ended, which began so with that gate. Where the draft brought nothing it counts
        as if it had lost all that it might: gates soon close to such drafts, which would be tried the more often."""
        if gate is None:
            self.num_left = max(self.num_left - num_tokens, 0)
            return
        self.num_drafted += 1
        if start is Start.TRIAL:
            self.on_trial = False
            if not gate.num_rounds:  # the draft was too late, or did not come: it has shown nothing
                self.num_left = round(max(-gate.gain, 0.0) / TRIAL_SHARE)
                return
            if self.resting:  # else one that began before the rest has ended it
                self.margin, self.rest, self.is_doubtful = TRIAL_MARGIN, min(2 * self.rest, LONGEST_REST), True
        gain = min(gate.gain, -self.budget) if gate.brought_nothing else gate.gain
        self.margin = min(self.margin + gain, MOST_MARGIN)
        self.resting = self.margin <= 0
        if self.resting:
            self.rest, self.num_left = gate.rest, gate.num_left_to_rest or gate.rest
            if self.is_doubtful:
                self.num_left = max(self.num_left, round((TRIAL_MARGIN - self.margin) / TRIAL_SHARE))
        elif self.margin >= FIRST_BUDGET + PROOF:
            self.rest, self.is_doubtful = FIRST_REST, False

    def give_up(self, start: Start) -> None:
        """A caption ended before its time, of which nothing is learnt."""
        if start is Start.TRIAL:
            self.on_trial = False


@dataclass(frozen=True)
class Kind:
    """Captions that are alike: what one of them measured holds for the others."""

    size: Hashable
    """Whatever decides what a plain pass costs beside the load: the target, and the length of its context."""
    settings: Hashable
    """Whatever decides how a draft does: the draft, the method and its parts."""
    load: int
    """Captions at once, in powers of two."""
    prompt: str
    """Names a prompt that has been asked before; '' are all others."""


@dataclass(frozen=True)
class Opening:
    """How one caption begins, and why. Hand it back to the book when the caption has ended."""

    kind: Kind
    start: Start
    reason: str
    costs: CostModel
    """The caption's own: what the process knows, to be changed by what is measured."""
    gate: Gate | None = None
    record: GateRecord | None = None


@dataclass
class _Averages:
    """Of captions of one size: how long their first token takes, and how many they have."""

    first_token_s: DecayedMean = field(default_factory=lambda: DecayedMean(0.0))
    num_tokens: DecayedMean = field(default_factory=lambda: DecayedMean(0.0))


class CaptionBook:
    """What captions have taught this process, by kind: what passes cost, and whether speculation pays.

    A kind of which nothing is known begins with what the relative that ended last (another load, another prompt) knows
    of the draft, and with a trial's margin where that one rests or its costs at this load foresee a loss.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[Kind, GateRecord] = OrderedDict()
        self._costs: OrderedDict[Kind, CostModel] = OrderedDict()
        self._relatives: OrderedDict[Hashable, Kind] = OrderedDict()
        self._target_costs: OrderedDict[Hashable, CostModel] = OrderedDict()
        """By size and load: the target's passes are the same whatever the draft, and plain captions have them too."""
        self._prompts: OrderedDict[str, None] = OrderedDict()
        self._averages: OrderedDict[Hashable, _Averages] = OrderedDict()

    @property
    def num_kinds(self) -> int:
        """Kinds of which something is known of their drafts."""
        return len(self._records)

    @property
    def num_resting(self) -> int:
        """Those among them that decode plainly now."""
        return sum(record.resting for record in self._records.values())

    def prompt_class(self, prompt: str) -> str:
        """Names the prompt if it was asked before; those that are asked once would each have to learn anew."""
        name = hashlib.sha256(prompt.encode()).hexdigest()[:16]
        is_known = name in self._prompts
        _remember(self._prompts, name, None)
        return name if is_known else ""

    def begin(self, kind: Kind, fresh: CostModel, *, gated: bool, max_window: int) -> Opening:
        """What a caption begins with: `fresh` costs where none are known. `gated`: this book decides for its gate."""
        relative = self._relatives.get((kind.size, kind.settings), kind)
        costs = self._costs.get(kind, self._costs.get(relative, fresh)).fork()
        target = self._target_costs.get((kind.size, kind.load), fresh).fork()
        costs.plain_token_s, costs.reckoned_s = target.plain_token_s, target.reckoned_s
        if kind not in self._costs and target.plain_token_s.weight:
            costs.target_pass_s = target.target_pass_s
        if not gated:
            return Opening(kind, Start.ALONE, "", costs)
        foreseen = foreseen_speedup(max_window, costs) if _is_measured(costs) else None
        record = self._records.get(kind) or self._new_record(relative, foreseen)
        _remember(self._records, kind, record)
        start = record.begin()
        reason = record.reason(start) + (f"; its costs foresee {foreseen:.2f}x" if foreseen else "")
        return Opening(kind, start, reason, costs, record.gate(start, costs), record)

    @property
    def newest(self) -> MeasuredCaptions | None:
        """What captions with a draft have shown, of the kind that ended last and its relatives at other loads; None
        before both models' passes were measured, and where captions of hundreds of other kinds came since."""
        drafted = [kind for kind, costs in self._costs.items() if _is_measured(costs)]
        if not drafted:
            return None
        newest = drafted[-1]
        alike = {kind.load: self._costs[kind] for kind in drafted if _is_relative(kind, newest)}
        averages = self._averages.get((newest.size, newest.settings))
        if averages is None:  # forgotten, as captions of many other kinds have ended since without a draft
            return None
        by_captions = {2 ** (load - 1): costs.draft_pass_s.value for load, costs in alike.items()}
        return MeasuredCaptions(alike[min(alike)], by_captions, averages.first_token_s.value, averages.num_tokens.value)

    def end(self, opening: Opening, num_tokens: int, first_token_s: float = 0.0) -> None:
        """The caption reached its end, with so many tokens; the first came so long after its frames."""
        kind = opening.kind
        averages = self._averages.get((kind.size, kind.settings)) or _Averages()
        averages.first_token_s.observe(first_token_s)
        averages.num_tokens.observe(num_tokens)
        _remember(self._averages, (kind.size, kind.settings), averages)
        _remember(self._target_costs, (kind.size, kind.load), opening.costs)
        if opening.start is not Start.REST:
            _remember(self._costs, kind, opening.costs)
            _remember(self._relatives, (kind.size, kind.settings), kind)
        if opening.record is not None:
            opening.record.end(opening.start, opening.gate, num_tokens)

    def give_up(self, opening: Opening) -> None:
        """The caption ended otherwise."""
        if opening.record is not None:
            opening.record.give_up(opening.start)

    def _new_record(self, relative: Kind, foreseen: float | None) -> GateRecord:
        known = self._records.get(relative)
        is_doubtful = (known is not None and known.resting) or (foreseen is not None and foreseen < 1)
        return GateRecord(margin=TRIAL_MARGIN if is_doubtful else NEW_MARGIN)


def _is_measured(costs: CostModel) -> bool:
    return costs.plain_token_s.weight > 0 and costs.draft_pass_s.weight > 0


def _is_relative(one: Kind, other: Kind) -> bool:
    return (one.size, one.settings) == (other.size, other.settings)


def _remember(entries: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    """Notes the newest entry, and forgets the oldest ones beyond MOST_ENTRIES."""
    entries[key] = value
    entries.move_to_end(key)
    while len(entries) > MOST_ENTRIES:
        entries.popitem(last=False)
