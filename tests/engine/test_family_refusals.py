"""Checkpoints of families whose parts do not fit each other are refused, and the error says what is wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.engine import load_model
from slipstream.errors import ModelNotUsable
from tests.support.hub_forms import change, remove
from tests.support.tiny_families import write_tiny_llava_interleave, write_tiny_video_llama_3
from tests.support.tiny_glm4v import write_tiny_glm4v
from tests.support.tiny_mistral3 import write_tiny_mistral3

OF_VIDEO, OF_PICTURES = "video_preprocessor_config.json", "preprocessor_config.json"
Damages = dict[str, tuple[Callable[[Path], object], str]]
"""What is done to a checkpoint, and what the error says, by name."""

GLM: Damages = {
    "another processor": (
        change(OF_PICTURES, processor_class="Glm4Processor"),
        "a processor 'Glm4Processor' is not known, only Glm4vProcessor, Glm46VProcessor",
    ),
    "no settings": (remove(OF_VIDEO), "nothing of how frames become"),
    "other patches": (change(OF_VIDEO, patch_size=14), r"\(8, 2, 2\) in the model's config"),
    "one size": (
        change(OF_VIDEO, size={"height": 32, "width": 32}),
        "must have shortest_edge and longest_edge",
    ),
    "no merging": (change(OF_VIDEO, merge_size=0), r"must be positive, not \{'merge_size': 0\}"),
    "negative bounds": (change(OF_VIDEO, size={"shortest_edge": -1, "longest_edge": 784}), "'min_pixels': -1"),
    "another picture": (change("config.json", image_token_id=5), "image_token_id is 5 in the model's config but"),
    "another video": (change("config.json", video_token_id=5), "put one video before the user's text"),
    "no template": (remove("chat_template.jinja"), "chat template is missing"),
}
LLAVA_INTERLEAVE: Damages = {
    "other features": (
        change("config.json", vision_feature_select_strategy="default"),
        r"only LLaVA-Interleave is served: .* not siglip_vision_model \(default\)",
    ),
    "no settings": (remove(OF_PICTURES), "nothing of how frames become"),
    "settings of a video alone": (
        lambda path: (path / OF_PICTURES).rename(path / OF_VIDEO),
        "says nothing of how frames become its input; preprocessor_config.json",
    ),
    "another size": (
        change(OF_PICTURES, size={"height": 64, "width": 64}),
        "takes frames of 32x32, not the 64x64",
    ),
    "no size": (change(OF_PICTURES, size=None), "takes frames of 32x32, not the 224x224"),
    "the middle": (change(OF_PICTURES, do_center_crop=True), "do_center_crop is not supported"),
    "another token": (change("config.json", image_token_index=5), "put one image before the user's text"),
    "no template": (remove("chat_template.jinja"), "chat template is missing"),
}
VIDEO_LLAMA_3: Damages = {
    "other patches": (
        change(OF_VIDEO, patch_size=16),
        "takes patches of 8 x 8 pixels of one frame, not the 16 x 16 of 1 in the video processor",
    ),
    "patches of two frames": (change(OF_VIDEO, temporal_patch_size=2), "not the 8 x 8 of 2"),
    "no size": (change(OF_VIDEO, size=None), "size must have shortest_edge and longest_edge"),
    "one bound": (change(OF_VIDEO, size={"shortest_edge": 576}), "size must have shortest_edge and longest_edge"),
    "another kernel": (change(OF_VIDEO, resample=2), "resample 2 is not supported"),
    "the middle": (change(OF_VIDEO, do_center_crop=True), "do_center_crop is not supported"),
    "no settings": (remove(OF_VIDEO), "says nothing of how frames become its input"),
}


def have_windows(path: Path) -> None:
    text = json.loads((path / "config.json").read_text(encoding="utf-8"))["text_config"]
    change("config.json", text_config=text | {"sliding_window": 64})(path)


MISTRAL_3: Damages = {
    "other patches": (
        change("processor_config.json", patch_size=14),
        "is 2 x 2 patches of 8 pixels, not the 2 x 2 of 14 in processor_config.json",
    ),
    "another layer": (change("config.json", vision_feature_layer=-2), r"last layer alone .* not of -2"),
    "no merging": (change("processor_config.json", spatial_merge_size=1), "not the 1 x 1 of 8"),
    "one size": (change(OF_PICTURES, size={"height": 32, "width": 32}), "must be resized by size"),
    "the middle": (change(OF_PICTURES, do_center_crop=True), "do_center_crop is not supported"),
    "no settings": (remove(OF_PICTURES), "nothing of how frames become"),
    "another token": (change("config.json", image_token_index=5), "put one image before the user's text"),
    "no template": (remove("chat_template.jinja"), "chat template is missing"),
    "windows": (
        have_windows,
        "only full attention is supported, not sliding_attention",
    ),
}
CASES = [
    pytest.param(write, *case, id=f"{family}: {name}")
    for family, write, damages in (
        ("GLM", write_tiny_glm4v, GLM),
        ("LLaVA-Interleave", write_tiny_llava_interleave, LLAVA_INTERLEAVE),
        ("Mistral 3", write_tiny_mistral3, MISTRAL_3),
        ("VideoLLaMA 3", write_tiny_video_llama_3, VIDEO_LLAMA_3),
    )
    for name, case in damages.items()
]


@pytest.mark.parametrize(("write", "harm", "reason"), CASES)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, write: Callable[..., Path], harm: Callable[[Path], object], reason: str
) -> None:
    path = write(tmp_path / "model", seed=5)
    harm(path)
    with pytest.raises(ModelNotUsable, match=reason):
        load_model(str(path))
