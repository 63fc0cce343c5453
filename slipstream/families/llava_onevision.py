"""LLaVA-OneVision: prompt layout, frame features and positions. Weights and layer maths are upstream's."""

import math
from typing import Any, cast

from torch import Tensor
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import EqualFrames, FrameFacts, Pixels
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate
from slipstream.session_messages import Chat


class LlavaOnevision(EqualFrames):
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
        preprocess = FramePreprocessor.from_config(checkpoint.video_processor_config())
        check_tower_size(checkpoint, preprocess, (vision.image_size, vision.image_size))
        super().__init__(model, model.model.language_model, preprocess)
        self._video_token_id: int = model.config.video_token_id
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.tokens_per_step: int = math.ceil(vision.image_size // vision.patch_size / 2) ** 2

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        """Size and spacing of the frames make no difference to this family."""
        before, after = self._template.encode_around_video(chat, self._video_token_id)
        num_video_tokens = frames.num_frames * self.tokens_per_step
        newline = 1
        placeholders = [self._video_token_id] * (num_video_tokens + newline)
        return PromptPlan(
            token_ids=(*before, *placeholders, *after),
            video=(range(len(before), len(before) + num_video_tokens),),
            text_start=len(before) + len(placeholders),
            num_steps=frames.num_frames,
        )

    def encode(self, pixels: Pixels) -> Tensor:
        features = self._model.get_video_features(self._values(pixels)[None]).pooler_output
        return cast(Tensor, features)[0, : pixels.num_frames * self.tokens_per_step]  # newer releases add the newline

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        hidden = super().embed_prompt(plan, video_embeddings)
        hidden[plan.video_stop] = self._model.model.image_newline
        return hidden
