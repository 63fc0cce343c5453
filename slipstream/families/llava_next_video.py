"""LLaVA-NeXT-Video: prompt layout and frame features. Weights and layer maths are upstream's."""

from typing import Any, cast

from torch import Tensor
from transformers import LlavaNextVideoForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import EqualFrames, FrameFacts, Pixels
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate
from slipstream.session_messages import Chat


class LlavaNextVideo(EqualFrames):
    """Adapter of `LlavaNextVideoForConditionalGeneration`.

    The prompt is: template, num_frames * tokens_per_step video placeholders, text. Of every frame the model sees the
    middle square.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    def __init__(
        self,
        model: LlavaNextVideoForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        config: Any = model.config
        vision = config.vision_config
        preprocess = FramePreprocessor.cropping(checkpoint.video_processor_config())
        check_tower_size(checkpoint, preprocess, (vision.image_size, vision.image_size))
        super().__init__(model, model.model.language_model, preprocess)
        self._video_token_id: int = config.video_token_id
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.tokens_per_step: int = (vision.image_size // vision.patch_size // config.spatial_pool_stride) ** 2

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        """Size, spacing and times of the frames make no difference to this family."""
        before, after = self._template.encode_around_video(chat, self._video_token_id)
        video = range(len(before), len(before) + frames.num_frames * self.tokens_per_step)
        return PromptPlan(
            token_ids=(*before, *[self._video_token_id] * len(video), *after),
            video=(video,),
            text_start=video.stop,
            num_steps=frames.num_frames,
        )

    def encode(self, pixels: Pixels) -> Tensor:
        config: Any = self._model.config
        features = self._model.get_video_features(
            self._values(pixels)[None],
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return cast(Tensor, features.pooler_output[0]).flatten(
            0, -2
        )  # older releases of transformers keep frames apart
