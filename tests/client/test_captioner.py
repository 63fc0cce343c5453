"""`Captioner` and `AsyncCaptioner` at a fake gateway: what they send, what they give, and what they refuse."""

import asyncio
import inspect
import io
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest

import slipstream
from slipstream import Caption, Captioner, CommittedText, FinishReason, StageChange
from slipstream.errors import (
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    ProtocolViolation,
    ServiceUnavailable,
    ServiceUnreachable,
    UnreadableVideo,
    VideoNotFound,
)
from slipstream.options import OPTIONS
from tests.cli.fake_gateway import DETAILS, PIECES, TEXT, FakeGateway, good_video, hanging_video, refused_video
from tests.client.conftest import Proxy

HANG = b"hang"

# -- what is sent, what comes back ------------------------------------------------------------------------------------


def test_a_caption_is_whole(captioner: Captioner, video: Path) -> None:
    caption = captioner.caption(video, "What happens?")
    assert caption.text == str(caption) == TEXT
    assert caption.finish_reason is FinishReason.STOP
    assert [(token.piece, token.from_draft) for token in caption.tokens] == list(PIECES)
    assert caption.options["pruner"] == "uv" and caption.video.num_frames == 8
    assert caption.decoding_rate == pytest.approx(8.0)


def test_options_are_those_of_the_table(captioner: Captioner, gateway: FakeGateway, video: Path) -> None:
    captioner.caption(video)
    assert gateway.options.ListFields() == []
    defaults = slipstream.CaptionOptions("shared", temperature=0.5, seed=1)
    captioner.caption(video, seed=2, stop=(".", "!"), gate=False, options=defaults, request_id="r")
    sent = {field.name: value for field, value in gateway.options.ListFields()}
    expected = {"prompt": "shared", "temperature": 0.5, "seed": 2, "stop": [".", "!"], "gate": False, "request_id": "r"}
    assert sent == expected


@pytest.mark.parametrize("method", [Captioner.caption, slipstream.AsyncCaptioner.stream])
def test_help_shows_every_option(method: Callable[..., object]) -> None:
    parameters = inspect.signature(method).parameters
    assert list(parameters)[:3] == ["self", "video", "prompt"]
    assert {spec.name for spec in OPTIONS} <= set(parameters)
    shown = inspect.getdoc(method) or ""
    assert all(f"    {spec.name}: {spec.help}" in shown for spec in OPTIONS)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path,
        str,
        lambda path: path.read_bytes(),
        lambda path: bytearray(path.read_bytes()),
        lambda path: memoryview(path.read_bytes()),
        lambda path: path.open("rb"),
        lambda path: io.BytesIO(path.read_bytes()),
    ],
)
def test_kinds_of_videos(
    captioner: Captioner, gateway: FakeGateway, video: Path, make: Callable[[Path], slipstream.Video]
) -> None:
    given = make(video)
    assert captioner.caption(given).text == TEXT
    assert gateway.received == video.read_bytes() and max(gateway.chunk_sizes) <= 512 * 1024
    if isinstance(given, io.IOBase):
        assert not given.closed, "it belongs to who opened it"
        given.close()


def test_a_path_of_the_gateways_is_not_uploaded(captioner: Captioner, gateway: FakeGateway) -> None:
    captioner.caption(slipstream.RemotePath("/videos/a.mp4"))
    assert gateway.options.path == "/videos/a.mp4" and gateway.received == b""


def test_info(captioner: Captioner) -> None:
    assert captioner.info().version == "9.9.9"


# -- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_gives_text_and_then_the_caption(captioner: Captioner, video: Path) -> None:
    stream = captioner.stream(video)
    with pytest.raises(InvalidRequest, match="not finished"):
        _ = stream.caption
    pieces = list(stream)
    assert [str(piece) for piece in pieces] == [piece for piece, _ in PIECES]
    assert stream.text == stream.caption.text == TEXT
    assert list(stream) == []


def test_all_events(captioner: Captioner, video: Path) -> None:
    events = list(captioner.events(video))
    assert [type(event) for event in events] == [*[StageChange] * 3, *[CommittedText] * 4, Caption]


async def test_the_asynchronous_twin(gateway: FakeGateway, video: Path) -> None:
    async with slipstream.connect_async(gateway.address) as captioner:
        captions = await asyncio.gather(*(captioner.caption(video) for _ in range(4)))
        assert [caption.text for caption in captions] == [TEXT] * 4
        stream = captioner.stream(video)
        assert "".join([str(piece) async for piece in stream]) == stream.caption.text == TEXT
        assert (await captioner.info()).target_model == "big"


async def test_in_a_notebook_a_loop_runs_already(gateway: FakeGateway, video: Path) -> None:
    with slipstream.connect(gateway.address) as captioner:
        assert captioner.caption(video).text == TEXT
        assert "".join(map(str, captioner.stream(video))) == TEXT


def test_threads_share_a_captioner(captioner: Captioner, video: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert [caption.text for caption in threads.map(captioner.caption, [video] * 12)] == [TEXT] * 12


# -- errors -----------------------------------------------------------------------------------------------------------


def test_bad_videos_need_no_gateway(tmp_path: Path) -> None:
    with slipstream.connect(f"unix:{tmp_path}/none.sock") as captioner:
        with pytest.raises(VideoNotFound, match="no such file"):
            captioner.caption(tmp_path / "missing.mp4")
        with pytest.raises(VideoNotFound, match="no such file; an address is fetched by"):
            captioner.caption("https://example.org/missing.mp4")
        with pytest.raises(VideoNotFound):
            captioner.stream(tmp_path / "missing.mp4")
        for video in (tmp_path, b"", good_video(tmp_path / "empty.mp4", b"")):
            with pytest.raises(UnreadableVideo):
                captioner.caption(video)
        with pytest.raises(InvalidRequest, match="not int"):
            captioner.caption(3)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="path has a text that is no valid Unicode"):
            captioner.caption(slipstream.RemotePath("/videos/\ud800.mp4"))
        with pytest.raises(ServiceUnreachable, match="the gateway is not reachable"):
            captioner.caption(good_video(tmp_path / "a.mp4"))


def test_bad_options_are_named_at_once(captioner: Captioner, video: Path) -> None:
    with pytest.raises(InvalidRequest, match="alpha must be between 0 and 1, not 2"):
        captioner.stream(video, alpha=2.0)
    with pytest.raises(InvalidRequest, match="method 'parallel' is unknown; choose one of slipstream"):
        captioner.caption(video, method="parallel")
    with pytest.raises(TypeError, match="warmth"):
        captioner.caption(video, warmth=1)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="options must be CaptionOptions"):
        captioner.stream(video, options={"alpha": 0.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"timeout_s": None}, "timeout_s must be a number of seconds, not None; math.inf is no limit"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number of seconds, not nan"),
        ({"timeout_s": "5"}, "timeout_s must be a number of seconds, not '5'"),
        ({"request_id": 7}, "request_id must be text, not 7"),
        ({"request_id": "\ud800"}, "request_id has a text that is no valid Unicode"),
    ],
)
def test_how_it_is_asked_is_checked_at_once(captioner: Captioner, said: dict[str, Any], complaint: str) -> None:
    for ask in (captioner.stream, captioner.read_document):
        with pytest.raises(InvalidRequest, match=complaint):
            ask(b"video", **said)
    with pytest.raises(InvalidRequest, match=complaint):
        captioner.caption_segments(b"video", segments="fixed:1s", **said)
    with pytest.raises(InvalidRequest, match="resume_wait_s must be a number of seconds, not None"):
        captioner.stream(b"video", resume_wait_s=None)  # type: ignore[arg-type]


def test_how_it_is_asked_may_be_in_numbers_of_numpy(captioner: Captioner, video: Path) -> None:
    for seconds in (np.float32(30), np.int64(30), 10**400):
        assert captioner.caption(video, timeout_s=seconds, resume_wait_s=seconds, gate=np.bool_(False)).text == TEXT


class _BytesPath:
    def __fspath__(self) -> bytes:
        return b"a.mp4"


@pytest.mark.parametrize(
    ("video", "complaint"),
    [
        (slipstream.RemotePath(cast(str, Path("/a.mp4"))), "path must be text, not PosixPath"),
        (slipstream.RemotePath(cast(str, None)), "path must be text, not None"),
        (slipstream.RemotePath(""), "the path of a file of the gateway's is empty"),
        (_BytesPath(), "the path of a video must be text, not b'a.mp4'"),
    ],
)
def test_what_is_no_path_of_a_video(captioner: Captioner, video: Any, complaint: str) -> None:
    for ask in (captioner.stream, captioner.read_document):
        with pytest.raises(InvalidRequest, match=complaint):
            ask(video)
    with pytest.raises(InvalidRequest, match=complaint):
        captioner.caption_segments(video, segments="fixed:1s")


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"pages": 3}, "pages must be text, not 3"),
        ({"dpi": 100.5}, "dpi must be a whole number, not 100.5"),
        ({"ocr_dpi": "100"}, "ocr_dpi must be a whole number, not '100'"),
        ({"pictures": "yes"}, "pictures must be true or false, not 'yes'"),
        ({"text_layer": 1}, "text_layer must be true or false, not 1"),
    ],
)
def test_how_a_document_is_asked_about_is_checked_at_once(
    captioner: Captioner, said: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        captioner.read_document(b"%PDF", **said)


class _BadFile:
    def __init__(self, content: object) -> None:
        self._content = content

    def read(self, size: int, /) -> object:
        if isinstance(self._content, Exception):
            raise self._content
        return self._content


@pytest.mark.parametrize(
    ("content", "error", "complaint"),
    [
        ("text", InvalidRequest, "binary mode"),
        (OSError(5, "Input/output error"), UnreadableVideo, "cannot be read: Input/output error"),
        (RuntimeError("gone"), UnreadableVideo, "cannot be read: gone"),
    ],
)
def test_files_that_cannot_be_read(
    captioner: Captioner, content: object, error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        captioner.caption(cast(BinaryIO, _BadFile(content)))


def test_a_file_that_was_opened_as_text_is_told_so_at_once(captioner: Captioner, tmp_path: Path) -> None:
    (path := tmp_path / "a.mp4").write_bytes(b"\xd5 is no text")
    with path.open() as file:
        for ask in (captioner.stream, captioner.read_document):
            with pytest.raises(InvalidRequest, match="binary mode"):
                ask(cast(BinaryIO, file))


def test_what_the_gateway_says(captioner: Captioner, tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match=DETAILS):
        captioner.caption(refused_video(tmp_path / "a.mp4", "OUT_OF_RANGE"))
    with pytest.raises(LimitExceeded, match=DETAILS):
        captioner.caption(bytes(20_000_000), "refuse")
    with pytest.raises(DeadlineExceeded, match=DETAILS):  # of a time limit of its own
        captioner.caption(b"answer DEADLINE_EXCEEDED")
    with pytest.raises(ProtocolViolation, match="without a summary"):
        captioner.caption(b"no summary")
    with pytest.raises(ServiceUnavailable, match=r"did not finish within 0\.3 s"):
        captioner.caption(hanging_video(tmp_path / "b.mp4"), timeout_s=0.3)


def test_a_lost_gateway_leaves_what_was_delivered(proxy: Proxy) -> None:
    with slipstream.connect(proxy.address) as captioner:
        stream = captioner.stream(HANG, resume_wait_s=0)
        assert str(next(stream)) == "A red"
        proxy.cut()
        with pytest.raises(ServiceUnavailable, match=r"lost \(1 tokens were delivered\)"):
            next(stream)
        assert stream.text == "A red"


@pytest.mark.parametrize("address", ["", None, 50050, "host", "host:\ud800:1", "a\0b:1"])
def test_what_is_no_address(address: Any) -> None:
    with pytest.raises(InvalidConfig, match="is no address of a gateway; give HOST:PORT or unix:PATH"):
        slipstream.connect(address)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"target_gpus": [0, 1]}, r"target_gpus must be text, not \[0, 1\]"),
        ({"target_gpus": None}, "target_gpus must be text, not None"),
        ({"device": None}, "device must be text, not None"),
        ({"device": 0}, "device must be text, not 0"),
        ({"draft_device": 1}, "draft_device must be text, not 1"),
        ({"gateway": 50050}, "50050 is no address of a gateway"),
    ],
)
def test_what_no_stack_can_start_with(said: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidConfig, match=complaint):
        Captioner(**said)
    with pytest.raises(InvalidConfig, match="a token must be text, not int"):
        slipstream.connect("127.0.0.1:1", token=cast(str, 3))


async def test_an_address_is_a_gateway(gateway: FakeGateway, video: Path) -> None:
    async with slipstream.AsyncCaptioner(gateway=gateway.address) as captioner:
        assert (await captioner.caption(video)).text == TEXT
    with pytest.raises(InvalidConfig, match="its own target"):
        Captioner("big", gateway=gateway.address)


def test_a_gateway_that_runs_has_its_own_models(tmp_path: Path) -> None:
    from slipstream.client.connection import GatewayAddress

    with pytest.raises(InvalidConfig, match="its own target"):
        Captioner("big", gateway=GatewayAddress("a:1"))
    with pytest.raises(InvalidConfig, match="ca: cannot read"):
        slipstream.connect("a:1", ca=tmp_path / "none.pem")
    with pytest.raises(InvalidConfig, match="plaintext"):
        slipstream.connect("gateway.example.org:1", token="secret")


# -- the package itself -----------------------------------------------------------------------------------------------


def test_importing_loads_nothing_heavy() -> None:
    script = "import sys, slipstream; print({'grpc', 'torch', 'numpy', 'slipstream.options'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown == "set()\n"


def test_everything_that_is_offered_is_there() -> None:
    for name in slipstream.__all__:
        if name != "load_model":  # loads torch
            assert getattr(slipstream, name) is not None
    assert set(slipstream.__all__) <= set(dir(slipstream))
    with pytest.raises(AttributeError, match="nothing"):
        _ = slipstream.nothing  # type: ignore[attr-defined]


def test_an_open_captioner_does_not_keep_the_interpreter(gateway: FakeGateway) -> None:
    script = f"import slipstream; captioner = slipstream.connect({gateway.address!r}); print(captioner.info().version)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("9.9.9\n", "")


def test_a_fork_closes_nothing_of_its_parent(gateway: FakeGateway) -> None:
    script = f"""
import os, sys, slipstream
captioner = slipstream.connect({gateway.address!r})
if not os.fork():
    slipstream.AsyncCaptioner.close = lambda captioner: print("closed")
    del captioner
    sys.exit()
print(os.wait()[1], captioner.info().version)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0 9.9.9\n"


async def test_a_captioner_belongs_to_one_event_loop(gateway: FakeGateway) -> None:
    async with slipstream.connect_async(gateway.address) as captioner:
        with pytest.raises(InvalidRequest, match="another event loop"):
            await asyncio.to_thread(asyncio.run, captioner.info())


def test_a_fork_is_told_that_it_cannot_call(gateway: FakeGateway) -> None:
    """Calls would wait for the threads of its parent for ever."""
    script = f"""
import os, slipstream
connect = lambda: slipstream.connect({gateway.address!r})
captioner = connect()
if not os.fork():
    for call in (captioner.info, connect):
        try:
            call()
        except slipstream.errors.InvalidRequest as error:
            print(error, flush=True)
    os._exit(0)
print(os.wait()[1], captioner.info().version)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    inherited, own, parents = done.stdout.splitlines()
    assert "another event loop, or to the process" in inherited and "does not outlive a fork" in own
    assert parents == "0 9.9.9"
