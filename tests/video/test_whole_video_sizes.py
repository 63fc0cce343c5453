"""Models whose bounds are of a whole video: few frames are large, and there is room for them, in a decoder, too."""

import tempfile
from dataclasses import replace

import numpy as np
import pytest

from slipstream.errors import InvalidRequest
from slipstream.frame_size import FrameSize, fit
from slipstream.video.messages import BadAnswer, DecodeLimits, DecodeRequest, Sampled, encode_answer, parse_answer
from slipstream.video.messages import SampledVideo as Video
from slipstream.video.pool import DecodePool
from tests.support.media import ClipSpec, even_times_ms, make_clip

ASKED = 32
SIZE = FrameSize(multiple=32, min_pixels=32 * 32, max_pixels=256 * 32 * 32, frames_per_step=2)
"""As Qwen3-VL has it, in small."""
SHARED = FrameSize(multiple=28, min_pixels=12_544, max_pixels=12_845_056, shares_most=True)
"""As VideoLLaMA 3 has it."""
PUBLISHED = FrameSize(multiple=32, min_pixels=4096, max_pixels=25_165_824, frames_per_step=2)
LIMITS = DecodeLimits(timeout_s=60.0)


def made(num_frames: int, width: int = 320, height: int = 240) -> bytes:
    return make_clip(ClipSpec(even_times_ms(num_frames), width=width, height=height))


async def sampled(data: bytes, *windows: tuple[float, float], size: FrameSize = SIZE) -> list[Video]:
    pool = DecodePool(1, LIMITS)
    try:
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.flush()
            if not windows:
                return [await pool.sample(file, ASKED, size=size)]
            found = await pool.sample_windows(file, ASKED, windows, size=size)
            assert all(isinstance(video, Video) for video in found), found
            return [video for video in found if isinstance(video, Video)]
    finally:
        pool.close()


@pytest.mark.parametrize("size", [SIZE, replace(SIZE, frames_per_step=0, shares_most=True)])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 12])
async def test_a_clip_of_few_frames_has_them_as_large_as_the_model_wants(num_frames: int, size: FrameSize) -> None:
    (video,) = await sampled(made(num_frames), size=size)
    assert len(video.frames) == num_frames
    assert video.frames.shape[1:3] == size.of(240, 320, num_frames)
    assert video.frames.nbytes <= DecodeRequest(ASKED, LIMITS, size).frames_bytes


@pytest.mark.parametrize("num_frames", [1, 3, 7])
async def test_frames_have_no_more_pixels_than_the_server_allows(num_frames: int) -> None:
    """Also where the model counts three frames as four."""
    (video,) = await sampled(made(num_frames), size=SIZE.within(20_000))
    assert video.frames.shape == (num_frames, 96, 160, 3)


async def test_a_short_last_segment_has_its_own_size() -> None:
    videos = await sampled(made(52), (0.0, 1.0), (1.0, 2.0), (2.0, 2.08))
    assert [len(video.frames) for video in videos] == [25, 25, 2]
    assert [video.frames.shape[1:3] for video in videos] == [SIZE.of(240, 320, count) for count in (25, 25, 2)]
    assert videos[0].frames.shape[1:] != videos[2].frames.shape[1:]


async def test_frames_that_no_model_takes_are_not_called_damage() -> None:
    narrow = made(8, width=3300, height=16)
    for windows in ((), ((0.0, 0.1), (0.1, 0.2))):
        with pytest.raises(InvalidRequest, match="too narrow for this model"):
            await sampled(narrow, *windows)


def test_a_decoder_that_says_more_than_there_is_room_for_lies() -> None:
    """Each frame alone may be as large, and there may be as many, but not both."""
    request = DecodeRequest(ASKED, LIMITS, SIZE)
    side = int(request.frame_pixels**0.5)
    assert 3 * ASKED * side * side > request.window_bytes
    times_s = tuple(map(float, range(ASKED)))
    with pytest.raises(BadAnswer, match="more or larger"):
        parse_answer(encode_answer(Sampled((ASKED, side, side), times_s, 1.0, 40, 25, "h264", 0, ())), request)


def test_what_the_memory_holds_is_enough_for_any_number_of_frames() -> None:
    """Property by brute force: whatever the number and the shape, that many frames of their size fit."""
    room = DecodeRequest(ASKED, LIMITS, SIZE).window_bytes
    for count in range(1, ASKED + 1):
        for height, width in ((240, 320), (1080, 1920), (64, 4096), (4096, 64)):
            picture = fit(np.zeros((height, width, 3), dtype=np.uint8), SIZE, count) if count < 3 else None
            rows, columns = SIZE.of(height, width, count)
            assert picture is None or picture.shape[:2] == (rows, columns)
            assert 3 * count * rows * columns <= room


@pytest.mark.parametrize("size", [PUBLISHED.within(602_112), replace(PUBLISHED, capped_pixels=768 * 32 * 32), SHARED])
def test_a_frame_is_no_larger_than_is_believed(size: FrameSize) -> None:
    for asked in range(1, ASKED + 1):
        request = DecodeRequest(asked, LIMITS, size)
        for height, width in ((960, 1024), (1080, 1920), (64, 4096), (4096, 64)):
            rows, columns = size.of(height, width, asked)
            assert rows * columns <= request.frame_pixels and 3 * asked * rows * columns <= request.window_bytes
