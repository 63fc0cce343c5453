"""A client that loses its gateway in the middle goes on at the next one, or says that it cannot."""

import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import grpc
import pytest

import slipstream
from slipstream import CommittedText, StageChange
from slipstream.client import caption_client
from slipstream.client.caption_client import MAX_RESUMPTIONS
from slipstream.client.sync_captioner import Captioner, connect
from slipstream.errors import ProtocolViolation, ServiceUnavailable, SlipstreamError
from slipstream.rpc.guards import ANSWERED, STOPPING
from slipstream.rpc.v1 import gateway_pb2
from tests.cli.fake_gateway import PIECES, TEXT, FakeGateway, hanging_video
from tests.client.conftest import Proxy

HANG = b"hang"
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def both(proxy: Proxy, gateway: FakeGateway) -> str:
    """The address that will be lost, and the one that stands in for it."""
    return f"{proxy.address},{gateway.address}"


def lose_after_the_first_token(captioner: Captioner, video: slipstream.Video, proxy: Proxy) -> list[object]:
    """All events of a caption whose gateway is lost."""
    events: list[object] = []
    for event in captioner.events(video):
        if isinstance(event, CommittedText) and not any(isinstance(seen, CommittedText) for seen in events):
            proxy.cut()
        events.append(event)
    return events


def opened_in_the_middle(path: Path) -> BinaryIO:
    path.write_bytes(b"skipped" + HANG)
    file = path.open("rb")
    file.seek(len(b"skipped"))
    return file


@pytest.mark.parametrize(
    "make",
    [
        hanging_video,
        lambda path: HANG,
        lambda path: memoryview(HANG),
        lambda path: io.BytesIO(HANG),
        opened_in_the_middle,
    ],
)
def test_one_stream_without_a_repeated_or_missing_token(
    proxy: Proxy, both: str, gateway: FakeGateway, tmp_path: Path, make: Callable[[Path], slipstream.Video]
) -> None:
    video = make(tmp_path / "a.mp4")
    with connect(both) as captioner:
        events = lose_after_the_first_token(captioner, video, proxy)
    if isinstance(video, io.IOBase):
        assert not video.closed, "it belongs to who opened it"
        video.close()
    texts = [event for event in events if isinstance(event, CommittedText)]
    assert [token.token_id for text in texts for token in text.tokens] == list(range(len(PIECES)))
    (caption,) = (event for event in events if isinstance(event, slipstream.Caption))
    assert caption.text == TEXT == "".join(map(str, texts)) and len(caption.tokens) == len(PIECES)
    assert caption.timings.resumptions == 1
    (told,) = (event for event in events if isinstance(event, StageChange) and event.stage == "resume")
    assert (told.done, told.total) == (1, MAX_RESUMPTIONS) and "the gateway was lost" in told.detail
    assert gateway.resumed_after == [[0]] and gateway.received == HANG


async def test_the_asynchronous_twin(proxy: Proxy, both: str) -> None:
    async with slipstream.connect_async(both) as captioner:
        stream = captioner.stream(HANG)
        assert str(await anext(stream)) == "A red"
        proxy.cut()
        assert "A red" + "".join([str(piece) async for piece in stream]) == stream.caption.text == TEXT


class _Pipe(io.RawIOBase):
    """A file that is read once."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def read(self, size: int = -1, /) -> bytes:
        return self._content.read(size)


def test_a_video_that_cannot_be_sent_again(proxy: Proxy, both: str, gateway: FakeGateway) -> None:
    with connect(both) as captioner, pytest.raises(ServiceUnavailable, match=r"lost \(1 tokens were delivered\)"):
        lose_after_the_first_token(captioner, cast(BinaryIO, _Pipe(HANG)), proxy)
    assert gateway.resumed_after == []


def test_a_gateway_of_an_older_release(proxy: Proxy, both: str, gateway: FakeGateway) -> None:
    gateway.resumes = False
    with connect(both) as captioner, pytest.raises(ProtocolViolation, match="resumes no captions"):
        lose_after_the_first_token(captioner, HANG, proxy)


def test_a_refusal_is_not_repeated(proxy: Proxy, both: str, gateway: FakeGateway) -> None:
    gateway.refuse_resuming = grpc.StatusCode.ABORTED
    with connect(both) as captioner, pytest.raises(SlipstreamError):
        lose_after_the_first_token(captioner, HANG, proxy)
    assert len(gateway.resumed_after) == 1


def test_there_is_an_end_to_it(proxy: Proxy, both: str, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caption_client, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(caption_client, "CONNECT_S", 0.5)
    gateway.refuse_resuming = grpc.StatusCode.UNAVAILABLE
    with connect(both) as captioner, pytest.raises(ServiceUnavailable):
        lose_after_the_first_token(captioner, HANG, proxy)
    assert 1 <= len(gateway.resumed_after) <= MAX_RESUMPTIONS


class DrainedGateway(FakeGateway):
    """Begins a caption and stops before its first token, in good order."""

    async def Caption(
        self, request_iterator: AsyncIterator[gateway_pb2.CaptionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[gateway_pb2.CaptionEvent]:
        self.received = b"".join([request.video async for request in request_iterator])
        yield gateway_pb2.CaptionEvent(stage=gateway_pb2.StageChange(stage="receive", done=1, total=1))
        await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING, ANSWERED)


def test_a_gateway_that_stops_before_the_first_token_is_left_for_another(gateway: FakeGateway) -> None:
    with DrainedGateway() as drained:
        with connect(f"{drained.address},{gateway.address}") as captioner:
            caption = captioner.caption(b"good")
        assert caption.text == TEXT and caption.timings.resumptions == 1
        assert drained.received == gateway.received == b"good" and gateway.resumed_after == []
        with connect(drained.address) as captioner, pytest.raises(ServiceUnavailable, match=STOPPING):
            captioner.caption(b"good")


def test_nobody_there_is_said_at_once(gateway: FakeGateway) -> None:
    videos: list[slipstream.Video] = [b"good", io.BytesIO(b"good"), cast(BinaryIO, _Pipe(b"good"))]
    for video in videos:
        with connect(f"{NOWHERE},{gateway.address}") as captioner:
            assert captioner.caption(video).text == TEXT and gateway.received == b"good"
    with connect(f"{NOWHERE},{NOWHERE}") as captioner, pytest.raises(ServiceUnavailable, match="not reachable"):
        captioner.caption(b"good")
