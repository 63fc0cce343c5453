"""Pixel values equal those of the upstream video processor, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.utils.import_utils import is_torchvision_available

from slipstream.errors import ModelNotUsable
from slipstream.models.preprocess import FramePreprocessor
from tests.models.conftest import random_frames

CONFIGS: list[dict[str, Any]] = [
    {},
    {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3},
    {"size": {"height": 64, "width": 64}, "do_normalize": False},
    {"do_center_crop": None, "crop_size": None},
    {"size": {"height": 64, "width": 64}, "do_rescale": False},
    {"size": {"height": 48, "width": 48}, "rescale_factor": 1 / 127.5},
]
SIZES = [(32, 32), (24, 40), (480, 270), (7, 500)]


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_upstream_processor(config: dict[str, Any], size: tuple[int, int]) -> None:
    from transformers import LlavaOnevisionVideoProcessor

    frames = random_frames(3, 0, size)
    upstream = LlavaOnevisionVideoProcessor(**config)
    expected = upstream(list(frames), return_tensors="pt", input_data_format="channels_last").pixel_values_videos[0]
    assert torch.equal(FramePreprocessor.from_config(config)(frames), expected.float())


@pytest.mark.parametrize("size", SIZES)
def test_resizes_in_whole_numbers_and_normalises_with_folded_constants(size: tuple[int, int]) -> None:
    frames = random_frames(2, 1, size)
    preprocess = FramePreprocessor.from_config(
        {**CONFIGS[1], "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    )
    pixels = preprocess(frames)
    assert pixels.shape == (2, 3, 32, 32)
    assert pixels.dtype == torch.float32
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    levels = (pixels * std.view(-1, 1, 1) + mean.view(-1, 1, 1)) * 255
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)
    if size == (32, 32):
        assert np.array_equal(levels.round().permute(0, 2, 3, 1).byte().numpy(), frames)


def test_a_frame_does_not_depend_on_its_neighbours() -> None:
    frames = random_frames(5, 2, (50, 30))
    preprocess = FramePreprocessor()
    assert torch.equal(preprocess(frames)[3], preprocess(frames[3:4])[0])


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"size": {"shortest_edge": 336}}, "height and width"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"resample": 2}, "bicubic"),
    ],
)
def test_steps_that_are_not_implemented_are_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelNotUsable, match=problem):
        FramePreprocessor.from_config(config)
