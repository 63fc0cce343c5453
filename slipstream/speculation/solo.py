"""What the target does while no draft writes for it: passes over its own text, or windows that it drafts itself. Knows
no line and no window of a draft."""

from dataclasses import dataclass

from slipstream.speculation.costs import CostModel
from slipstream.speculation.gate import Gate
from slipstream.speculation.line import DraftPhase
from slipstream.speculation.passes import Passes, PassKind

SOLO_PASSES = 4
"""Passes asked for at once while there is no draft: fewer round trips, yet a draft that comes back waits little."""
JOINING_PASSES = 2
"""The same while a draft prefills and may be ready any moment."""


@dataclass(frozen=True)
class Solo:
    """One caption's passes without a draft."""

    costs: CostModel
    gate: Gate | None
    num_passes: int
    """Asked for at once while there is no draft."""
    self_draft: int
    """Above 0: no draft takes part, and the target drafts so many tokens for each of its passes itself."""

    def ask(self, passes: Passes, phase: DraftPhase) -> int:
        """Notes the next request, over no window; the result is how many passes it is for."""
        if self.self_draft:
            passes.ask((), self.self_draft, PassKind.SELF, self.num_passes)
            return self.num_passes
        num_passes = self._num_plain_passes(phase)
        passes.ask((), 0, PassKind.PLAIN, num_passes)
        return num_passes

    def observe(self, pass_s: float, phase: DraftPhase, *, in_batch: bool) -> None:
        """A plain pass ended after `pass_s` seconds. `in_batch`: it followed another without a round trip."""
        undisturbed = phase in (DraftPhase.ABSENT, DraftPhase.RESTING)
        if in_batch and undisturbed:
            self.costs.plain_token_s.observe(pass_s)
        if self.gate is not None:
            self.gate.on_plain_pass(pass_s, in_batch=in_batch, undisturbed=undisturbed)

    def _num_plain_passes(self, phase: DraftPhase) -> int:
        if self.gate is not None and self.gate.closed:
            return self.gate.num_passes
        return self.num_passes if phase is DraftPhase.ABSENT else JOINING_PASSES
