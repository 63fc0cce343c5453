"""The vocabulary of pruning: what guidance is, what a pruner does, how many tokens a ratio keeps."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.speculation.methods import Score


@dataclass(frozen=True, slots=True, eq=False)
class VideoTokens:
    """The video tokens to choose from, step after step."""

    num_tokens: int
    num_steps: int = 1
    """Frames, or groups of frames, that share their tokens; every one has as many."""
    embeddings: Tensor | None = None
    """[num_tokens, hidden], the draft's own; only pruners that look for redundancy need them."""

    @property
    def tokens_per_step(self) -> int:
        return max(self.num_tokens // max(self.num_steps, 1), 1)


@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """What the target tells the draft about m video tokens: ready scores, or the states that they are made from."""

    scores: Tensor | None = None
    """One fp32 number per video token, [m]; higher is kept first."""
    video_states: tuple[Tensor, Tensor] | None = None
    """States of the video tokens before layer 1 and after layer L, bf16 [m, hidden] each."""
    text_sums: tuple[Tensor, Tensor] | None = None
    """Sums of the normalised text states at the same two places, fp32 [hidden] each."""

    @property
    def num_video_tokens(self) -> int:
        """How many video tokens it speaks of."""
        if self.scores is not None:
            return len(self.scores)
        return len(self.video_states[0]) if self.video_states is not None else 0

    def to(self, device: torch.device | str) -> "Guidance":
        """The same on `device`: nothing is copied where it lies already."""
        return Guidance(
            scores=None if self.scores is None else self.scores.to(device),
            video_states=_moved(self.video_states, device),
            text_sums=_moved(self.text_sums, device),
        )


def _moved(pair: tuple[Tensor, Tensor] | None, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (pair[0].to(device), pair[1].to(device))


class Keep(Protocol):
    """Chooses video tokens to keep."""

    def __call__(self, video: VideoTokens, num_keep: int, scores: Tensor | None, seed: int) -> Tensor:
        """Indices of the tokens to keep: int64, ascending, `num_keep` of them.

        The same arguments give the same answer on every machine.

        Args:
            scores: of the kind that the pruner ranks by, [video.num_tokens]; None where it ranks by none.
        """
        ...


@dataclass(frozen=True)
class Pruner:
    """A way to choose video tokens, by name."""

    name: str
    score: Score | None
    """What guidance it needs; None: it asks nobody."""
    keep: Keep
    alpha: float | None = None
    """The share that it prunes, whatever is asked; None: as is asked."""

    def num_kept(self, num_video_tokens: int, alpha: float) -> int:
        """Of so many tokens, when this share is to be pruned. Raises what `num_kept` does."""
        asked = num_kept(num_video_tokens, alpha)
        return asked if self.alpha is None else num_kept(num_video_tokens, self.alpha)


def num_kept(num_video_tokens: int, alpha: float) -> int:
    """Tokens left when the share `alpha` is pruned: 0 keeps all, 1 keeps none; rounded to the nearest number.

    Raises:
        InvalidRequest: alpha is outside [0, 1] or not a number.
    """
    if not 0.0 <= alpha <= 1.0:
        raise InvalidRequest(f"alpha is the pruned share of the video tokens, between 0 and 1, got {alpha}")
    return round(num_video_tokens * (1.0 - alpha))
