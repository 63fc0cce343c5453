"""The methods that the benchmark compares: on which processes each runs, with which options, and what it is called.

Knows no process and no clock.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slipstream import CaptionOptions
from slipstream.errors import InvalidRequest
from slipstream.speculation.methods import LOSSY_METHODS

ENGINE_PLAIN = "autoregressive"
OUTSIDE_PLAIN = "transformers"
SLIPSTREAM, PARALLELVLM = "slipstream", "parallelvlm"
ALPHA, MAX_WINDOW, LOSSY_KEEP = 0.9, 24, 0.5
TOKENS_A_VERIFICATION, RUN_BETWEEN_DEATHS = "tokens a verification", "run between deaths"


class Place(StrEnum):
    """Which processes caption."""

    PAIR = "pair"
    """Target and draft, a core each."""
    SAME = "same"
    """The target's checkpoint as draft, too; a core each."""
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
        accepted run between two rejections (paper 000)."""
        if self.family in (Family.SEQUENTIAL, Family.SELF):
            return TOKENS_A_VERIFICATION
        return RUN_BETWEEN_DEATHS if self.family is Family.PARALLEL else None


def _ask(method: str, **options: object) -> CaptionOptions:
    return CaptionOptions.from_mapping({"method": method, **options})


def _sequential(name: str, title: str, options: CaptionOptions) -> BenchMethod:
    return BenchMethod(name, title, Family.SEQUENTIAL, options=options)


def methods(side_clips: int) -> tuple[BenchMethod, ...]:
    """All of them, in the table's order; those beside the question run on the first `side_clips` clips only."""
    return (
        BenchMethod(ENGINE_PLAIN, "plain decoding", Family.PLAIN, options=_ask("autoregressive"), devices=1),
        _sequential("sd", "SD, gamma 5", _ask("sd")),
        _sequential("sd_tree", "SD, static tree", _ask("sd_tree")),
        _sequential("specvlm", "SpecVLM", _ask("specvlm")),
        _sequential("specvlm_chain", "SpecVLM, chain", _ask("specvlm", shape="chain")),
        _sequential("specvlm_attention", "SpecVLM, attention alone", _ask("specvlm", pruner="attention")),
        _sequential("specvlm_uniform", "SpecVLM, uniform alone", _ask("specvlm", pruner="uniform")),
        _sequential("onsd", "text-only draft", _ask("onsd")),
        BenchMethod("std", "STD, gamma 9", Family.SELF, options=_ask("std"), devices=1),
        BenchMethod(PARALLELVLM, "ParallelVLM", Family.PARALLEL, options=_ask("parallelvlm")),
        BenchMethod(SLIPSTREAM, "Slipstream", Family.PARALLEL, options=_ask("slipstream")),
        BenchMethod(
            "slipstream_open",
            "Slipstream, no gate",
            Family.PARALLEL,
            options=_ask("slipstream", gate=False),
            max_clips=side_clips,
        ),
        BenchMethod(
            "parallelvlm_same",
            "ParallelVLM, target as draft",
            Family.PARALLEL,
            Place.SAME,
            _ask("parallelvlm"),
            max_clips=side_clips,
        ),
        *(
            BenchMethod(
                name,
                f"{title}, keeps {LOSSY_KEEP:.0%}",
                Family.LOSSY,
                options=_ask("autoregressive", lossy=name, lossy_keep=LOSSY_KEEP),
                devices=1,
                max_clips=side_clips,
            )
            for name, title in zip(LOSSY_METHODS, ("FastV", "PyramidDrop", "SparseVLM", "DyCoke"), strict=True)
        ),
        BenchMethod("plain_both_cores", "plain, both cores", Family.FAIRNESS, Place.BOTH_CORES, _ask("autoregressive")),
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
    words = [(name, values.split(",")) for name, _, values in (word.partition("=") for word in asked)]
    for name, value in [(name, value) for name, values in words for value in values]:
        title = f"Slipstream, {name} {value}"
        try:
            options = CaptionOptions.from_mapping({"method": SLIPSTREAM, name: _parsed(value)})
        except InvalidRequest as error:
            raise ValueError(f"{name}={value}: {error}") from None
        rows.append(
            BenchMethod(f"{SLIPSTREAM} {name}={value}", title, Family.PARALLEL, options=options, max_clips=side_clips)
        )
    return rows


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
