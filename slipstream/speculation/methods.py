"""The methods by name, each a composition: who drafts, what it sees of the video, when passes run, how windows look.

No method has a loop of its own: all run on the same pipeline, services and engine, and every part can be changed alone.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from slipstream.errors import InvalidRequest

ATTENTION_PRUNERS = ("attention", "attention_variation", "specvlm")
"""Those that rank by attention, which the target must record while the prompt runs."""
PRUNERS = (
    "uv_spread",
    "uv",
    "uv_cosine",
    *ATTENTION_PRUNERS,
    "random",
    "uniform",
    "frame",
    "window",
    "dycoke",
    "fastvid",
    "none",
    "all",
)
"""The names of `slipstream.pruning`, for processes without torch."""
GUIDANCE_KINDS = ("hidden_states", "scores")
POSITIONS = ("original", "compact")
"""Position ids of the kept video tokens at the draft."""
LOSSY_METHODS = ("fastv", "pyramiddrop", "sparsevlm", "dycoke")
SPARSE_GAMMA = 9
"""Window of STD in the papers (000, table 1; 004, section 4)."""


class Drafter(StrEnum):
    """Who writes the tokens that the target judges."""

    NONE = "none"
    DRAFT = "draft"
    """The draft service, with its own model."""
    SELF = "self"
    """The target itself, with a part of its own cache."""


class Shape(StrEnum):
    """What a window is."""

    CHAIN = "chain"
    TREE = "tree"


@dataclass(frozen=True)
class Lossy:
    """A baseline that prunes the target's own video tokens, so that its text is another one (paper 000, table 2)."""

    method: str
    keep: float
    """Share of the video tokens kept, averaged over the layers."""

    def check(self) -> "Lossy":
        """Itself. Raises `InvalidRequest` for a name or a share that there is not."""
        if self.method not in LOSSY_METHODS:
            raise InvalidRequest(f"lossy method {self.method!r} is unknown; choose one of {', '.join(LOSSY_METHODS)}")
        if not 0.0 < self.keep <= 1.0:
            raise InvalidRequest(f"lossy_keep is the kept share of the video tokens, above 0 to 1, not {self.keep}")
        return self


@dataclass(frozen=True)
class Method:
    """A way to decode losslessly. All of them give the target's text."""

    name: str
    drafter: Drafter
    pruner: str = "none"
    policy: str = "sequential"
    shape: Shape = Shape.CHAIN
    gate: bool = False
    gamma: int | None = None
    """None: the policy's own."""

    @property
    def speculative(self) -> bool:
        """The draft service takes part."""
        return self.drafter is Drafter.DRAFT

    def changed(
        self, pruner: str | None, policy: str | None, shape: str | None, gate: bool | None, gamma: int | None
    ) -> "Method":
        """The method with these parts in place of its own; None leaves a part. What a method without a draft does not
        have is not looked at.

        Raises:
            InvalidRequest: parts that there are not, or that do not go together.
        """
        given = {"pruner": pruner, "policy": policy, "shape": shape, "gate": gate, "gamma": gamma}
        changes = {name: value for name, value in given.items() if value is not None}
        if shape is not None and shape not in tuple(Shape):
            raise InvalidRequest(f"shape {shape!r} is unknown; choose one of {', '.join(Shape)}")
        if shape is not None:
            changes["shape"] = Shape(shape)
        method = replace(self, **changes)  # type: ignore[arg-type]
        if method.shape is Shape.TREE and (method.policy != "sequential" or method.gate):
            raise InvalidRequest("a tree is drafted and verified in turns: ask for policy 'sequential' without a gate")
        return method


_METHODS = (
    Method("slipstream", Drafter.DRAFT, "uv_spread", "self_clocked", gate=True),
    Method("parallelvlm", Drafter.DRAFT, "uv", "fixed"),
    Method("specvlm", Drafter.DRAFT, "specvlm", shape=Shape.TREE),
    Method("sd", Drafter.DRAFT),
    Method("sd_tree", Drafter.DRAFT, shape=Shape.TREE),
    Method("onsd", Drafter.DRAFT, "all"),
    Method("std", Drafter.SELF, gamma=SPARSE_GAMMA),
    Method("autoregressive", Drafter.NONE),
)
METHODS = {method.name: method for method in _METHODS}


def get_method(name: str) -> Method:
    """The method of that name. Raises `InvalidRequest` with the names there are."""
    if name not in METHODS:
        raise InvalidRequest(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    return METHODS[name]
