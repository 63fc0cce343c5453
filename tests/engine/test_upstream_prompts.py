"""Prompts with a video as upstream's own processors write them: their code, but for pictures, which want torchvision.

Our reference lays prompts out by hand; here it is held to the functions that it copies.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import ProcessorMixin
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.video_llama_3.processing_video_llama_3 import VideoLlama3Processor
from transformers.video_utils import VideoMetadata

from slipstream.engine import load_model
from slipstream.session_messages import Chat
from slipstream.video.messages import SampledVideo
from tests.support.reference import Layout, Reference
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen
from tests.support.tiny_families import write_tiny_llava_interleave, write_tiny_qwen3, write_tiny_video_llama_3
from tests.support.tiny_glm4v import write_tiny_glm4v
from tests.support.tiny_mistral3 import write_tiny_mistral3
from tests.support.tiny_qwen3_5 import write_tiny_qwen3_5
from tests.support.variants import one_in

with pytest.MonkeyPatch.context() as patched:  # its module asks the one that wants torchvision for a size
    patched.setitem(sys.modules, "transformers.models.pixtral.image_processing_pixtral", image_processing_pil_pixtral)
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

PROMPT = "Describe the video."
FPS = 5.0


def video_of(num_frames: int) -> SampledVideo:
    frames = np.random.default_rng(num_frames).integers(0, 256, (num_frames, 64, 96, 3), dtype=np.uint8)
    times_s = tuple(number / FPS for number in range(num_frames))
    return SampledVideo(frames, times_s, num_frames / FPS, 96, 64, "h264", 0, ())


def processor_of(kind: Any, reference: Reference, video_token: str) -> Any:
    """What the functions that write a prompt look at."""
    merge_size = getattr(reference.model.config.vision_config, "spatial_merge_size", 1)
    made: Any = SimpleNamespace(
        video_token=video_token,
        image_token=video_token,
        patch_size=reference.model.config.vision_config.patch_size,
        num_additional_image_tokens=0,
        vision_feature_select_strategy="full",
        all_special_multimodal_tokens=[video_token],
        video_processor=SimpleNamespace(merge_size=merge_size, temporal_patch_size=2),
        spatial_merge_size=getattr(reference.model.config, "spatial_merge_size", 1),
        image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    vision = reference.model.config.vision_config
    made.num_image_tokens = (getattr(vision, "image_size", 0) // vision.patch_size) ** 2
    if kind in (Glm4vProcessor, Glm46VProcessor):
        made.image_token = "<|image|>"
        made.replace_frame_token_id = partial(kind.replace_frame_token_id, made)
    if kind is Qwen3VLProcessor:
        made._calculate_timestamps = lambda *told: Qwen3VLProcessor._calculate_timestamps(made, *told)
    return made


def words_of(kind: Any, processor: Any, layout: Layout, video: SampledVideo) -> dict[str, list[str]]:
    """What upstream's function writes for the video, or for each of its pictures."""
    tensors, num_frames = dict[str, Any](layout.tensors), len(video.frames)
    if kind in (LlavaProcessor, PixtralProcessor):
        pictures = {name: values.numpy() for name, values in tensors.items()}
        return {"images_replacements": [kind.replace_image_token(processor, pictures, i) for i in range(num_frames)]}
    metadata = VideoMetadata(num_frames, fps=FPS, frames_indices=list(range(num_frames)))
    return {"videos_replacements": [kind.replace_video_token(processor, tensors | {"video_metadata": [metadata]}, 0)]}


@pytest.mark.parametrize("num_frames", [1, 2, 7])
@pytest.mark.parametrize(
    ("write", "kind", "video_token"),
    [
        (write_tiny_glm4v, Glm4vProcessor, "<|video|>"),
        (partial(write_tiny_glm4v, processor="Glm46VProcessor"), Glm46VProcessor, "<|video|>"),
        (write_tiny_llava_interleave, LlavaProcessor, "<image>"),
        (write_tiny_llava, LlavaOnevisionProcessor, "<video>"),
        (write_tiny_mistral3, PixtralProcessor, "[IMG]"),
        (write_tiny_qwen, Qwen2_5_VLProcessor, "<|video_pad|>"),
        (write_tiny_qwen3, Qwen3VLProcessor, "<|video_pad|>"),
        (write_tiny_qwen3_5, Qwen3VLProcessor, "<|video_pad|>"),
        (write_tiny_video_llama_3, VideoLlama3Processor, "<|video_pad|>"),
    ],
)
@one_in(3, "write", "num_frames")
def test_a_prompt_is_the_one_that_upstreams_processor_writes(
    tmp_path: Path, write: Callable[..., Path], kind: type[ProcessorMixin], video_token: str, num_frames: int
) -> None:
    folder, video = write(tmp_path / "model", seed=1), video_of(num_frames)
    reference = Reference(folder)
    processor = processor_of(kind, reference, video_token)
    layout = reference._layout(video)
    words = words_of(kind, processor, layout, video)
    rendered = reference._rendered(Chat(PROMPT), None, layout.media)
    (text,), _ = ProcessorMixin.get_text_with_replacements(processor, [rendered], **words)
    expected = reference.tokenizer(text)["input_ids"]
    assert reference.prompt_ids(video, PROMPT) == expected
    size = tuple(video.frames.shape[1:3])
    plan = load_model(str(folder)).plan_prompt(PROMPT, num_frames, frame_size=size, times_s=video.timestamps_s)
    assert list(plan.token_ids) == expected
