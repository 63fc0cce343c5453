"""VideoLLaMA 3: each frame behind its time in words, at nearly its own size. Weights and layer maths are upstream's."""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, VideoLlama3ForConditionalGeneration

from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.video_lm import PromptPlan
from slipstream.engine.vision_attention import IMPLEMENTATION as WINDOWED
from slipstream.engine.vision_attention import tower_inputs
from slipstream.errors import ModelNotUsable
from slipstream.families.adapter import CountedTokens, FrameFacts, Pixels
from slipstream.families.preprocess import VIDEO_LLAMA_3_PATCHES, PatchPreprocessor
from slipstream.families.prompts import ChatTemplate, find_video
from slipstream.families.qwen2_5_vl import USUAL_SIZE, multiply_patches
from slipstream.session_messages import Chat

_UNTIMED_FRAMES_PER_S = 1.0
"""Upstream's, where no frame rate is known."""


class VideoLlama3(CountedTokens):
    """Adapter of `VideoLlama3ForConditionalGeneration`.

    The prompt is: template, and for each frame "Time 1.5s:" and rows * columns placeholders, with a comma between
    frames; then text. Every frame has all its tokens, as upstream's processor gives them without
    `use_token_compression`; with it, only the pixels would tell how many there are.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    def __init__(
        self,
        model: VideoLlama3ForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        preprocess = PatchPreprocessor.from_config(checkpoint.video_processor_config(), VIDEO_LLAMA_3_PATCHES)
        super().__init__(model, model.model.language_model, preprocess.frame_size)
        self._preprocess = preprocess
        self._tower: Any = model.model.vision_model
        self._tower.config._attn_implementation = WINDOWED
        if model.device.type == "cuda":
            multiply_patches(self._tower.embeddings.patch_embedding)
        side: int = self._tower.config.patch_size
        if (preprocess.patch_size, preprocess.temporal_patch_size) != (side, 1):
            raise ModelNotUsable(
                f"{checkpoint.ref}: the vision tower takes patches of {side} x {side} pixels of one frame, not the"
                f" {preprocess.patch_size} x {preprocess.patch_size} of {preprocess.temporal_patch_size} in the video"
                " processor's config"
            )
        self._video_token_id: int = self._model.config.video_token_id
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.tokens_per_step = self._tokens_per_frame(1, USUAL_SIZE)

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        num_tokens = self._tokens_per_frame(frames.num_frames, frames.size or USUAL_SIZE)
        video: list[str | int] = []
        for time_s in frames.times_in_words_s(_UNTIMED_FRAMES_PER_S):
            video += [f"{',' if video else ''}Time {time_s:.1f}s:", *[self._video_token_id] * num_tokens]
        token_ids = self._template.encode_with_video(chat, self._video_token_id, video)
        spans = find_video(token_ids, self._video_token_id, frames.num_frames * num_tokens)
        return PromptPlan(tuple(token_ids), spans, text_start=spans[-1].stop, num_steps=frames.num_frames)

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        _, rows, columns = self._preprocess.grid(num_frames, *frames.shape[1:3])
        patches = self._preprocess(frames, num_frames, self._model.dtype)
        return Pixels(len(frames), patches, (len(frames), rows, columns))

    def encode(self, pixels: Pixels) -> Tensor:
        grid, merge_size = torch.tensor([pixels.grid]), self._preprocess.merge_size
        given = tower_inputs(self._tower, grid, self._model.device, merge_size)
        given["video_merge_sizes"] = torch.tensor([merge_size])
        features = self._model.get_video_features(self._values(pixels), grid, **given)
        return cast(tuple[Tensor], features.pooler_output)[0]

    def _tokens_per_frame(self, num_frames: int, size: tuple[int, int]) -> int:
        _, rows, columns = self._preprocess.grid(num_frames, *size)
        return (rows // self._preprocess.merge_size) * (columns // self._preprocess.merge_size)
