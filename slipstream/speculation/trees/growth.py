"""How a dynamic tree grows while the target judges, and what of it is judged, by the shape's name."""

import math
from dataclasses import dataclass, replace

LEAST_SAID = 1e-30
"""Stands for a chance of 0, which has no logarithm."""


@dataclass(frozen=True)
class Growth:
    """How a dynamic tree grows while the target judges, and what of it is judged."""

    width: int
    """Candidates behind every node that the draft has read."""
    rows: int = 1
    """Most nodes that a pass of the draft reads; 1: those of the main path, one by one."""
    siblings: int = 0
    """Most leaves beside the main path that a window takes."""
    whole_windows: bool = False
    """A window takes whatever is likely, wherever it hangs, and not the main path first."""
    least_chance: float = 0.0
    """Where branches are extended, the draft reads a node only if its own chance of the whole path to it, uncorrected,
    is at least this. The target waits for no others, and a draft that has better things to do rests until the root
    moves."""

    @property
    def least_log(self) -> float:
        """Natural logarithm of `least_chance`."""
        return math.log(self.least_chance) if self.least_chance else -math.inf

    @property
    def of_sampled_text(self) -> "Growth":
        """The same where text is sampled, of which the draft has to read all: it tells how likely it finds a token, and
        that the target draws the same one, by the same numbers, is far more likely."""
        return replace(self, least_chance=0.0)

    @property
    def extends_branches(self) -> bool:
        """The draft goes on behind others than its best candidates."""
        return self.rows > 1

    @property
    def nodes_per_pass(self) -> int:
        """Most nodes that a pass of the draft adds."""
        return self.width * self.rows


GROWTHS = {
    "siblings": Growth(width=2, siblings=4),
    "branches": Growth(width=3, rows=4, siblings=4, least_chance=0.2),
    "dynamic_tree": Growth(width=3, rows=6, whole_windows=True, least_chance=0.2),
}
"""Of the shapes that are dynamic trees."""


def said_log(p: float) -> float:
    """Natural logarithm of what a draft says of a token, given those before: added up down a path, at the gateway as at
    the draft, it neither vanishes nor rounds otherwise."""
    return math.log(max(p, LEAST_SAID))
