"""Resized pictures are torch's, bit for bit, whatever the two sizes: what the video processors of transformers use."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.families.preprocess import QWEN3_PATCHES, FramePreprocessor, PatchPreprocessor
from slipstream.frame_size import MAX_ASPECT_RATIO, FrameSize, fit, resample
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits
from tests.support.media import ClipSpec, even_times_ms, make_clip, rotated_mp4
from tests.support.variants import one_in

HAS_LANCZOS = "lanczos" in str(torch.nn.functional.interpolate.__doc__)
SOURCES = {
    "240p": (240, 426),
    "360p": (360, 640),
    "480p": (480, 854),
    "480p 4:3": (480, 640),
    "PAL": (576, 720),
    "720p": (720, 1280),
    "1080p": (1080, 1920),
    "1440p": (1440, 2560),
    "2160p": (2160, 3840),
    "21:9": (1080, 2560),
    "portrait": (1920, 1080),
    "small portrait": (640, 360),
    "square": (512, 512),
    "the model's own": (384, 384),
    "smaller": (96, 128),
    "odd": (333, 517),
    "odd portrait": (719, 405),
    "a line": (2, 300),
    "a column": (300, 2),
    "a pixel": (1, 1),
}
WANTED = {
    "llava_onevision": FrameSize(384, 384),
    "internvl": FrameSize(448, 448),
    "qwen2_5_vl": PatchPreprocessor().frame_size,
    "qwen3_vl": QWEN3_PATCHES.frame_size,
    "llava_next_video": FrameSize(336, 336, shortest_edge=336),
    "video_llama_3": FrameSize(multiple=28, min_pixels=12_544, max_pixels=12_845_056, shares_most=True),
    "smolvlm": FrameSize(384, 384, longest_edge=1536, lanczos=True),
}
"""By the published checkpoints' settings."""
NUM_FRAMES = 8


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Noise with flat parts, so that values overshoot at the edges."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    values[: height // 3] = 255
    values[:, : width // 4] = 0
    return values


def torchs(source: NDArray[np.uint8], height: int, width: int, mode: str = "bicubic") -> NDArray[np.uint8]:
    if source.shape[:2] == (height, width):
        return source
    planes = torch.from_numpy(np.ascontiguousarray(source)[None]).permute(0, 3, 1, 2).contiguous()
    made = torch.nn.functional.interpolate(planes, size=[height, width], mode=mode, align_corners=False, antialias=True)
    return made[0].permute(1, 2, 0).numpy()


def fitted_by_torch(source: NDArray[np.uint8], size: FrameSize) -> NDArray[np.uint8]:
    mode = "lanczos" if size.lanczos else "bicubic"
    between = torchs(source, *size.on_the_way(*source.shape[:2]), mode)
    height, width = size.of(*between.shape[:2], NUM_FRAMES)
    if size.shortest_edge:
        top, left = (between.shape[0] - height) // 2, (between.shape[1] - width) // 2
        return between[top : top + height, left : left + width]
    return torchs(between, height, width, mode)


@pytest.mark.parametrize("family", WANTED)
@pytest.mark.parametrize("name", SOURCES)
@one_in(4, "name", "family")
def test_every_source_size_becomes_what_each_family_takes(name: str, family: str) -> None:
    source, size = picture(*SOURCES[name]), WANTED[family]
    if max(source.shape[:2]) > MAX_ASPECT_RATIO * min(source.shape[:2]):
        pytest.skip("upstream refuses it too")
    if size.lanczos and not HAS_LANCZOS:
        pytest.skip("this torch has no Lanczos to compare with")
    np.testing.assert_array_equal(fit(source, size, NUM_FRAMES), fitted_by_torch(source, size))


SIDES = st.integers(1, 90)
MADE = st.integers(2, 90)
"""torch 2.13 fails by an assertion of its own where one pixel is to be made."""


@given(SIDES, SIDES, MADE, MADE, st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_any_size_from_any_size(height: int, width: int, to_height: int, to_width: int, seed: int) -> None:
    source = picture(height, width, seed)
    np.testing.assert_array_equal(resample(source, to_height, to_width), torchs(source, to_height, to_width))


@pytest.mark.parametrize("rotation", [0, 90])
@pytest.mark.parametrize("preprocess", [FramePreprocessor(64, 64), PatchPreprocessor(56 * 56, 112 * 112)])
def test_pixel_values_are_those_of_frames_in_their_own_size(
    preprocess: FramePreprocessor | PatchPreprocessor, rotation: int
) -> None:
    clip = rotated_mp4(make_clip(ClipSpec(even_times_ms(6), width=320, height=180)), rotation)
    whole = sample_video(io.BytesIO(clip), 4, DecodeLimits(max_frame_pixels=320 * 180))
    sized = sample_video(io.BytesIO(clip), 4, DecodeLimits(), size=preprocess.frame_size)
    assert whole.frames.shape[1:] == ((320, 180, 3) if rotation else (180, 320, 3))
    assert sized.frames.shape[1:3] == preprocess.frame_size.of(*whole.frames.shape[1:3], 1)
    assert torch.equal(preprocess(sized.frames), preprocess(whole.frames))
