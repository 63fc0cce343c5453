"""LLaVA-Interleave: a video as so many pictures of one message. Weights and layer maths are upstream's."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan
from slipstream.errors import ModelNotUsable
from slipstream.families.adapter import EqualFrames, FrameFacts, Pixels
from slipstream.families.preprocess import SIGLIP_FRAMES, FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate, find_video
from slipstream.session_messages import Chat

_TOWER, _FEATURES = "siglip_vision_model", "full"


class LlavaInterleave(EqualFrames):
    """Adapter of `LlavaForConditionalGeneration` with a SigLIP tower.

    The prompt is: the template as it is with a picture for each frame, tokens_per_step placeholders for each of them,
    text.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other, or it is another LLaVA.
    """

    def __init__(
        self,
        model: LlavaForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        config: Any = model.config
        vision = config.vision_config
        tower = vision.model_type, config.vision_feature_select_strategy
        if tower != (_TOWER, _FEATURES):
            raise ModelNotUsable(
                f"{checkpoint.ref}: of LLaVA's models only LLaVA-Interleave is served: a tower {_TOWER} of which"
                f" {_FEATURES} features are taken, not {tower[0]} ({tower[1]})"
            )
        preprocess = FramePreprocessor.from_config(checkpoint.image_processor_config(), SIGLIP_FRAMES)
        check_tower_size(checkpoint, preprocess, (vision.image_size, vision.image_size))
        super().__init__(model, model.model.language_model, preprocess)
        self._image_token_id: int = config.image_token_id
        self._template, self._between = ChatTemplate.for_pictures(tokenizer, checkpoint, self._image_token_id)
        self.tokens_per_step: int = (vision.image_size // vision.patch_size) ** 2

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        """Size, spacing and times of the frames make no difference to this family."""
        picture = [self._image_token_id] * self.tokens_per_step
        video = [*picture, *[*self._between, *picture] * (frames.num_frames - 1)]
        token_ids = self._template.encode_with_video(chat, self._image_token_id, video)
        spans = find_video(token_ids, self._image_token_id, frames.num_frames * self.tokens_per_step)
        return PromptPlan(tuple(token_ids), spans, text_start=spans[-1].stop, num_steps=frames.num_frames)

    def encode(self, pixels: Pixels) -> Tensor:
        config: Any = self._model.config
        features = self._model.get_image_features(
            self._values(pixels),
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return torch.cat(list(features.pooler_output))
