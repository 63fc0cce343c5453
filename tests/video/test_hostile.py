"""Files that are broken, lie, or attack: a named error or a usable result with a warning, soon, and nothing else."""

import io
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import av
import pytest

from slipstream.errors import LimitExceeded, SlipstreamError, UnreadableVideo
from slipstream.video.decode import sample_video
from slipstream.video.messages import DecodeLimits, SampledVideo
from tests.support.media import (
    ClipSpec,
    even_times_ms,
    flipped_bytes,
    make_bomb,
    make_clip,
    make_sound,
    read_index,
)
from tests.support.variants import some
from tests.support.written_clips import tiled_picture

LIMITS = DecodeLimits()
CLIP = ClipSpec(even_times_ms(100), codec_options={"g": "12"})
MKV = ClipSpec(CLIP.times_ms, container="matroska", codec_options={"g": "12"})
FRAGMENTED = ClipSpec(
    CLIP.times_ms,
    codec_options={"g": "12"},
    container_options={"movflags": "frag_keyframe+empty_moov+default_base_moof"},
)
INDEX_FIRST = ClipSpec(CLIP.times_ms, codec_options={"g": "12"}, container_options={"movflags": "faststart"})


def sample(data: bytes, limits: DecodeLimits = LIMITS) -> SampledVideo:
    return sample_video(io.BytesIO(data), 8, limits)


def without_index(mp4: bytes) -> bytes:
    return mp4[: mp4.index(b"moov") - 4]


UNREADABLE = {
    "empty": (b"", "0 bytes"),
    "one byte": (b"\0", "not recognised"),
    "web page": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>" * 30, "HTML"),
    "text": (b"no video here\n" * 100, "not recognised"),
    "random bytes": (random.Random(1).randbytes(50_000), "not recognised"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(500), "not recognised"),
    "HLS": (b"#EXTM3U\n#EXTINF:5,\nsegment.ts\n#EXT-X-ENDLIST\n", "playlist"),
    "DASH": (b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"/>', "playlist"),
    "concat": (b"ffconcat version 1.0\nfile 'clip.mp4'\n", "playlist"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_video_is_named(name: str) -> None:
    data, message = UNREADABLE[name]
    with pytest.raises(UnreadableVideo, match=message):
        sample(data)


def test_sound_only_and_missing_index_are_named() -> None:
    with pytest.raises(UnreadableVideo, match="no video stream, only: audio;"):
        sample(make_sound())
    with pytest.raises(UnreadableVideo, match="no video stream, only: a picture, audio;"):
        sample(make_sound(has_cover=True))
    with pytest.raises(UnreadableVideo, match="moov"):
        sample(without_index(make_clip(CLIP)))


@pytest.mark.parametrize("codec", ["libx264", "libvpx-vp9"])
def test_an_encrypted_video_is_not_called_damaged(codec: str) -> None:
    locked = {"encryption_scheme": "cenc-aes-ctr", "encryption_key": "76" * 16, "encryption_kid": "a7" * 16}
    ways = [{}, {"movflags": "frag_keyframe+empty_moov"}]
    for more in ways * 12:  # the key stands still, what it makes of each does not, and may look like any kind of frame
        clip = make_clip(ClipSpec(even_times_ms(12), codec=codec, container_options=locked | more))
        with pytest.raises(UnreadableVideo, match="is encrypted"):
            sample(clip)


def test_a_picture_in_tiles_is_not_taken_for_a_video_of_its_first_one() -> None:
    clip = make_clip(ClipSpec(even_times_ms(3), container="avi", codec="mjpeg", pix_fmt="yuvj420p"))
    with av.open(io.BytesIO(clip)) as opened:
        tiles = [bytes(packet) for packet in opened.demux(video=0) if packet.size]
    with pytest.raises(UnreadableVideo, match="a picture in tiles"):
        sample(tiled_picture(tiles))


def test_a_codec_outside_the_list_is_named() -> None:
    clip = make_clip(ClipSpec(even_times_ms(3), container="avi", codec="huffyuv", pix_fmt="yuv422p"))
    with pytest.raises(UnreadableVideo, match="codec 'huffyuv' is not served"):
        sample(clip, DecodeLimits(formats="modern"))


@pytest.mark.parametrize("spec", [MKV, FRAGMENTED, INDEX_FIRST], ids=["mkv", "fragmented", "mp4"])
@pytest.mark.parametrize("percent", [60, 70, 80])
def test_a_truncated_file_gives_what_is_there(spec: ClipSpec, percent: int) -> None:
    data = make_clip(spec)
    video = sample(data[: len(data) * percent // 100])
    found = [read_index(frame) for frame in video.frames]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(video.timestamps_s[-1] / 0.04)
    assert any("frames end at" in warning for warning in video.warnings)


@pytest.mark.parametrize("container", ["mp4", "mov", "mpegts"])
def test_a_file_whose_sound_is_longer_is_not_cut_off(container: str) -> None:
    pictures, target = make_clip(ClipSpec(even_times_ms(8))), io.BytesIO()
    with (
        av.open(io.BytesIO(pictures)) as film,
        av.open(io.BytesIO(make_sound())) as sound,
        av.open(target, "w", format=container) as output,
    ):
        for source, stream in [(each, output.add_stream_from_template(each.streams[0])) for each in (film, sound)]:
            for packet in source.demux():
                if packet.size:
                    packet.stream = stream
                    output.mux(packet)
    with av.open(io.BytesIO(target.getvalue())) as opened:
        assert opened.duration and opened.duration > 900_000, "the sound is there"
    assert sample(target.getvalue()).warnings == sample(pictures).warnings


@pytest.mark.parametrize("spec", [MKV, FRAGMENTED, INDEX_FIRST], ids=["mkv", "fragmented", "mp4"])
def test_a_file_cut_anywhere_ends_in_frames_or_a_named_error(spec: ClipSpec) -> None:
    data = make_clip(spec)
    for length in range(1, len(data), max(1, len(data) // 60)):
        with suppress(UnreadableVideo):
            assert len(sample(data[:length]).frames) >= 1


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_flipped_bytes_end_in_frames_or_a_named_error(codec: str) -> None:
    options = {"g": "25", "b": "3M", **({"qp": "4"} if codec == "libx264" else {})}
    data = make_clip(ClipSpec(even_times_ms(100), width=160, height=120, codec=codec, codec_options=options))
    outcomes = set()
    for seed in range(20):
        started_s = time.monotonic()
        with suppress(UnreadableVideo):
            video = sample(flipped_bytes(data, 400, seed))
            assert video.frames.shape[1:] == (120, 160, 3)
            outcomes.add(bool(video.warnings))
        assert time.monotonic() - started_s < 60
    assert False not in outcomes


@pytest.mark.parametrize("spec", [CLIP, MKV, FRAGMENTED], ids=["mp4", "mkv", "fragmented"])
def test_bytes_flipped_in_headers_end_in_frames_or_a_named_error(spec: ClipSpec) -> None:
    data = make_clip(spec)
    for seed in range(40):
        chance = random.Random(seed)
        damaged = bytearray(data)
        for _ in range(20):
            damaged[chance.randrange(len(data))] = chance.randrange(256)
        with suppress(UnreadableVideo, LimitExceeded):
            assert len(sample(bytes(damaged)).frames) >= 1


def test_more_damage_than_allowed_is_refused_and_a_little_is_reported() -> None:
    damaged = flipped_bytes(make_clip(ClipSpec(even_times_ms(60), codec_options={"qp": "4"})), 20, seed=1)
    with pytest.raises(UnreadableVideo, match="more than 0 packets"):
        sample_video(io.BytesIO(damaged), 60, DecodeLimits(max_corrupt_packets=0))
    assert any("damaged packets were skipped" in w for w in sample_video(io.BytesIO(damaged), 60, LIMITS).warnings)


@pytest.mark.parametrize("container", some(["avi", "mov"], keep=("mov",)))
def test_a_pixel_bomb_is_refused_before_it_is_decoded(container: str) -> None:
    data = make_bomb(8192, 8192, container)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.monotonic()
    with pytest.raises((LimitExceeded, UnreadableVideo), match="pixels a frame"):
        sample(data)
    assert time.monotonic() - started_s < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 * 1024


def test_a_frame_larger_than_its_header_is_refused() -> None:
    data = make_clip(ClipSpec(even_times_ms(10), container="webm", codec="libvpx", codec_options={"b": "300k"}))
    start = data.index(b"\x9d\x01\x2a") + 3
    with pytest.raises(SlipstreamError):
        sample(data[:start] + struct.pack("<HH", 16383, 16383) + data[start + 4 :])


def test_a_stated_duration_is_not_believed() -> None:
    data = make_clip(MKV)
    start = data.index(b"\x44\x89\x88") + 3
    video = sample(data[:start] + struct.pack(">d", 1e15) + data[start + 8 :])
    assert video.duration_s == pytest.approx(4.0)
    assert [read_index(frame) for frame in video.frames] == [0, 12, 25, 37, 50, 62, 75, 87]
    assert any("states" in warning for warning in video.warnings)


def test_a_file_that_states_when_it_ends_and_begins_late_is_whole() -> None:
    late = make_clip(replace(MKV, times_ms=[7000 + ms for ms in MKV.times_ms]))
    assert not sample(late).warnings
    assert sample(late[: len(late) // 2]).warnings[-1].startswith("the file states 11.0 s, but")


@pytest.mark.parametrize("spec", [CLIP, FRAGMENTED], ids=["mp4", "fragmented"])
def test_a_file_with_more_behind_its_last_box_is_whole(spec: ClipSpec) -> None:
    video = sample(make_clip(spec) + bytes(range(128, 255)))
    assert not video.warnings and read_index(video.frames[-1]) == 87


def test_absurd_frame_times_exceed_the_longest_clip() -> None:
    data = make_clip(ClipSpec(CLIP.times_ms, codec_options={"bf": "0"}, container_options={"use_editlist": "0"}))
    delta = data.index(b"stts") + 16
    with pytest.raises(LimitExceeded, match="lasts"):
        sample(data[:delta] + struct.pack(">I", 10_000_000) + data[delta + 4 :])


class NamedSource(io.BytesIO):
    """A file whose name makes libav believe in a playlist."""

    name = "clip.m3u8"


class SlowSource(io.BytesIO):
    """A disk that takes 20 ms for each 100 bytes."""

    def read(self, size: int | None = -1) -> bytes:
        time.sleep(0.02)
        return super().read(min(100, size or 0))


class FailingSource(io.BytesIO):
    """A disk that fails at the first read of more than so many bytes: libav's are large, those of a head are not."""

    def __init__(self, content: bytes, most: int) -> None:
        super().__init__(content)
        self._most = most

    def read(self, size: int | None = -1) -> bytes:
        if size and size > self._most:
            raise OSError("disk on fire")
        return super().read(size)


def test_a_slow_source_times_out() -> None:
    started_s = time.monotonic()
    with pytest.raises(LimitExceeded, match=r"longer than 0\.3 s"):
        sample_video(SlowSource(make_clip(CLIP)), 8, DecodeLimits(timeout_s=0.3))
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("most", [1000, 8])
def test_a_failing_source_is_named(most: int) -> None:
    with pytest.raises(UnreadableVideo, match="disk on fire"):
        sample_video(FailingSource(make_clip(CLIP), most), 8, LIMITS)


@pytest.fixture
def visits() -> Iterator[tuple[int, list[str]]]:
    """A port on this host, and who connected to it."""
    seen: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        stop = threading.Event()

        def accept() -> None:
            while not stop.is_set():
                try:
                    connection, address = server.accept()
                except TimeoutError:
                    continue
                seen.append(str(address))
                connection.close()

        listener = threading.Thread(target=accept)
        listener.start()
        yield server.getsockname()[1], seen
        time.sleep(0.1)
        stop.set()
        listener.join()


def test_a_playlist_opens_no_connection(visits: tuple[int, list[str]]) -> None:
    port, seen = visits
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nhttp://127.0.0.1:{port}/a.ts\n#EXT-X-ENDLIST\n".encode()
    source = NamedSource(playlist)
    with pytest.raises(UnreadableVideo):
        sample_video(source, 8, LIMITS)
    time.sleep(0.1)
    assert seen == []
    source.seek(0)
    with pytest.raises(av.error.FFmpegError):
        av.open(source)
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen != [], "without the guard, libav does connect: the test above proves something"


def test_a_playlist_opens_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret.mp4").write_bytes(make_clip(CLIP))
    disguised = tmp_path / "clip.mp4"
    disguised.write_text("ffconcat version 1.0\nfile secret.mp4\n")
    with av.open(str(disguised)) as unguarded:
        assert unguarded.streams.video, "without the guard, libav does follow it"
    with disguised.open("rb") as source, pytest.raises(UnreadableVideo, match="playlist"):
        sample_video(source, 8, LIMITS)
