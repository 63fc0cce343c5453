"""What a request may ask of sampling, checked; and what a draft says of a token it drew. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Field meanings are those of `Sampling` in common.proto; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0
    rule: str = "coupled"
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """The sparse distribution q that one draft token was drawn from: every token of probability > 0."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]
