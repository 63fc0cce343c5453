"""SmolVLM2: the video's length and each frame's time in words. Weights and layer maths are upstream's."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, SmolVLMForConditionalGeneration
from transformers.models.smolvlm import processing_smolvlm as upstream

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import EqualFrames, FrameFacts, Pixels
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate, find_video, token_id_of
from slipstream.session_messages import Chat

_VIDEO = "<video>"
_ROUNDING_S = 1e-6
"""A duration comes as the time between frames; so much of it may be lost on the way."""


class SmolVLM(EqualFrames):
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
        preprocess = FramePreprocessor.resizing_twice(checkpoint.video_processor_config())
        check_tower_size(checkpoint, preprocess, (side, side))
        super().__init__(model, model.model.text_model, preprocess)
        self._image_token_id: int = config.image_token_id
        self._mark_id = token_id_of(checkpoint, tokenizer, "fake_image_token", "<fake_token_around_image>")
        self._global_id = token_id_of(checkpoint, tokenizer, "global_image_token", "<global-img>")
        self._template, self._video = ChatTemplate.for_word(
            tokenizer, upstream.DEFAULT_CHAT_TEMPLATE, getattr(tokenizer, "video_token", None) or _VIDEO
        )
        self.tokens_per_step: int = (side // config.vision_config.patch_size // config.scale_factor) ** 2

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        """The size of the frames makes no difference to this family."""
        num_frames, seconds_per_frame, times_s = frames.num_frames, frames.seconds_per_frame, frames.times_in_words_s()
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
        token_ids = self._template.encode_with_video(chat, self._video, video)
        spans = find_video(token_ids, self._image_token_id, num_frames * self.tokens_per_step)
        return PromptPlan(tuple(token_ids), spans, text_start=spans[-1].stop + 1, num_steps=num_frames)

    def encode(self, pixels: Pixels) -> Tensor:
        features = self._model.get_image_features(self._values(pixels)[None])
        return torch.cat(list(features.pooler_output)).flatten(0, -2)


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
