"""Mistral Small 3.1 and Ministral 3: a video as so many pictures of one message, each at nearly its own size.

Weights and layer maths are upstream's.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Mistral3ForConditionalGeneration, PreTrainedTokenizerBase

from slipstream.device_copy import to_device
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan
from slipstream.errors import ModelNotUsable
from slipstream.families.adapter import CountedTokens, FrameFacts, Pixels
from slipstream.families.preprocess import PicturePreprocessor
from slipstream.families.prompts import ChatTemplate, find_video, token_id_of
from slipstream.families.qwen2_5_vl import USUAL_SIZE
from slipstream.session_messages import Chat

_END_OF_ROW, _END_OF_PICTURE = "[IMG_BREAK]", "[IMG_END]"


class Mistral3(CountedTokens):
    """Adapter of `Mistral3ForConditionalGeneration`, whose text model is `mistral` or `ministral3`.

    The prompt is: the template as it is with a picture for each frame, of each rows * columns placeholders with a token
    behind every row and another one behind the last, text.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    def __init__(
        self,
        model: Mistral3ForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        config: Any = model.config
        _check_features(checkpoint, config)
        _check_patches(checkpoint, config)
        side = config.vision_config.patch_size * config.spatial_merge_size
        self._preprocess = PicturePreprocessor.from_config(checkpoint.image_processor_config(), side)
        super().__init__(model, model.model.language_model, self._preprocess.frame_size)
        self._image_token_id: int = config.image_token_id
        self._ends = [token_id_of(checkpoint, tokenizer, None, token) for token in (_END_OF_ROW, _END_OF_PICTURE)]
        self._template, self._between = ChatTemplate.for_pictures(tokenizer, checkpoint, self._image_token_id)
        rows, columns = self._preprocess.grid(*USUAL_SIZE)
        self.tokens_per_step: int = rows * columns

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        """Spacing and times of the frames make no difference to this family."""
        rows, columns = self._preprocess.grid(*(frames.size or USUAL_SIZE))
        end_of_row, end_of_picture = self._ends
        row = [self._image_token_id] * columns
        picture = [*[*row, end_of_row] * (rows - 1), *row, end_of_picture]
        video = [*picture, *[*self._between, *picture] * (frames.num_frames - 1)]
        token_ids = self._template.encode_with_video(chat, self._image_token_id, video)
        spans = find_video(token_ids, self._image_token_id, frames.num_frames * rows * columns)
        return PromptPlan(tuple(token_ids), spans, text_start=spans[-1].stop, num_steps=frames.num_frames)

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        return Pixels(len(frames), self._preprocess(frames, self._model.dtype))

    def encode(self, pixels: Pixels) -> Tensor:
        """As a batch of pictures, through the parts of upstream's tower: it has all in one row, and masks the scores of
        every two patches that are not of one picture."""
        tower, values = self._model.model.vision_tower, self._values(pixels)
        patches = tower.patch_conv(values)
        places = torch.cartesian_prod(*map(torch.arange, patches.shape[2:]))
        hidden = tower.ln_pre(patches.flatten(2).transpose(1, 2))
        angles = tower.patch_positional_embedding(hidden, to_device(places, hidden.device))
        hidden = tower.transformer(hidden, None, position_embeddings=angles).last_hidden_state
        sizes = [tuple(values.shape[2:])] * pixels.num_frames
        return cast(Tensor, self._model.model.multi_modal_projector(hidden.flatten(0, 1), sizes))


def _check_features(checkpoint: Checkpoint, config: Any) -> None:
    """Raises `ModelNotUsable` for another layer's than the tower's last."""
    if config.vision_feature_layer != -1:
        raise ModelNotUsable(
            f"{checkpoint.ref}: features of the vision tower's last layer alone are supported, not of"
            f" {config.vision_feature_layer} (vision_feature_layer)"
        )


def _check_patches(checkpoint: Checkpoint, config: Any) -> None:
    """That upstream's processor would count tokens as the model does. Raises `ModelNotUsable`."""
    side, merge_size = config.vision_config.patch_size, config.spatial_merge_size
    processor = checkpoint.read_json("processor_config.json")
    told = processor.get("patch_size", side), processor.get("spatial_merge_size", merge_size)
    if told != (side, merge_size):
        raise ModelNotUsable(
            f"{checkpoint.ref}: a token of the model is {merge_size} x {merge_size} patches of {side} pixels, not the"
            f" {told[1]} x {told[1]} of {told[0]} in processor_config.json"
        )
