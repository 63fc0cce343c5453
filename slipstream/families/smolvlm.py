"""SmolVLM2: the video's length and each frame's time in words. Weights and layer maths are upstream's."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, SmolVLMForConditionalGeneration
from transformers.models.smolvlm import processing_smolvlm as upstream

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.forward import Decoder
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import Pixels, counted_positions, embedded
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate, find_video, token_id_of

_VIDEO = "<video>"
_DEFAULT_FRAMES_PER_S = 24.0
"""Upstream's, where no times are known."""
_ROUNDING_S = 1e-6
"""A duration comes as the time between frames; so much of it may be lost on the way."""


class SmolVLM:
    """Adapter of `SmolVLMForConditionalGeneration`.

    The prompt is: upstream's template for videos, a sentence of how many frames they are from how long a video, and for
    each frame "Frame from 00:01:", a mark, tokens_per_step placeholders and a mark; then text.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    def __init__(
        self,
        model: SmolVLMForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        config: Any = model.config
        side: int = config.vision_config.image_size
        self._model = model
        self._preprocess = FramePreprocessor.resizing_twice(checkpoint.video_processor_config())
        check_tower_size(checkpoint, self._preprocess, (side, side))
        self._image_token_id: int = config.image_token_id
        self._mark_id = token_id_of(checkpoint, tokenizer, "fake_image_token", "<fake_token_around_image>")
        self._global_id = token_id_of(checkpoint, tokenizer, "global_image_token", "<global-img>")
        self._template, self._video = ChatTemplate.for_word(
            tokenizer, upstream.DEFAULT_CHAT_TEMPLATE, getattr(tokenizer, "video_token", None) or _VIDEO
        )
        self.decoder = cast(Decoder, model.model.text_model)
        self.lm_head = model.lm_head
        self.frames_per_step = 1
        self.frame_size = self._preprocess.frame_size
        self.tokens_per_step: int = (side // config.vision_config.patch_size // config.scale_factor) ** 2

    def plan_prompt(
        self,
        prompt: str,
        num_frames: int,
        frame_size: tuple[int, int] | None = None,
        seconds_per_frame: float | None = None,
        times_s: Sequence[float] = (),
    ) -> PromptPlan:
        """The size of the frames makes no difference to this family."""
        times_s = times_s or [index / _DEFAULT_FRAMES_PER_S for index in range(num_frames)]
        duration_s = times_s[-1] if seconds_per_frame is None else seconds_per_frame * num_frames + _ROUNDING_S
        picture = [self._mark_id, self._global_id, *[self._image_token_id] * self.tokens_per_step, self._mark_id]
        video: list[str | int] = [
            upstream.DEFAULT_VIDEO_INTRO.format(
                frame_count=number_words(num_frames), video_duration=str(timedelta(seconds=int(duration_s)))
            )
        ]
        for time_s in times_s:
            timestamp = f"{int(time_s // 60):02d}:{int(time_s % 60):02d}"
            video += [upstream.FRAME_TIMESTAMP_MESSAGE.format(timestamp=timestamp), *picture]
        video.append(upstream.DEFAULT_MEDIA_OUTTRO)
        token_ids = self._template.encode_with_video(prompt, self._video, video)
        spans = find_video(token_ids, self._image_token_id, num_frames * self.tokens_per_step)
        return PromptPlan(tuple(token_ids), spans, text_start=spans[-1].stop + 1, num_steps=num_frames)

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        return Pixels(len(frames), self._preprocess(frames))

    def encode(self, pixels: Pixels) -> Tensor:
        features = self._model.get_image_features(pixels.values.to(self._model.device, self._model.dtype)[None])
        return torch.cat(list(features.pooler_output)).flatten(0, -2)

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        return embedded(self.decoder, plan, video_embeddings)

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        return counted_positions(plan, rows, scheme)


# -- numbers ----------------------------------------------------------------------------------------------------------

# In English words, as the package `num2words` writes them, which upstream's prompts are made with.

# fmt: off
_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
_TENS = (
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)
# fmt: on


def number_words(number: int) -> str:
    """0 to 999,999: "one thousand, two hundred and thirty-four"."""
    if number < 100:
        return _below_hundred(number)
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, size)
    words = f"{number_words(many)} {name}"
    if not rest:
        return words
    return f"{words}{' and' if rest < 100 else ','} {number_words(rest)}"


def _below_hundred(number: int) -> str:
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")
