"""The methods that the benchmark compares: on which processes each runs, with which options, and what it is called.

Knows no process and no clock.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from slipstream import CaptionOptions
from slipstream.errors import InvalidRequest
from slipstream.speculation.methods import LOSSY_METHODS, METHODS

ENGINE_PLAIN = "autoregressive"
OUTSIDE_PLAIN = "transformers"
SLIPSTREAM, PARALLELVLM = "slipstream", "parallelvlm"
BLIND = "all"
"""The pruner of a draft that sees text alone."""
ALPHA, MAX_WINDOW, LOSSY_KEEP = 0.9, 24, 0.5
TOKENS_A_VERIFICATION, RUN_BETWEEN_DEATHS = "tokens a verification", "run between deaths"


class Place(StrEnum):
    """Which processes caption."""

    PAIR = "pair"
    """Target and draft, a core each."""
    SAME = "same"
    """The target's checkpoint as draft, too; a core each."""
    PAIR_BOTH_CORES = "pair_both_cores"
    """Target and draft as `slipstream up` starts them: each prefills on every core, and decodes on one of two."""
    BOTH_CORES = "both_cores"
    """The target alone, with a thread on every core."""
    OUTSIDE = "outside"
    """transformers, on one core."""


class Family(StrEnum):
    """What kind of method it is; decides what its papers call M."""

    PLAIN = "plain"
    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    SELF = "self"
    LOSSY = "lossy"
    FAIRNESS = "fairness"
    OUTSIDE = "outside"


@dataclass(frozen=True)
class BenchMethod:
    """One row of the table."""

    name: str
    title: str
    family: Family
    place: Place = Place.PAIR
    options: CaptionOptions = field(default_factory=CaptionOptions)
    """What it asks of the gateway beside the clip, the prompt and the lengths."""
    devices: int = 2
    """Cores that it is given."""
    max_clips: int | None = None
    """None: every clip."""

    @property
    def lossy(self) -> bool:
        """Its text is not the target's."""
        return self.family is Family.LOSSY

    @property
    def m_kind(self) -> str | None:
        """What M counts: for drafting in turns the tokens that a verification yields, for drafting in parallel the
        accepted run between two rejections (ParallelVLM)."""
        if self.family in (Family.SEQUENTIAL, Family.SELF):
            return TOKENS_A_VERIFICATION
        return RUN_BETWEEN_DEATHS if self.family is Family.PARALLEL else None


def _on_stack(name: str, title: str, family: Family, method: str = "", **others: Any) -> BenchMethod:
    """`others`: fields of the row, and options of the caption."""
    shape = {field: others.pop(field) for field in ("place", "devices", "max_clips") if field in others}
    options = CaptionOptions.from_mapping({"method": method or name, **others})
    return BenchMethod(name, title, family, options=options, **shape)


def methods(side_clips: int) -> tuple[BenchMethod, ...]:
    """All of them, in the table's order; those beside the question run on the first `side_clips` clips only."""
    in_turns, side = partial(_on_stack, family=Family.SEQUENTIAL), {"max_clips": side_clips}
    return (
        _on_stack(ENGINE_PLAIN, "plain decoding", Family.PLAIN, devices=1),
        in_turns("sd", "SD, gamma 5"),
        in_turns("sd_tree", "SD, static tree"),
        in_turns("specvlm", "SpecVLM"),
        in_turns("specvlm_chain", "SpecVLM, chain", method="specvlm", shape="chain"),
        in_turns("specvlm_attention", "SpecVLM, attention alone", method="specvlm", pruner="attention"),
        in_turns("specvlm_uniform", "SpecVLM, uniform alone", method="specvlm", pruner="uniform"),
        in_turns("onsd", "text-only draft"),
        _on_stack("std", "STD, gamma 9", Family.SELF, devices=1),
        _on_stack(PARALLELVLM, "ParallelVLM", Family.PARALLEL),
        _on_stack(SLIPSTREAM, "Slipstream", Family.PARALLEL),
        *(
            _on_stack(name, f"Slipstream, {name.partition('_')[2]}", Family.PARALLEL)
            for name, method in METHODS.items()
            if method.growth is not None
        ),
        _on_stack("slipstream_open", "Slipstream, no gate", Family.PARALLEL, SLIPSTREAM, gate=False, **side),
        _on_stack(
            "parallelvlm_same", "ParallelVLM, target as draft", Family.PARALLEL, PARALLELVLM, place=Place.SAME, **side
        ),
        *(
            _on_stack(name, f"{title}, keeps {LOSSY_KEEP:.0%}", Family.LOSSY, ENGINE_PLAIN, devices=1, **asked, **side)
            for name, title in zip(LOSSY_METHODS, ("FastV", "PyramidDrop", "SparseVLM", "DyCoke"), strict=True)
            for asked in ({"lossy": name, "lossy_keep": LOSSY_KEEP},)
        ),
        _on_stack(
            "slipstream_both_cores",
            "Slipstream, prompts on both cores",
            Family.PARALLEL,
            SLIPSTREAM,
            place=Place.PAIR_BOTH_CORES,
        ),
        _on_stack("plain_both_cores", "plain, both cores", Family.FAIRNESS, ENGINE_PLAIN, place=Place.BOTH_CORES),
        *(
            BenchMethod(f"{OUTSIDE_PLAIN}{name}", title, Family.OUTSIDE, Place.OUTSIDE, devices=1, max_clips=side_clips)
            for name, title in (
                ("", "transformers"),
                ("_assisted", "transformers, assistant"),
                ("_assisted_shown", "transformers, assistant sees video"),
                ("_prompt_lookup", "transformers, prompt lookup"),
            )
        ),
    )


def variations(asked: Sequence[str], side_clips: int) -> list[BenchMethod]:
    """Slipstream with one option varied, from words like "alpha=0,0.5,0.95": a row a value.

    Raises ValueError for an option or a value that captions do not have.
    """
    rows = []
    for name, _, values in (word.partition("=") for word in asked):
        for value in values.split(","):
            title, side = f"Slipstream, {name} {value}", {"max_clips": side_clips}
            try:
                row = _on_stack(
                    f"{SLIPSTREAM} {name}={value}", title, Family.PARALLEL, SLIPSTREAM, **{name: _parsed(value)}, **side
                )
            except InvalidRequest as error:
                raise ValueError(f"{name}={value}: {error}") from None
            rows.append(row)
    return rows


def pruning_with(pruner: str, rows: Sequence[BenchMethod]) -> list[BenchMethod]:
    """The same rows, but every draft model that sees anything of the video is shown what that pruner keeps."""
    asked = CaptionOptions(pruner=pruner)
    return [replace(row, options=asked.over(row.options)) if _sees_video(row) else row for row in rows]


def _sees_video(row: BenchMethod) -> bool:
    method = METHODS.get(row.options.get("method", ""))
    return method is not None and method.speculative and method.pruner != BLIND


def _parsed(value: str) -> object:
    """A number or a truth value as JSON writes it; else the words themselves."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def caption_options(*parts: CaptionOptions, **others: object) -> CaptionOptions:
    """The defaults of this benchmark, changed by `others` and then by `parts`."""
    options = CaptionOptions.from_mapping({"alpha": ALPHA, "max_window": MAX_WINDOW, **others})
    for part in parts:
        options = part.over(options)
    return options
