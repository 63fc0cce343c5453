"""Qwen2.5-VL: prompt layout, frame features and three-axis positions. Weights and layer maths are upstream's."""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from slipstream.device_copy import to_device
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.forward import Decoder
from slipstream.engine.video_lm import PromptPlan, VideoGrid
from slipstream.engine.vision_attention import IMPLEMENTATION as WINDOWED
from slipstream.engine.vision_attention import tower_inputs
from slipstream.errors import ModelNotUsable
from slipstream.families.adapter import FrameFacts, Pixels, embedded
from slipstream.families.preprocess import FRAMES_PER_CHUNK, PatchPreprocessor
from slipstream.families.prompts import ChatTemplate
from slipstream.session_messages import Chat
from slipstream.speculation.methods import Positions

USUAL_SIZE = (448, 448)
"""Height and width assumed where nobody has said how large the frames are."""
_DEFAULT_SECONDS_PER_STEP = 1.0
"""Upstream's, where no frame rate is known."""
_TEXT, _VIDEO = 0, 2
"""Upstream's token types."""


class Qwen2_5VL:
    """Adapter of `Qwen2_5_VLForConditionalGeneration`.

    The prompt is: template, vision start, steps * rows * columns placeholders, vision end, text. A step is two frames,
    the last one repeated if their number is odd. Positions are upstream's own (`get_rope_index`), which is a pure
    function; its `forward` would keep what it finds on the module, and mix up sessions.

    Raises:
        ModelNotUsable: the parts of the checkpoint do not fit each other.
    """

    num_axes = 3
    surface = "html_tables"
    usual_patches = PatchPreprocessor()
    """Where the checkpoint does not say."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        checkpoint: Checkpoint,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        vision: Any = model.config.vision_config
        self._model = model
        tower: Any = model.model.visual
        tower.config._attn_implementation = WINDOWED
        if model.device.type == "cuda":
            multiply_patches(tower.patch_embed.proj)
        self._preprocess = PatchPreprocessor.from_config(checkpoint.video_processor_config(), self.usual_patches)
        self._merge_size: int = vision.spatial_merge_size
        ours = (self._preprocess.patch_size, self._preprocess.temporal_patch_size, self._preprocess.merge_size)
        theirs = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
        if ours != theirs:
            raise ModelNotUsable(
                f"{checkpoint.ref}: patch size, temporal patch size and merge size are {theirs} in the model's config"
                f" but {ours} in the video processor's"
            )
        self.frames_per_step: int = vision.temporal_patch_size
        if FRAMES_PER_CHUNK % self.frames_per_step:
            raise ModelNotUsable(
                f"{checkpoint.ref}: a temporal patch of {self.frames_per_step} frames is not supported, only a divisor"
                f" of {FRAMES_PER_CHUNK}"
            )
        self._video_token_id: int = model.config.video_token_id
        self._template = ChatTemplate.for_video(tokenizer, checkpoint, self._video_token_id)
        self.decoder = cast(Decoder, model.model.language_model)
        self.lm_head = model.lm_head
        self.frame_size = self._preprocess.frame_size
        self.tokens_per_step = self._num_tokens(self._preprocess.grid(self.frames_per_step, *USUAL_SIZE))

    def plan_prompt(self, chat: Chat, frames: FrameFacts) -> PromptPlan:
        before, after = self._template.encode_around_video(chat, self._video_token_id)
        patches = self._preprocess.grid(frames.num_frames, *(frames.size or USUAL_SIZE))
        num_video_tokens = self._num_tokens(patches)
        ends = after[:1] == [self._model.config.vision_end_token_id]
        return PromptPlan(
            token_ids=(*before, *[self._video_token_id] * num_video_tokens, *after),
            video=(range(len(before), len(before) + num_video_tokens),),
            text_start=len(before) + num_video_tokens + ends,
            grid=VideoGrid(
                num_steps=patches[0],
                num_rows=patches[1] // self._merge_size,
                num_columns=patches[2] // self._merge_size,
                seconds_per_step=self._seconds_per_step(frames.seconds_per_frame),
            ),
            num_steps=patches[0],
        )

    def preprocess(self, frames: NDArray[np.uint8], num_frames: int) -> Pixels:
        _, rows, columns = self._preprocess.grid(num_frames, *frames.shape[1:3])
        num_steps = -(-len(frames) // self.frames_per_step)
        return Pixels(len(frames), self._preprocess(frames, num_frames, self._model.dtype), (num_steps, rows, columns))

    def encode(self, pixels: Pixels) -> Tensor:
        return cast(tuple[Tensor], self._features(pixels).pooler_output)[0]

    def embed_prompt(self, plan: PromptPlan, video_embeddings: Tensor) -> Tensor:
        return embedded(self.decoder, plan, video_embeddings)

    def positions(self, plan: PromptPlan, rows: Tensor, scheme: str) -> tuple[Tensor, int]:
        """Time, row and column of every token, [3, n]; all three are equal for text, and for the answer.

        "compact" numbers the times, rows and columns that are still there in a part of the video without gaps, each
        axis for itself, from the part's start; the text goes on behind the largest of them.
        """
        positions, next_position = self._prompt_positions(plan)
        kept = positions[:, rows]
        if scheme == Positions.ORIGINAL:
            return kept, next_position
        return _compact(kept, plan.video_parts[rows])

    def _prompt_positions(self, plan: PromptPlan) -> tuple[Tensor, int]:
        """Upstream's positions of the whole prompt, [3, num_tokens], and that of the answer's first token.

        Like upstream's `generate`, the answer goes on from the prompt's last token. (Upstream's `forward` alone would
        go on from the largest position; in a long video that is one of its times.)
        """
        assert plan.grid is not None, "plans of this family have a grid"
        token_ids = torch.tensor([plan.token_ids])
        types = torch.full_like(token_ids, _TEXT)
        types[:, plan.video_rows] = _VIDEO
        grid = (plan.grid.num_steps, plan.grid.num_rows * self._merge_size, plan.grid.num_columns * self._merge_size)
        positions, _ = self._model.model.get_rope_index(
            token_ids,
            types.int(),
            video_grid_thw=torch.tensor([grid]),
            second_per_grid_ts=torch.tensor([plan.grid.seconds_per_step]),
        )
        return positions[:, 0], int(positions[0, 0, -1]) + 1

    def _features(self, pixels: Pixels) -> Any:
        """What upstream's tower says of pixels. Nothing in it waits for the device."""
        model, grid = self._model, torch.tensor([pixels.grid])
        patches = to_device(pixels.values, model.device)
        return model.get_video_features(patches, grid, **tower_inputs(model.model.visual, grid, model.device))

    def _num_tokens(self, patches: tuple[int, int, int]) -> int:
        steps, rows, columns = patches
        return steps * (rows // self._merge_size) * (columns // self._merge_size)

    def _seconds_per_step(self, seconds_per_frame: float | None) -> float:
        if seconds_per_frame is None:
            return _DEFAULT_SECONDS_PER_STEP
        return seconds_per_frame * self.frames_per_step


def multiply_patches(conv: nn.Module) -> None:
    """Has the convolution over patches computed as the one product that it is, since its kernel is as long as its
    stride. In 16 bits cuDNN takes seconds for thousands of patches (3.7 s on an H100: sglang-omni's 539), and torch,
    beside a cuDNN that it does not take for this, goes from patch to patch. Rounds otherwise than upstream's."""
    if not isinstance(conv, nn.Conv2d | nn.Conv3d):
        return
    is_padded = conv.padding != "valid" and any(conv.padding)
    if conv.kernel_size == conv.stride and not is_padded and conv.groups == 1:
        cast(Any, conv).forward = lambda patches: linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)


def _compact(positions: Tensor, parts: Tensor) -> tuple[Tensor, int]:
    """Positions [3, n] without gaps, and the next one behind them.

    Args:
        parts: which part of the video each token belongs to, [n]; text is -1.
    """
    runs = torch.unique_consecutive(parts, return_counts=True)
    made, start = [], 0
    for part, run in zip(runs[0].tolist(), positions.split(runs[1].tolist(), dim=1), strict=True):
        ranks = torch.stack([torch.unique(axis, return_inverse=True)[1] for axis in run])
        if part < 0:
            ranks = torch.arange(run.shape[1]).expand(3, -1)
        made.append(start + ranks)
        start += int(ranks.max()) + 1
    return torch.cat(made, dim=1), start
