"""InternVL3 and 3.5: each frame behind its number in words. Weights and layer maths are upstream's."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import InternVLForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.forward import Decoder
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import Pixels, counted_positions, embedded
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate, find_video, token_id_of


class InternVL:
    """Adapter of `InternVLForConditionalGeneration`.

    The prompt is: template, and for each frame "Frame1: ", image start, tokens_per_step placeholders, image end, with a
    line break between frames; then text.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    def __init__(
        self,
        model: InternVLForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        config: Any = model.config
        self._model = model
        self._preprocess = FramePreprocessor.from_config(checkpoint.video_processor_config())
        check_tower_size(checkpoint, self._preprocess, tuple(config.vision_config.image_size))
        self._image_token_id: int = config.image_token_id
        self._video_token_id = token_id_of(checkpoint, tokenizer, "video_token", "<video>")
        self._start_id = token_id_of(checkpoint, tokenizer, "start_image_token", "<img>")
        self._end_id = token_id_of(checkpoint, tokenizer, "end_image_token", "</img>")
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.decoder = cast(Decoder, model.model.language_model)
        self.lm_head = model.lm_head
        self.frames_per_step = 1
        self.frame_size = self._preprocess.frame_size
        self.tokens_per_step: int = config.image_seq_length

    def plan_prompt(
        self,
        prompt: str,
        num_frames: int,
        frame_size: tuple[int, int] | None = None,
        seconds_per_frame: float | None = None,
        times_s: Sequence[float] = (),
    ) -> PromptPlan:
        """Size, spacing and times of the frames make no difference to this family."""
        placeholders = [self._image_token_id] * self.tokens_per_step
        video: list[str | int] = []
        for number in range(1, num_frames + 1):
            break_before = "\n" if number > 1 else ""
            video += [f"{break_before}Frame{number}: ", self._start_id, *placeholders, self._end_id]
        token_ids = self._template.encode_with_video(prompt, self._video_token_id, video)
        spans = find_video(token_ids, self._image_token_id, num_frames * self.tokens_per_step)
        return PromptPlan(tuple(token_ids), spans, text_start=spans[-1].stop + 1, num_steps=num_frames)

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        return Pixels(len(frames), self._preprocess(frames))

    def encode(self, pixels: Pixels) -> Tensor:
        config: Any = self._model.config
        features = self._model.get_image_features(
            pixels.values.to(self._model.device, self._model.dtype),
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return cast(Tensor, features.pooler_output).flatten(0, 1)

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        return embedded(self.decoder, plan, video_embeddings)

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        return counted_positions(plan, rows, scheme)
