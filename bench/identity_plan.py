"""Which settings the identity run compares on which clip: every level of every setting equally often. Pure."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")
GUIDED_PRUNERS = ("uv", "uv_spread")
PRUNERS = (*GUIDED_PRUNERS, "random", "uniform", "none")
ALPHAS = (0.0, 0.5, 0.9, 1.0)
WINDOWS = tuple(range(1, 17))
POLICIES = ("self_clocked", "fixed")
GUIDANCE_KINDS = ("hidden_states", "scores")
POSITIONS = ("original", "compact")
CUTS = ("none", "none", "first token", "inside", "inside", "at the end")
"""Where max_new_tokens cuts the reference's text."""


@dataclass(frozen=True)
class Setting:
    """One way to caption a clip. `cut_share` says where "inside" cuts, as a share of the text."""

    method: str
    pruner: str = "uv"
    alpha: float = 0.9
    policy: str = "self_clocked"
    max_window: int = 16
    guidance: str = "hidden_states"
    positions: str = "original"
    seed: int = 0
    cut: str = "none"
    cut_share: float = 0.5

    def limit(self, text_len: int, max_new_tokens: int) -> int:
        """max_new_tokens for a text that has `text_len` tokens without a cut."""
        inside = min(max(round(self.cut_share * text_len), 1), max(text_len - 1, 1))
        return {"none": max_new_tokens, "first token": 1, "inside": inside, "at the end": text_len}[self.cut]


def plan_settings(per_clip: Sequence[int], seed: int) -> list[list[Setting]]:
    """For every clip plain decoding, then `per_clip[i]` speculative settings.

    The first two of these are twins that differ in the kind of guidance only, as both must keep the same tokens.
    """
    rng = random.Random(seed)
    factors = _Factors(rng)
    return [[_plain(factors), *_speculative(factors, count)] for count in per_clip]


def coverage(settings: Iterable[Setting]) -> dict[str, dict[str, int]]:
    """How often each level of each setting occurs."""
    chosen = list(settings)
    speculative = [setting for setting in chosen if setting.method == "parallel"]
    columns: dict[str, Counter[object]] = {
        "method": Counter(setting.method for setting in chosen),
        "cut": Counter(setting.cut for setting in chosen),
        **{
            name: Counter(getattr(setting, name) for setting in speculative)
            for name in ("pruner", "alpha", "max_window", "policy", "guidance", "positions")
        },
    }
    return {
        name: {str(level): counts[level] for level in sorted(counts, key=_order)} for name, counts in columns.items()
    }


class _Factors:
    """Endless balanced sequences of levels, shuffled independently of each other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pruned = _balanced([(pruner, alpha) for pruner in PRUNERS for alpha in ALPHAS], rng)
        self.guided = _balanced([(pruner, alpha) for pruner in GUIDED_PRUNERS for alpha in ALPHAS], rng)
        self.window = _balanced(WINDOWS, rng)
        self.policy = _balanced(POLICIES, rng)
        self.guidance = _balanced(GUIDANCE_KINDS, rng)
        self.positions = _balanced(POSITIONS, rng)
        self.cut = _balanced(CUTS, rng)
        self.plain_cut = _balanced(CUTS, rng)

    def setting(self, pruner: str, alpha: float) -> Setting:
        return Setting(
            "parallel",
            pruner,
            alpha,
            next(self.policy),
            next(self.window),
            next(self.guidance),
            next(self.positions),
            self.rng.randrange(2**32),
            next(self.cut),
            self.rng.random(),
        )


def _plain(factors: _Factors) -> Setting:
    return Setting("autoregressive", cut=next(factors.plain_cut), cut_share=factors.rng.random())


def _speculative(factors: _Factors, count: int) -> list[Setting]:
    twin = factors.setting(*next(factors.guided))
    twins = [replace(twin, guidance=kind) for kind in GUIDANCE_KINDS]
    return [*twins, *(factors.setting(*next(factors.pruned)) for _ in range(count - 2))][:count]


def _balanced(levels: Sequence[T], rng: random.Random) -> Iterator[T]:
    while True:
        yield from rng.sample(levels, len(levels))


def _order(level: object) -> tuple[int, object]:
    return (0, level) if isinstance(level, int | float) else (1, level)
