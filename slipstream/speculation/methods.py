"""The methods by name, each a composition: who drafts, what it sees of the video, when passes run, how windows look.

No method has a loop of its own: all run on the same pipeline, services and engine, and every part can be changed alone.
The names of parts are in tables here, since processes without torch need them; the code of a part is imported from
where its table says when it is first used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from slipstream.errors import InvalidRequest
from slipstream.speculation.trees.growth import GROWTHS, Growth

# -- pruners ----------------------------------------------------------------------------------------------------------


class GuidanceKind(StrEnum):
    """What guidance a draft pulls from the target."""

    HIDDEN_STATES = "hidden_states"
    """The states that scores are made from: the draft does the scoring."""
    SCORES = "scores"


class Positions(StrEnum):
    """Position ids of the tokens behind pruned ones."""

    ORIGINAL = "original"
    """As if nothing had been pruned."""
    COMPACT = "compact"
    """Without gaps."""


def check_positions(name: str) -> None:
    """Raises `InvalidRequest` for a name that is none of `Positions`."""
    if name not in tuple(Positions):
        raise InvalidRequest(f"unknown positions {name!r}; known: {', '.join(Positions)}")


class Score(StrEnum):
    """What a pruner ranks video tokens by, one number a token; all are made by the target."""

    SIMILARITY_VARIATION = "similarity_variation"
    """Growth of the cosine similarity to the text through layers 1..L (ParallelVLM, eq. 3)."""
    SIMILARITY = "similarity"
    """That similarity after layer L."""
    ATTENTION = "attention"
    """What the text pays to the token, averaged over layers, heads and text (SpecVLM, eq. 5). Known at the prefill's
    end only."""
    ATTENTION_VARIATION = "attention_variation"
    """Growth of the attention from layer 1 to layer L (ParallelVLM, figure 9)."""

    @property
    def is_attention(self) -> bool:
        """Needs attention to be recorded while the prompt runs."""
        return self in (Score.ATTENTION, Score.ATTENTION_VARIATION)


@dataclass(frozen=True)
class PrunerSpec:
    """A pruner by name: `module:function` of its `Keep` (see `slipstream.pruning.base`), and what it ranks by."""

    name: str
    keep: str
    score: Score | None = None
    """None: it needs no guidance."""
    alpha: float | None = None
    """The share that it prunes, whatever is asked; None: as is asked."""


_PRUNERS = (
    PrunerSpec("uv_spread", "slipstream.pruning.guided:keep_best_of_stretches", Score.SIMILARITY_VARIATION),
    PrunerSpec("uv", "slipstream.pruning.guided:keep_best", Score.SIMILARITY_VARIATION),
    PrunerSpec("uv_cosine", "slipstream.pruning.guided:keep_best", Score.SIMILARITY),
    PrunerSpec("attention", "slipstream.pruning.guided:keep_best", Score.ATTENTION),
    PrunerSpec("attention_variation", "slipstream.pruning.guided:keep_best", Score.ATTENTION_VARIATION),
    PrunerSpec("specvlm", "slipstream.pruning.guided:keep_best_then_spread", Score.ATTENTION),
    PrunerSpec("random", "slipstream.pruning.unguided:keep_random"),
    PrunerSpec("uniform", "slipstream.pruning.unguided:keep_evenly"),
    PrunerSpec("frame", "slipstream.pruning.unguided:keep_frames"),
    PrunerSpec("window", "slipstream.pruning.unguided:keep_first_and_latest"),
    PrunerSpec("dycoke", "slipstream.pruning.unguided:keep_changed_tokens"),
    PrunerSpec("fastvid", "slipstream.pruning.unguided:keep_changed_frames"),
    PrunerSpec("none", "slipstream.pruning.unguided:keep_first", alpha=0.0),
    PrunerSpec("all", "slipstream.pruning.unguided:keep_first", alpha=1.0),
)
PRUNER_SPECS = {spec.name: spec for spec in _PRUNERS}
PRUNERS = tuple(PRUNER_SPECS)
ATTENTION_PRUNERS = tuple(spec.name for spec in _PRUNERS if spec.score is not None and spec.score.is_attention)
"""Those that rank by attention, which the target must record while the prompt runs."""

# -- lossy baselines --------------------------------------------------------------------------------------------------


class LossyRank(StrEnum):
    """What decides which video tokens a lossy baseline keeps."""

    LAST_TEXT = "last_text"
    """The attention that the prompt's last token pays them in the layer before."""
    RATERS = "raters"
    """The same of those text tokens that have to do with the video, see `slipstream.pruning.lossy.text_raters`."""
    REDUNDANCY = "redundancy"
    """How little they repeat an earlier frame, before any layer: the pruner "dycoke"."""


@dataclass(frozen=True)
class LossySpec:
    """A lossy baseline: what ranks the video tokens, and after how many of n layers it drops some."""

    rank: LossyRank
    drops_after: Callable[[int], tuple[int, ...]]


LOSSY_SPECS = {
    "fastv": LossySpec(LossyRank.LAST_TEXT, lambda num_layers: (2,)),
    "pyramiddrop": LossySpec(LossyRank.LAST_TEXT, lambda num_layers: _shares(num_layers, (1, 2, 3), 4)),
    "sparsevlm": LossySpec(LossyRank.RATERS, lambda num_layers: _shares(num_layers, (2, 6, 15), 32)),
    "dycoke": LossySpec(LossyRank.REDUNDANCY, lambda num_layers: (0,)),
}
LOSSY_METHODS = tuple(LOSSY_SPECS)


def _shares(num_layers: int, places: tuple[int, ...], of: int) -> tuple[int, ...]:
    """The layers of a model of `num_layers` that are where `places` are in one of `of` layers."""
    return tuple(num_layers * place // of for place in places)


@dataclass(frozen=True)
class Lossy:
    """A baseline that prunes the target's own video tokens, so that its text is another one (ParallelVLM, table 2)."""

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


# -- methods ----------------------------------------------------------------------------------------------------------

SPARSE_GAMMA = 9
"""Window of STD in the papers (ParallelVLM, table 1; Sparse-to-Dense, section 4)."""


TOLERANT_METHOD = "hsd"
"""The one that may take a hint's token for the target's own, see `slipstream.speculation.hints.tolerance`."""
HINT_DEPTH, HINT_ROWS = 32, 48
"""Levels and rows of a tree from hints, at most; how many of them a pass takes follows from what rows cost."""


class Drafter(StrEnum):
    """Who writes the tokens that the target judges."""

    NONE = "none"
    DRAFT = "draft"
    """The draft service, with its own model."""
    SELF = "self"
    """The target itself, by the method's `local_drafter`."""


class Shape(StrEnum):
    """What a window is."""

    CHAIN = "chain"
    TREE = "tree"
    """Static, and drafted and judged in turns."""
    SIBLINGS = "siblings"
    """A chain that is written ahead, and the second best candidates beside its tokens."""
    BRANCHES = "branches"
    """The same where the draft goes on behind whatever is likely."""
    DYNAMIC_TREE = "dynamic_tree"
    """And windows take whatever is likely, too."""


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
    local_drafter: str = ""
    """What drafts at the target, alone (SELF) or beside the draft's windows: `module:class` of its
    `slipstream.engine.local_drafter.LocalDrafter`."""
    takes_hints: bool = False
    """It drafts from the texts of the option `prediction`, and from those that come later."""
    max_window: int | None = None
    """Most rows of a pass, where the method wants others than the gateway's default."""

    @property
    def speculative(self) -> bool:
        """The draft service takes part."""
        return self.drafter is Drafter.DRAFT

    @property
    def is_hybrid(self) -> bool:
        """The target hangs trees of hints beside the draft's windows."""
        return self.speculative and bool(self.local_drafter)

    @property
    def growth(self) -> Growth | None:
        """Of a dynamic tree; None where windows have another shape."""
        return GROWTHS.get(self.shape)

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
            raise _unfit(given, "a tree is drafted and verified in turns: ask for policy 'sequential' without a gate")
        if method.growth is not None and method.policy != "self_clocked":
            why = f"a window of {method.shape.value} grows while the target judges: ask for policy 'self_clocked'"
            raise _unfit(given, why)
        if method.shape is not Shape.CHAIN and method.is_hybrid:
            raise InvalidRequest(
                f"method {self.name!r} makes trees of hints, and the draft's windows are chains in them"
            )
        return method


def _unfit(given: Mapping[str, Any], why: str) -> InvalidRequest:
    """Begins with a part that was given, as what a method has by itself goes together."""
    name = next(name for name in ("shape", "policy", "gate") if given[name] is not None)
    return InvalidRequest(f"{name} {given[name]!r}: {why}")


_HINTS = "slipstream.engine.hint_drafter"
_HINT_TREES: dict[str, Any] = {"shape": Shape.TREE, "gamma": HINT_DEPTH, "max_window": HINT_ROWS}
_METHODS = (
    Method("slipstream", Drafter.DRAFT, "uv_spread", "self_clocked", gate=True),
    Method("slipstream_siblings", Drafter.DRAFT, "uv_spread", "self_clocked", Shape.SIBLINGS, gate=True),
    Method("slipstream_branches", Drafter.DRAFT, "uv_spread", "self_clocked", Shape.BRANCHES, gate=True),
    Method("slipstream_tree", Drafter.DRAFT, "uv_spread", "self_clocked", Shape.DYNAMIC_TREE, gate=True),
    Method("parallelvlm", Drafter.DRAFT, "uv", "fixed"),
    Method("specvlm", Drafter.DRAFT, "specvlm", shape=Shape.TREE),
    Method("sd", Drafter.DRAFT),
    Method("sd_tree", Drafter.DRAFT, shape=Shape.TREE),
    Method("onsd", Drafter.DRAFT, "all"),
    Method("std", Drafter.SELF, gamma=SPARSE_GAMMA, local_drafter="slipstream.engine.sparse_drafter:SparseDrafter"),
    Method("hints", Drafter.SELF, local_drafter=f"{_HINTS}:HintsDrafter", takes_hints=True, **_HINT_TREES),
    Method("hsd", Drafter.SELF, local_drafter=f"{_HINTS}:HsdDrafter", takes_hints=True, **_HINT_TREES),
    Method(
        "hints_draft",
        Drafter.DRAFT,
        "uv_spread",
        "self_clocked",
        gate=True,
        local_drafter=f"{_HINTS}:HintsDrafter",
        takes_hints=True,
    ),
    Method("prompt_lookup", Drafter.SELF, local_drafter=f"{_HINTS}:LookupDrafter", **_HINT_TREES),
    Method("autoregressive", Drafter.NONE),
)
METHODS = {method.name: method for method in _METHODS}


def get_method(name: str) -> Method:
    """The method of that name. Raises `InvalidRequest` with the names there are."""
    if name not in METHODS:
        raise InvalidRequest(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    return METHODS[name]
