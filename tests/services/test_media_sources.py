"""Where videos come from: uploads in memory and on disk, paths below roots, and addresses when hosts are allowed."""

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.fetch import Fetcher, Sink
from slipstream.captioning.media import Media
from slipstream.config import parse_config
from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    ServiceUnavailable,
    UnreadableVideo,
    VideoNotFound,
)
from slipstream.frame_size import FrameSize
from slipstream.video.damage import DamageCount
from slipstream.video.decode import warn_few
from slipstream.video.files import FileThreads, VideoBuffer
from slipstream.video.messages import MAX_MESSAGE_BYTES, Sampled, SampledVideo, SampledWindows, encode_answer
from tests.support.hung_mount import can_hang, hung_mount
from tests.support.media import ClipSpec, even_times_ms, make_clip
from tests.support.processes import file_threads_rest

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIP = make_clip(ClipSpec(even_times_ms(20)))


class FakeFetcher(Fetcher):
    """A network of one file."""

    def __init__(self) -> None:
        super().__init__([("videos.example", 443)], 10**6, 5.0)
        self.sources: list[str] = []

    async def fetch(self, source: str, sink: Sink) -> None:
        self.sources.append(source)
        await asyncio.sleep(0)
        await sink.write(CLIP)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def media(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Media]:
    root = tmp_path_factory.mktemp("root")
    (root / "clip.mp4").write_bytes(CLIP)
    (root / "link.mp4").symlink_to(root / "clip.mp4")
    (root / "folder").mkdir()
    os.mkfifo(root / "pipe")
    config = GatewayConfig(listen="", target="t:1", video_roots=f"{root}:/dev", decode_workers=1, max_video_bytes=10**5)
    made = Media(config, FakeFetcher())
    made.prepare()
    yield made
    made.close()


def ignore(done: int, total: int) -> None:
    """Nobody follows the progress."""


async def chunks(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        await asyncio.sleep(0)
        yield data[start : start + size]


async def test_an_upload_becomes_frames(media: Media) -> None:
    async with media.open("", chunks(CLIP)) as source:
        video = await media.sample(source, 4, ignore, digest=True)
    assert len(video.frames) == 4
    assert (video.sha256, video.num_bytes) == (hashlib.sha256(CLIP).hexdigest(), len(CLIP))


async def test_what_is_decoded_is_an_option(media: Media) -> None:
    flv = make_clip(ClipSpec(even_times_ms(5), container="flv", codec="flv"))
    config = parse_config(GatewayConfig, "gateway", ["--listen", "", "--target", "t:1", "--formats", "modern"], {})
    narrow = Media(config, FakeFetcher())
    try:
        async with media.open("", chunks(flv)) as source:
            assert len((await media.sample(source, 4, ignore)).frames) == 4
            with pytest.raises(UnreadableVideo, match="--formats archive takes it"):
                await narrow.sample(source, 4, ignore)
    finally:
        narrow.close()
    with pytest.raises(InvalidConfig, match="--formats: 'old' must be one of modern, archive, all"):
        parse_config(GatewayConfig, "gateway", ["--listen", "", "--target", "t:1", "--formats", "old"], {})


async def test_an_upload_that_is_too_large_is_refused(media: Media) -> None:
    with pytest.raises(LimitExceeded, match="100000 bytes"):
        async with media.open("", chunks(bytes(100_001), 50_000)):
            pass


async def test_items_of_the_archive_are_paths_or_addresses(media: Media) -> None:
    for source in ("clip.mp4", "https://videos.example/clip.mp4", "HTTPS://videos.example/clip.mp4"):
        async with media.open_source(source) as file:
            assert len((await media.sample(file, 4, ignore)).frames) == 4


@pytest.mark.parametrize("scheme", ["file", "FILE"])
async def test_a_path_may_be_an_address(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "a b.mp4").write_bytes(b"a clip")
    media = media_of(tmp_path)
    try:
        async with media.open_source(f"{scheme}://{tmp_path}/a%20b.mp4") as file:
            assert file.num_bytes == len(b"a clip")
    finally:
        media.close()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("", InvalidRequest),
        ("../clip.mp4", InvalidRequest),
        ("%2e%2e/clip.mp4", VideoNotFound),
        ("clip.mp4\0", InvalidRequest),
        ("/etc/passwd", VideoNotFound),
        ("link.mp4", VideoNotFound),
        ("folder", InvalidRequest),
        ("pipe", InvalidRequest),
        ("/dev/zero", InvalidRequest),
        ("missing.mp4", VideoNotFound),
    ],
)
async def test_what_is_no_file_below_a_root_is_refused(media: Media, source: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        async with media.open_source(source):
            pass


async def test_each_owner_has_a_folder_that_no_other_sees(tmp_path: Path) -> None:
    for name in ("alice", "bob", "all"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.mp4").write_bytes(CLIP)
    (tmp_path / "outside.mp4").write_bytes(CLIP)
    roots = f"{tmp_path / '{owner}'}:{tmp_path / 'all'}"
    media = Media(GatewayConfig(listen="", target="t:1", video_roots=roots, decode_workers=1))

    async def opens(path: Path | str, owner: str) -> bool:
        try:
            async with media.open_source(str(path), owner=owner), media.open(str(path), chunks(b""), owner=owner):
                return True
        except (VideoNotFound, InvalidRequest):
            return False

    try:
        for owner in ("alice", "bob"):
            assert await opens(f"{owner}.mp4", owner) and await opens(tmp_path / owner / f"{owner}.mp4", owner)
            assert await opens("all.mp4", owner)
        for path in ("bob.mp4", "../bob/bob.mp4", tmp_path / "bob" / "bob.mp4", tmp_path / "outside.mp4"):
            assert not await opens(path, "alice")
        for nobody in ("", ".", "..", "alice/../bob", "{owner}", "bob\0"):
            assert await opens("all.mp4", nobody) and not await opens("bob.mp4", nobody)
            assert not await opens(tmp_path / "outside.mp4", nobody) and not await opens("outside.mp4", nobody)
    finally:
        media.close()


async def test_by_default_there_are_neither_paths_nor_addresses() -> None:
    media = Media(GatewayConfig(listen="", target="t:1"))
    try:
        with pytest.raises(VideoNotFound, match="opens no paths"):
            async with media.open_source("clip.mp4"):
                pass
        with pytest.raises(InvalidRequest, match="fetches nothing from the network"):
            async with media.open_source("https://videos.example/clip.mp4"):
                pass
    finally:
        media.close()


@pytest.mark.parametrize("address", ["", "https://videos.example/clip.mp4"])
async def test_many_uploads_at_once_take_turns(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """As those of many streams over HTTP: none is refused for the moment that the others take."""
    monkeypatch.setattr("slipstream.captioning.media.PATIENCE_S", 240.0)
    media = Media(GatewayConfig(listen="", target="t:1", max_uploads=1), FakeFetcher())

    async def opened() -> int:
        opening = media.open_source(address, counts=True) if address else media.open("", chunks(CLIP))
        async with opening as source:
            return source.num_bytes

    try:
        assert await asyncio.gather(*(opened() for _ in range(6))) == [len(CLIP)] * 6
    finally:
        media.close()


async def test_sampling_runs_ahead_of_whatever_else_is_done(media: Media) -> None:
    async def ahead(path: str) -> int:
        async with media.open_source(path) as file:
            return len((await media.sample(file, 4, ignore)).frames)

    assert await asyncio.gather(*(ahead("clip.mp4") for _ in range(5))) == [4] * 5


@pytest.mark.parametrize("num_frames", [1, 2, 16, 1024])
async def test_segments_that_are_decoded_together_have_room_in_one_answer(num_frames: int) -> None:
    """With damage in each of them."""
    config = GatewayConfig(listen="", target="t:1", max_frames=4096, frames_budget_mb=1000)
    media = Media(config)
    at_once = media.windows_at_once(num_frames, FrameSize(8, 8))
    media.close()
    damage = DamageCount(99, 17)
    damage.last = "[Errno 1094995529] Invalid data found when processing input: 'avcodec_send_packet()'"
    times_s = tuple(1000 + index / 3 for index in range(num_frames))
    frames_said = ("17 of the sampled frames are damaged and only partly right", *warn_few(num_frames + 1, num_frames))
    warnings = (*damage.warnings(), *frames_said)
    segment = Sampled((num_frames, 8, 8), times_s, 1000 / 3, 1920, 1080, "mpeg2video", 270, warnings)
    assert at_once >= min(100, 4096 // num_frames)
    assert len(encode_answer(SampledWindows((segment,) * at_once))) <= MAX_MESSAGE_BYTES


async def test_frames_wait_for_room_until_the_caption_before_has_ended(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(CLIP)
    config = GatewayConfig(listen="", target="t:1", video_roots=str(tmp_path), decode_workers=1, frames_budget_mb=2)
    media = Media(config)
    queued: asyncio.Queue[int] = asyncio.Queue()

    async def sample(num_frames: int) -> SampledVideo:
        async with media.open_source("clip.mp4") as file:
            return await media.sample(file, num_frames, ignore, on_queued=queued.put_nowait)

    try:
        with pytest.raises(LimitExceeded, match="4 MiB of frames, but the gateway has 2 MiB in all"):
            await sample(2)
        with await sample(1) as first:
            assert media.frames.used_bytes == first.frames.nbytes < 2**21
            fills = media.frames.reserve(2**21 - first.frames.nbytes)
            second = asyncio.create_task(sample(1))
            assert await queued.get() == 0
        assert not len(first.frames)
        assert media.frames.num_queued == 1
        fills.release()
        (await second).close()
        assert (media.frames.used_bytes, media.frames.num_admitted) == (0, 0)
    finally:
        media.close()


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.video.files.IN_MEMORY_BYTES", 1000)


def kind_of(buffer: VideoBuffer) -> str:
    return os.readlink(f"/proc/self/fd/{buffer.file.fileno()}")


@pytest.mark.usefixtures("small_memory")
async def test_a_video_lies_in_memory_at_first_and_on_disk_when_it_grows() -> None:
    with VideoBuffer(10_000) as buffer:
        await buffer.write(b"a" * 1000)
        assert "memfd:video" in kind_of(buffer)
        await buffer.write(b"b" * 1000)
        assert "memfd" not in kind_of(buffer)
        assert (await buffer.finished()).file.read() == b"a" * 1000 + b"b" * 1000


@pytest.mark.usefixtures("small_memory")
async def test_a_full_disk_is_an_overload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with VideoBuffer(10_000) as buffer, pytest.raises(Overloaded, match="no room"):
        await buffer.write(b"a" * 2000)


def media_of(*roots: Path) -> Media:
    places = ":".join(map(str, roots))
    return Media(
        GatewayConfig(listen="", target="t:1", video_roots=places, decode_workers=1, file_timeout_s=3.0), FakeFetcher()
    )


@pytest.fixture
def two_roots(tmp_path: Path) -> list[Path]:
    roots = [tmp_path / "hung", tmp_path / "well"]
    for root in roots:
        root.mkdir()
        (root / "clip.mp4").write_bytes(CLIP)
    return roots


async def check_that_only_one_caption_is_frozen(media: Media, hung: Path, well: Path) -> None:
    """Three that ask the hung mount get an error in time; meanwhile others are served, as the event loop turns: a call
    on it to the file system would not come back before the test ends."""

    async def ask(path: Path) -> int:
        async with media.open_source(str(path)) as file:
            return len((await media.sample(file, 4, ignore, digest=True)).frames)

    frozen = [asyncio.create_task(ask(hung / "clip.mp4")) for _ in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(ask(well / "clip.mp4"), 120.0) == 4
    outcomes = await asyncio.gather(*frozen, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServiceUnavailable] * 3
    assert "does not answer" in str(outcomes[0])


@pytest.mark.skipif(not can_hang(), reason="mounting a file system needs root and /dev/fuse")
async def test_a_mount_that_hangs_freezes_its_own_captions_only(two_roots: list[Path]) -> None:
    media = media_of(*two_roots)
    try:
        with hung_mount(two_roots[0]):
            await check_that_only_one_caption_is_frozen(media, *two_roots)
    finally:
        media.close()


async def test_a_disk_that_hangs_freezes_its_own_captions_only(
    two_roots: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where nothing can be mounted: opening below that root does not come back."""
    healed, really_open = threading.Event(), os.open

    def open_or_hang(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).startswith(str(two_roots[0])):
            healed.wait()
        return really_open(path, *arguments, **named)

    monkeypatch.setattr("os.open", open_or_hang)
    media = media_of(*two_roots)
    try:
        await check_that_only_one_caption_is_frozen(media, *two_roots)
    finally:
        healed.set()
        media.close()
        await file_threads_rest()


@pytest.mark.usefixtures("small_memory")
async def test_a_temporary_folder_that_hangs_freezes_its_own_upload_only(monkeypatch: pytest.MonkeyPatch) -> None:
    healed = threading.Event()
    monkeypatch.setattr("tempfile.TemporaryFile", healed.wait)
    try:
        with (
            VideoBuffer(10_000, FileThreads(0.2)) as buffer,
            pytest.raises(ServiceUnavailable, match="does not answer"),
        ):
            await buffer.write(b"a" * 2000)
    finally:
        healed.set()
        await file_threads_rest()


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ("", set()),
        ("A.example", {("a.example", 443)}),
        ("a.example,b.example:8443", {("a.example", 443), ("b.example", 8443)}),
    ],
)
async def test_hosts_are_read_from_one_option(given: str, hosts: set[tuple[str, int]]) -> None:
    argv = ["--listen", "a", "--target", "b", "--url-hosts", given]
    assert parse_config(GatewayConfig, "gateway", argv, {}).allowed_hosts == hosts


@pytest.mark.parametrize("given", ["*", "https://a.example", "a.example:0", "a.example:x", "a b", ":443"])
async def test_hosts_that_are_none_stop_the_start(given: str) -> None:
    with pytest.raises(InvalidConfig, match="--url-hosts"):
        parse_config(GatewayConfig, "gateway", ["--listen", "a", "--target", "b", "--url-hosts", given], {})
