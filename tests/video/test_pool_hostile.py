"""Every hostile file through real decoder processes: the documented error or frames, and the next file is served."""

import asyncio
import io
import random
import struct
import tempfile
from collections.abc import AsyncIterator

import av
import numpy as np
import psutil
import pytest
import pytest_asyncio

from slipstream.errors import LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits, SampledVideo
from slipstream.video.pool import DecodePool
from tests.support.clip_kinds import CLIPS
from tests.support.media import ClipSpec, even_times_ms, flipped_bytes, make_bomb, make_clip, make_sound

pytestmark = pytest.mark.asyncio(loop_scope="module")

TIMES_MS = even_times_ms(60)
GROUPS = {"g": "12"}
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
MP4 = make_clip(ClipSpec(TIMES_MS, codec_options=GROUPS))
INDEX_FIRST = make_clip(ClipSpec(TIMES_MS, codec_options=GROUPS, container_options={"movflags": "faststart"}))
IN_FRAGMENTS = make_clip(ClipSpec(TIMES_MS, codec_options=GROUPS, container_options=FRAGMENTED))
MKV = make_clip(ClipSpec(TIMES_MS, container="matroska", codec_options=GROUPS))
VP8 = make_clip(ClipSpec(even_times_ms(10), container="webm", codec="libvpx", codec_options={"b": "300k"}))
PLAIN_TIMES = make_clip(ClipSpec(TIMES_MS, codec_options={"bf": "0"}, container_options={"use_editlist": "0"}))


def patched(data: bytes, mark: bytes, offset: int, value: bytes) -> bytes:
    start = data.index(mark) + offset
    return data[:start] + value + data[start + len(value) :]


def two_streams() -> bytes:
    """Pictures and sound."""
    target = io.BytesIO()
    with av.open(io.BytesIO(MP4)) as source, av.open(target, "w", format="matroska") as output:
        pictures = output.add_stream_from_template(source.streams.video[0])
        sound = output.add_stream("aac", rate=16000, layout="mono")
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = pictures
                output.mux(packet)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        silence.sample_rate, silence.pts = 16000, 0
        output.mux(sound.encode(silence))
        output.mux(sound.encode())
    return target.getvalue()


def uhd_bomb() -> bytes:
    return make_bomb(8000, 4000, "mov")


REFUSED: dict[str, tuple[bytes, type[SlipstreamError], str]] = {
    "empty": (b"", UnreadableVideo, "0 bytes"),
    "web page": (b"<!DOCTYPE html><html>404</html>" * 30, UnreadableVideo, "HTML"),
    "random": (random.Random(1).randbytes(50_000), UnreadableVideo, "not recognised"),
    "zeros": (bytes(1_000_000), UnreadableVideo, "not recognised"),
    "no index": (MP4[: MP4.index(b"moov") - 4], UnreadableVideo, "moov"),
    "sound only": (make_sound(), UnreadableVideo, "no video stream, only: audio"),
    "8192 bomb, avi": (make_bomb(8192, 8192, "avi"), SlipstreamError, "pixels a frame"),
    "8192 bomb, mov": (make_bomb(8192, 8192, "mov"), SlipstreamError, "pixels a frame"),
    "VP8 of 16383x16383": (
        patched(VP8, b"\x9d\x01\x2a", 3, struct.pack("<HH", 16383, 16383)),
        SlipstreamError,
        "frame",
    ),
    "absurd stts": (patched(PLAIN_TIMES, b"stts", 16, struct.pack(">I", 10_000_000)), LimitExceeded, "lasts"),
    "HLS": (b"#EXTM3U\n#EXTINF:5,\nhttp://127.0.0.1/a.ts\n#EXT-X-ENDLIST\n", UnreadableVideo, "playlist"),
    "DASH": (b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"/>', UnreadableVideo, "playlist"),
    "concat": (b"ffconcat version 1.0\nfile '/etc/passwd'\n", UnreadableVideo, "playlist"),
}
SERVED = {
    "cut mkv": (MKV[: len(MKV) * 7 // 10], "frames end at"),
    "cut mp4": (INDEX_FIRST[: len(INDEX_FIRST) * 7 // 10], "frames end at"),
    "cut fragments": (IN_FRAGMENTS[: len(IN_FRAGMENTS) * 7 // 10], "frames end at"),
    "lying duration": (patched(MKV, b"\x44\x89\x88", 3, struct.pack(">d", 1e15)), "states"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[DecodePool]:
    made = DecodePool(1, DecodeLimits(timeout_s=20.0))
    yield made
    made.close()


async def sample(pool: DecodePool, data: bytes) -> SampledVideo:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        return await pool.sample(file.fileno(), 8)


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_by_name_and_its_decoder_lives_on(pool: DecodePool, name: str) -> None:
    await sample(pool, MP4)
    pids = pool.pids
    data, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        await sample(pool, data)
    assert len((await sample(pool, MP4)).frames) == 8
    assert pool.pids == pids
    assert psutil.Process(pids[0]).memory_info().rss < 200 * 1024**2


@pytest.mark.parametrize("name", SERVED)
async def test_it_is_served_with_a_warning(pool: DecodePool, name: str) -> None:
    data, warning = SERVED[name]
    assert any(warning in text for text in (await sample(pool, data)).warnings)


@pytest.mark.parametrize("name", [*CLIPS, "two streams"])
async def test_every_kind_of_clip_is_decoded_as_it_is_here(pool: DecodePool, name: str) -> None:
    """A confined process can load nothing later: whatever a codec needs must have been there at its start."""
    data = two_streams() if name == "two streams" else make_clip(CLIPS[name])
    np.testing.assert_array_equal(
        (await sample(pool, data)).frames, sample_video(io.BytesIO(data), 8, DecodeLimits()).frames
    )


async def test_flipped_bytes_end_in_frames_or_a_named_error(pool: DecodePool) -> None:
    outcomes = await asyncio.gather(
        *(sample(pool, flipped_bytes(MP4, 40, seed)) for seed in range(20)), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} <= {SampledVideo, UnreadableVideo, LimitExceeded}


async def test_a_file_that_needs_more_memory_than_allowed_is_refused() -> None:
    pool = DecodePool(1, DecodeLimits(timeout_s=20.0, max_frames_sampled=8), memory_bytes=32 * 1024**2)
    try:
        with pytest.raises(LimitExceeded, match="more memory than is allowed"):
            await sample(pool, uhd_bomb())
        assert len((await sample(pool, MP4)).frames) == 8
    finally:
        pool.close()
