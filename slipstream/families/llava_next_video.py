"""LLaVA-NeXT-Video: prompt layout and frame features. Weights and layer maths are upstream's."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlavaNextVideoForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.forward import Decoder
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import Pixels, counted_positions, embedded
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate


class LlavaNextVideo:
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
        self._model = model
        self._preprocess = FramePreprocessor.cropping(checkpoint.video_processor_config())
        check_tower_size(checkpoint, self._preprocess, (vision.image_size, vision.image_size))
        self._video_token_id: int = config.video_token_id
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.decoder = cast(Decoder, model.model.language_model)
        self.lm_head = model.lm_head
        self.frames_per_step = 1
        self.frame_size = self._preprocess.frame_size
        self.tokens_per_step: int = (vision.image_size // vision.patch_size // config.spatial_pool_stride) ** 2

    def plan_prompt(
        self,
        prompt: str,
        num_frames: int,
        frame_size: tuple[int, int] | None = None,
        seconds_per_frame: float | None = None,
        times_s: Sequence[float] = (),
    ) -> PromptPlan:
        """Size, spacing and times of the frames make no difference to this family."""
        before, after = self._template.encode_around_video(prompt, self._video_token_id)
        video = range(len(before), len(before) + num_frames * self.tokens_per_step)
        return PromptPlan(
            token_ids=(*before, *[self._video_token_id] * len(video), *after),
            video=(video,),
            text_start=video.stop,
            num_steps=num_frames,
        )

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        return Pixels(len(frames), self._preprocess(frames))

    def encode(self, pixels: Pixels) -> Tensor:
        config: Any = self._model.config
        features = self._model.get_video_features(
            pixels.values.to(self._model.device, self._model.dtype)[None],
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return cast(Tensor, features.pooler_output)[0]

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        return embedded(self.decoder, plan, video_embeddings)

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        return counted_positions(plan, rows, scheme)
