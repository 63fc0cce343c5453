"""Qwen3-VL: every step of the video behind its time in words, and features of the vision tower for the first layers."""

from typing import cast

import torch
from torch import Tensor

from slipstream.engine.video_lm import PromptPlan
from slipstream.families.adapter import FrameFacts, Pixels, VideoGrid
from slipstream.families.preprocess import QWEN3_PATCHES
from slipstream.families.prompts import find_video
from slipstream.families.qwen2_5_vl import USUAL_SIZE, Qwen2_5VL
from slipstream.session_messages import Chat


class Qwen3VL(Qwen2_5VL):
    """Adapter of `Qwen3VLForConditionalGeneration`, and of its mixtures of experts.

    The prompt is: template, which has a vision start and end around the video, as transformers keeps them since 5.10;
    between these, for each step, "<1.5 seconds>", vision start, rows * columns placeholders, vision end; then text. A
    step is two frames, and its time is the mean of theirs. Positions are upstream's (`get_rope_index`): in
    each step the text goes on behind the larger side of the picture.
    """

    usual_patches = QWEN3_PATCHES

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        num_steps, rows, columns = self._preprocess.grid(frames.num_frames, *(frames.size or USUAL_SIZE))
        placeholders = [self._video_token_id] * self._num_tokens((1, rows, columns))
        start, end = self._model.config.vision_start_token_id, self._model.config.vision_end_token_id
        video: list[str | int] = []
        for time_s in self._step_times(frames):
            video += [f"<{time_s:.1f} seconds>", start, *placeholders, end]
        token_ids = self._template.encode_with_video(chat, self._video_token_id, video)
        spans = find_video(token_ids, self._video_token_id, num_steps * len(placeholders))
        return PromptPlan(
            token_ids=tuple(token_ids),
            video=spans,
            text_start=spans[-1].stop + (2 if token_ids[spans[-1].stop : spans[-1].stop + 2] == [end, end] else 1),
            grid=VideoGrid(num_steps, rows // self._merge_size, columns // self._merge_size),
            num_steps=num_steps,
        )

    def encode(self, pixels: Pixels) -> Tensor:
        output = self._features(pixels)
        embeddings = cast(tuple[Tensor], output.pooler_output)[0]
        deepstack = (one if isinstance(one, Tensor) else one[0] for one in output.deepstack_features)  # of one video
        return torch.cat([embeddings, *(features.to(embeddings.dtype) for features in deepstack)], 1)

    def _step_times(self, frames: FrameFacts) -> list[float]:
        """Mean time of each step's first and last frame, seconds; a step that lacks frames repeats the last."""
        size = self.frames_per_step
        times = frames.times_in_words_s()
        times += times[-1:] * (-frames.num_frames % size)
        return [(times[first] + times[first + size - 1]) / 2 for first in range(0, len(times), size)]
