"""What a model family supplies to the engine, `Adapter`, and the plain facts that pass between them."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from slipstream.engine.forward import Decoder


@dataclass(frozen=True, slots=True)
class VideoGrid:
    """How the video tokens of a family with positions in time and space lie: step after step, row after row."""

    num_steps: int
    num_rows: int
    num_columns: int
    seconds_per_step: float


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """A tokenised prompt and where its video lies.

    Between the video and the text there may be structural tokens, such as LLaVA's newline; they are always kept and
    belong to neither span.
    """

    token_ids: tuple[int, ...]
    """The whole prompt, with a placeholder id for every video token."""
    video_start: int
    num_video_tokens: int
    """Prunable tokens."""
    text_start: int
    """The first text token that can see the video."""
    grid: VideoGrid | None = None
    """None where positions simply count the tokens."""
    num_steps: int = 1
    """Frames, or groups of frames, of the video; every one has as many tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_text_tokens(self) -> int:
        """Text tokens behind the video."""
        return self.num_tokens - self.text_start

    @property
    def video_stop(self) -> int:
        return self.video_start + self.num_video_tokens


class Adapter(Protocol):
    """The part of the engine that knows one model family."""

    decoder: Decoder
    lm_head: nn.Module
    frames_per_step: int
    """Frames that share their tokens; a divisor of `FRAMES_PER_CHUNK`."""
    tokens_per_step: int
    """Video tokens of one step, for frames of usual size."""

    def plan_prompt(
        self,
        prompt: str,
        num_frames: int,
        frame_size: tuple[int, int] | None = None,
        seconds_per_frame: float | None = None,
    ) -> PromptPlan:
        """Tokenise a user prompt about a video; nothing in `prompt` acts as a special token. See `VideoLM`."""
        ...

    def encode_frames(self, frames: NDArray[np.uint8]) -> Tensor:
        """Video embeddings of whole steps, or of the video's end, RGB [n, height, width, 3] -> [tokens, hidden]."""
        ...

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        """Input embeddings of the whole prompt, [num_tokens, hidden]."""
        ...

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        """Position ids of the prompt tokens `rows` (sorted int64), and the position of the token after the prompt.

        Args:
            scheme: "original" leaves every token where it was before pruning; "compact" closes the gaps, on each axis.

        Returns:
            [n], or [axes, n] for rotary embeddings of several axes.
        """
        ...
