"""LLaVA-OneVision: prompt layout, frame features and positions. Weights and layer maths are upstream's."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.forward import Decoder
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import Pixels, counted_positions, embedded
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate


class LlavaOnevision:
    """Adapter of `LlavaOnevisionForConditionalGeneration`.

    The prompt is: template, frames * tokens_per_step placeholders, one newline embedding, text.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    def __init__(
        self,
        model: LlavaOnevisionForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        vision: Any = model.config.vision_config
        self._model = model
        self._preprocess = FramePreprocessor.from_config(checkpoint.video_processor_config())
        check_tower_size(checkpoint, self._preprocess, (vision.image_size, vision.image_size))
        self._video_token_id: int = model.config.video_token_id
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.decoder = cast(Decoder, model.model.language_model)
        self.lm_head = model.lm_head
        self.frames_per_step = 1
        self.frame_size = self._preprocess.frame_size
        self.tokens_per_step: int = math.ceil(vision.image_size // vision.patch_size / 2) ** 2

    def plan_prompt(
        self,
        prompt: str,
        num_frames: int,
        frame_size: tuple[int, int] | None = None,
        seconds_per_frame: float | None = None,
        times_s: Sequence[float] = (),
    ) -> PromptPlan:
        """Size and spacing of the frames make no difference to this family."""
        before, after = self._template.encode_around_video(prompt, self._video_token_id)
        num_video_tokens = num_frames * self.tokens_per_step
        newline = 1
        placeholders = [self._video_token_id] * (num_video_tokens + newline)
        return PromptPlan(
            token_ids=(*before, *placeholders, *after),
            video=(range(len(before), len(before) + num_video_tokens),),
            text_start=len(before) + len(placeholders),
            num_steps=num_frames,
        )

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        return Pixels(len(frames), self._preprocess(frames))

    def encode(self, pixels: Pixels) -> Tensor:
        values = pixels.values.to(self._model.device, self._model.dtype)
        features = self._model.get_video_features(values[None]).pooler_output
        return cast(Tensor, features)[0, :-1]

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        hidden = embedded(self.decoder, plan, video_embeddings)
        hidden[plan.video_stop] = self._model.model.image_newline
        return hidden

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        return counted_positions(plan, rows, scheme)
