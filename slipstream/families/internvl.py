"""InternVL3 and 3.5: each frame behind its number in words. Weights and layer maths are upstream's."""

from typing import Any, cast

from torch import Tensor
from transformers import InternVLForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import EqualFrames, FrameFacts, Pixels
from slipstream.families.preprocess import FramePreprocessor, check_tower_size
from slipstream.families.prompts import ChatTemplate, find_video, token_id_of
from slipstream.session_messages import Chat


class InternVL(EqualFrames):
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
        preprocess = FramePreprocessor.from_config(checkpoint.video_processor_config())
        check_tower_size(checkpoint, preprocess, tuple(config.vision_config.image_size))
        super().__init__(model, model.model.language_model, preprocess)
        self._image_token_id: int = config.image_token_id
        self._video_token_id = token_id_of(checkpoint, tokenizer, "video_token", "<video>")
        self._start_id = token_id_of(checkpoint, tokenizer, "start_image_token", "<img>")
        self._end_id = token_id_of(checkpoint, tokenizer, "end_image_token", "</img>")
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.tokens_per_step: int = config.image_seq_length

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        """Size, spacing and times of the frames make no difference to this family."""
        placeholders = [self._image_token_id] * self.tokens_per_step
        video: list[str | int] = []
        for number in range(1, frames.num_frames + 1):
            break_before = "\n" if number > 1 else ""
            video += [f"{break_before}Frame{number}: ", self._start_id, *placeholders, self._end_id]
        token_ids = self._template.encode_with_video(chat, self._video_token_id, video)
        spans = find_video(token_ids, self._image_token_id, frames.num_frames * self.tokens_per_step)
        return PromptPlan(tuple(token_ids), spans, text_start=spans[-1].stop + 1, num_steps=frames.num_frames)

    def encode(self, pixels: Pixels) -> Tensor:
        config: Any = self._model.config
        features = self._model.get_image_features(
            self._values(pixels),
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return cast(Tensor, features.pooler_output).flatten(0, 1)
