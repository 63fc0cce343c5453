"""Pixel values equal those of the upstream video processor, bit for bit.

The video processors need torchvision. Where it does not import, Qwen2.5-VL's patches are compared with stored ones that
transformers' own Pillow image processor made (transformers 5.23, Pillow 13.0), frame by frame. Pillow rounds the
resized bytes a little differently, so those may differ by one level; a test tells by how much.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.utils.import_utils import is_torchvision_available, is_vision_available

from slipstream.errors import InvalidRequest, ModelNotUsable
from slipstream.families.preprocess import (
    GLM4V_PATCHES,
    SIGLIP_FRAMES,
    VIDEO_LLAMA_3_PATCHES,
    FramePreprocessor,
    PatchPreprocessor,
    PicturePreprocessor,
    PixelSettings,
)
from slipstream.frame_size import fit
from tests.engine.conftest import random_frames

CONFIGS: list[dict[str, Any]] = [
    {},
    {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3},
    {"size": {"height": 64, "width": 64}, "do_normalize": False},
    {"do_center_crop": None, "crop_size": None},
    {"size": {"height": 64, "width": 64}, "do_rescale": False},
    {"size": {"height": 48, "width": 48}, "rescale_factor": 1 / 127.5},
]
SIZES = [(32, 32), (24, 40), (480, 270), (7, 500)]

PATCH_CONFIGS: list[dict[str, Any]] = [
    {"size": {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}, "cap_pixels_per_frame": False},
    {"min_pixels": 32 * 32, "max_pixels": 64 * 96, "patch_size": 8, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}, "patch_size": 8, "temporal_patch_size": 1},
]
GLM_CONFIGS: list[dict[str, Any]] = [
    {},
    {"size": {"shortest_edge": 4 * 24 * 24, "longest_edge": 10 * 48 * 64}, "patch_size": 8, "image_mean": [0.5] * 3},
]
"""Their bounds are of all frames together."""
PATCH_CASES = [
    *(("Qwen2VLVideoProcessor", PatchPreprocessor(), config, (1, 2, 5)) for config in PATCH_CONFIGS),
    *(("Glm4vVideoProcessor", GLM4V_PATCHES, config, (2, 5, 6)) for config in GLM_CONFIGS),
    *(("Glm46VVideoProcessor", GLM4V_PATCHES, config, (2, 5, 6)) for config in GLM_CONFIGS),
]
"""Whose they are, with what usual settings, what is set, and numbers of frames: GLM's refuse a single one."""
STORED_CONFIG: dict[str, Any] = {
    "size": {"shortest_edge": 16 * 16, "longest_edge": 16 * 24},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
STORED_CASES = {"same size": (3, (16, 24)), "smaller": (4, (30, 50)), "larger": (2, (9, 13)), "tall": (3, (50, 20))}
"""Frames, and their height and width; the seed is the place in the list."""
STORED = Path(__file__).parent / "data" / "qwen_patches.npz"
"""Levels from 0 to 255, [patches, 3 * 2 * 4 * 4]."""


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_upstream_processor(config: dict[str, Any], size: tuple[int, int]) -> None:
    from transformers import LlavaOnevisionVideoProcessor

    frames = random_frames(3, 0, size)
    upstream = LlavaOnevisionVideoProcessor(**config)
    expected = upstream(list(frames), return_tensors="pt", input_data_format="channels_last").pixel_values_videos[0]
    assert torch.equal(FramePreprocessor.from_config(config)(frames), expected.float())


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("size", SIZES)
def test_pictures_equal_those_of_the_upstream_processor(config: dict[str, Any], size: tuple[int, int]) -> None:
    from transformers import SiglipImageProcessor

    frames = random_frames(3, 0, size)
    expected = SiglipImageProcessor(**config)(list(frames), return_tensors="pt", input_data_format="channels_last")
    assert torch.equal(FramePreprocessor.from_config(config, SIGLIP_FRAMES)(frames), expected.pixel_values.float())


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
@pytest.mark.parametrize("size", [*SIZES, (480, 270), (720, 1280)])
def test_pictures_of_a_longest_edge_equal_those_of_the_upstream_processor(size: tuple[int, int]) -> None:
    from transformers import PixtralImageProcessor

    frames, config = random_frames(3, 0, size), {"size": {"longest_edge": 500}, "patch_size": 28}
    made = PixtralImageProcessor(**config)(list(frames), return_tensors="pt", input_data_format="channels_last")
    ours = PicturePreprocessor.from_config(config, 28)
    assert torch.equal(ours(frames), made.pixel_values.float())
    assert made.image_sizes.tolist() == [[28 * side for side in ours.grid(*size)]] * 3


@pytest.mark.skipif(not is_vision_available(), reason="upstream's image processor needs Pillow")
@pytest.mark.parametrize("size", SIZES)
def test_pictures_are_within_a_level_of_those_that_pillow_makes(size: tuple[int, int]) -> None:
    """Upstream's own way where there is no torchvision. It rounds what is resized a little differently."""
    from transformers import SiglipImageProcessorPil

    frames = random_frames(3, 0, size)
    made = SiglipImageProcessorPil(**CONFIGS[1])(list(frames), return_tensors="pt", input_data_format="channels_last")
    difference = (FramePreprocessor.from_config(CONFIGS[1], SIGLIP_FRAMES)(frames) - made.pixel_values).abs()
    assert difference.max() * 127.5 <= (0.001 if size == (32, 32) else 1.001)


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(("name", "usual", "config", "numbers"), PATCH_CASES)
@pytest.mark.parametrize("size", [(56, 84), (24, 40), (480, 270), (20, 500)])
def test_patches_equal_those_of_the_upstream_processor(
    name: str,
    usual: PatchPreprocessor,
    config: dict[str, Any],
    numbers: Sequence[int],
    size: tuple[int, int],
    place: int,
) -> None:
    import transformers

    frames = random_frames(numbers[place], 0, size)
    upstream = getattr(transformers, name)(**config)
    told: dict[str, Any] = {"return_tensors": "pt", "input_data_format": "channels_last", "do_sample_frames": False}
    expected = upstream([list(frames)], **told)
    preprocess = PatchPreprocessor.from_config(config, usual)
    assert preprocess.grid(*frames.shape[:3]) == tuple(expected.video_grid_thw[0].tolist())
    assert torch.equal(preprocess(frames), expected.pixel_values_videos)


VIDEO_LLAMA_CONFIGS: list[dict[str, Any]] = [
    {"min_pixels": 12544, "max_pixels": 12845056},  # those of the hub
    {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64 * 20}, "patch_size": 8, "image_mean": [0.4] * 3},
]


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
@pytest.mark.parametrize("num_frames", [1, 5, 40])
@pytest.mark.parametrize("config", VIDEO_LLAMA_CONFIGS)
@pytest.mark.parametrize("size", [(56, 84), (24, 40), (480, 270), (20, 500), (720, 1280)])
def test_patches_of_frames_that_share_a_bound(config: dict[str, Any], size: tuple[int, int], num_frames: int) -> None:
    from transformers import VideoLlama3VideoProcessor

    frames = random_frames(num_frames, 0, size)
    upstream = VideoLlama3VideoProcessor(use_token_compression=False, **config)
    expected = upstream([list(frames)], return_tensors="pt", input_data_format="channels_last")
    preprocess = PatchPreprocessor.from_config(config, VIDEO_LLAMA_3_PATCHES)
    assert preprocess.grid(*frames.shape[:3]) == tuple(expected.video_grid_thw[0].tolist())
    assert torch.equal(preprocess(frames), expected.pixel_values_videos)
    assert expected.video_compression_mask.all()


def levels(patches: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalised patches of the stored configuration as levels from 0 to 255."""
    a_channel = patches.shape[1] // 3
    mean, std = (np.repeat(STORED_CONFIG[name], a_channel) for name in ("image_mean", "image_std"))
    return np.asarray((patches * std + mean) * 255, dtype=np.float32)


def pillow_patches(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Levels of video patches, each half from the patches that upstream's image processor makes of a frame."""
    from transformers import Qwen2VLImageProcessorPil

    image_processor = Qwen2VLImageProcessorPil(**STORED_CONFIG)
    frames = np.concatenate([frames, frames[-1:]]) if len(frames) % 2 else frames
    halves = []
    for slot, frame in enumerate(frames):
        image = image_processor([frame], return_tensors="np", input_data_format="channels_last")["pixel_values"]
        halves.append(image.reshape(-1, 3, 2, 4, 4)[:, :, slot % 2])
    steps = [np.stack(pair, axis=2) for pair in zip(halves[::2], halves[1::2], strict=True)]
    return levels(np.concatenate(steps).reshape(-1, 96)).round().astype(np.uint8)


@pytest.mark.skipif(not is_vision_available(), reason="upstream's image processor needs Pillow")
@pytest.mark.parametrize("case", STORED_CASES)
def test_the_stored_patches_are_those_of_the_upstream_image_processor(case: str) -> None:
    num_frames, size = STORED_CASES[case]
    frames = random_frames(num_frames, list(STORED_CASES).index(case), size)
    assert np.array_equal(pillow_patches(frames), np.load(STORED)[case])


@pytest.mark.parametrize("case", STORED_CASES)
def test_patches_equal_the_stored_ones(case: str) -> None:
    num_frames, size = STORED_CASES[case]
    frames = random_frames(num_frames, list(STORED_CASES).index(case), size)
    expected = np.load(STORED)[case].astype(np.float32)
    ours = levels(PatchPreprocessor.from_config(STORED_CONFIG)(frames).numpy())
    np.testing.assert_allclose(ours, ours.round(), rtol=0, atol=1e-3)
    assert ours.shape == expected.shape
    difference = np.abs(ours.round() - expected)
    assert difference.max() <= (0 if case == "same size" else 1)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((224, 224), (16, 16)), ((480, 640), (14, 20)), ((1, 100), (2, 40)), ((30, 30), (4, 4)), ((2000, 11), (54, 2))],
)
def test_the_grid_keeps_the_aspect_ratio_within_its_bounds(size: tuple[int, int], expected: tuple[int, int]) -> None:
    preprocess = PatchPreprocessor(min_pixels=56 * 56, max_pixels=224 * 280 + 1)
    assert preprocess.grid(3, *size) == (2, *expected)


@pytest.mark.parametrize("size", [(8, 1601), (5000, 3)])
def test_frames_too_narrow_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="narrow"):
        PatchPreprocessor().grid(2, *size)


def test_without_resizing_only_whole_tokens_are_taken() -> None:
    preprocess = PatchPreprocessor.from_config({"do_resize": False})
    assert preprocess.grid(2, 56, 84) == (1, 4, 6)
    with pytest.raises(InvalidRequest, match="multiples of 28"):
        preprocess.grid(2, 56, 90)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 252, 280), (1_000, 3, 392), (1, 3, 600, 600)], ids=str)
@pytest.mark.parametrize("do_rescale", [True, False])
def test_what_is_normalized_some_rows_at_a_time_is_rounded_once(
    do_rescale: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    levels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    settings = PixelSettings(do_rescale=do_rescale)
    scale = 255.0 if do_rescale else 1.0
    by_channel = (3, *[1] * (levels.ndim - 2))
    mean, std = (torch.tensor(each).view(by_channel) * scale for each in (settings.image_mean, settings.image_std))
    assert torch.equal(settings.normalized(levels, dtype), ((levels.float() - mean) / std).to(dtype))
    plain = replace(settings, do_normalize=False).normalized(levels, dtype)
    assert torch.equal(plain, (levels * (1 / 255) if do_rescale else levels).to(dtype))


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


@pytest.mark.parametrize("change", [{"size": {"height": 56, "width": 56}}, {"do_resize": False}])
def test_pictures_that_have_no_longest_edge_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelNotUsable, match="must be resized by size"):
        PicturePreprocessor.from_config({"size": {"longest_edge": 56}} | change, 28)


def test_pictures_of_a_processor_that_says_nothing_of_their_size() -> None:
    assert PicturePreprocessor.from_config({}, 28) == PicturePreprocessor(28)


# -- by way of another size -------------------------------------------------------------------------------------------

CROPPED = {"do_center_crop": True, "crop_size": {"height": 56, "width": 48}, "size": {"shortest_edge": 56}}
SMOLVLM = {
    "size": {"longest_edge": 256},
    "max_image_size": {"longest_edge": 64},
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 72}},
    "resample": 1,
}
WAYS = {
    "LlavaNextVideoVideoProcessor": FramePreprocessor.cropping(CROPPED),
    "SmolVLMVideoProcessor": FramePreprocessor.resizing_twice(SMOLVLM),
}
ODD_SIZES = [(240, 426), (426, 240), (333, 517), (56, 90), (48, 56), (20, 31), (72, 64), (100, 100), (9, 400)]


@pytest.mark.skipif(not is_torchvision_available(), reason="the upstream processor needs torchvision")
@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("name", WAYS)
def test_two_steps_equal_those_of_the_upstream_processor(name: str, size: tuple[int, int]) -> None:
    import transformers

    frames = random_frames(3, 0, size)
    upstream = getattr(transformers, name)(**(CROPPED if WAYS[name].shortest_edge else SMOLVLM))
    made = upstream(list(frames), return_tensors="pt", input_data_format="channels_last")
    expected = made["pixel_values_videos" if "pixel_values_videos" in made else "pixel_values"][0]
    assert torch.equal(WAYS[name](frames), expected.float())


@pytest.mark.parametrize("size", ODD_SIZES)
@pytest.mark.parametrize("name", WAYS)
def test_two_steps_by_torch_alone(name: str, size: tuple[int, int]) -> None:
    """As upstream does them, with what its torchvision calls."""
    preprocess, frames = WAYS[name], random_frames(3, 0, size)
    pixels = torch.from_numpy(frames).permute(0, 3, 1, 2)
    between = preprocess.frame_size.on_the_way(*size)
    if preprocess.shortest_edge:
        pixels = resized(pixels, between, "bicubic")
        top, left = (between[0] - 56) // 2, (between[1] - 48) // 2
        pixels = pixels[:, :, top : top + 56, left : left + 48]
    else:
        pixels = resized(resized(pixels, between, "lanczos"), (64, 64), "lanczos")
    assert torch.equal(preprocess(frames), preprocess.pixels.normalized(pixels))


def resized(pixels: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    try:
        return torch.nn.functional.interpolate(pixels, size=list(size), mode=mode, antialias=True, align_corners=False)
    except (NotImplementedError, ValueError) as error:
        pytest.skip(f"this torch has no {mode}: {error}")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("size", ODD_SIZES)
def test_a_decoder_takes_the_same_way(name: str, size: tuple[int, int]) -> None:
    """Frames that come from one have the right size, and are not touched again."""
    preprocess, frames = WAYS[name], random_frames(3, 0, size)
    fitted = np.stack([fit(frame, preprocess.frame_size, 3) for frame in frames])
    assert fitted.shape[1:3] == (preprocess.height, preprocess.width)
    assert torch.equal(preprocess(fitted), preprocess(frames))


@pytest.mark.parametrize(
    ("make", "config", "complaint"),
    [
        (FramePreprocessor.from_config, CROPPED, "do_center_crop"),
        (FramePreprocessor.cropping, CROPPED | {"do_center_crop": False}, "cropped"),
        (FramePreprocessor.cropping, CROPPED | {"crop_size": {"height": 57, "width": 48}}, "cropped"),
        (FramePreprocessor.cropping, CROPPED | {"crop_size": {"shortest_edge": 48}}, "crop_size must have height"),
        (FramePreprocessor.resizing_twice, {"size": {"height": 4, "width": 4}}, "longest_edge"),
        (FramePreprocessor.resizing_twice, SMOLVLM | {"do_resize": False}, "longest_edge"),
        (FramePreprocessor.from_config, {"resample": 2}, "resample 2"),
        (PatchPreprocessor.from_config, CROPPED, "do_center_crop"),
    ],
)
def test_other_steps_are_refused(make: Any, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelNotUsable, match=complaint):
        make(config)


def test_what_would_be_huge_on_the_way_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too narrow"):
        FramePreprocessor.cropping(CROPPED)(random_frames(1, 0, (2, 900)))
