"""A gateway without models, in a thread of the test: what it answers depends on what the uploaded "video" says."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import grpc

from slipstream.rpc.grpc_options import SERVER_OPTIONS, UNREADABLE_KEY
from slipstream.rpc.guards import ANSWERED
from slipstream.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from slipstream.rpc.v1.gateway_pb2 import CaptionEvent, CommittedText, CommittedToken, StageChange, Summary
from slipstream.rpc.v1.target_pb2 import FinishReason

PIECES = (("A red", False), (" circle", True), (" moves", True), (" left\x1b[31m.", False))
TEXT = "".join(piece for piece, _ in PIECES)
DETAILS = "the file holds no video stream"


def good_video(path: Path, content: bytes = b"good" * 300_000) -> Path:
    """A file of several chunks that the fake captions."""
    path.write_bytes(content)
    return path


def refused_video(path: Path, code: str) -> Path:
    """A file that the fake refuses with this status."""
    return good_video(path, f"refuse {code}".encode())


def hanging_video(path: Path) -> Path:
    """A file whose caption begins and never ends."""
    return good_video(path, b"hang")


class FakeGateway(gateway_pb2_grpc.GatewayServicer):
    """A context manager around the serving thread. `options` and `received` hold what the last caller sent."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.address = address
        self.options = gateway_pb2.CaptionOptions()
        self.chunk_sizes: list[int] = []
        self.received = b""
        self.cancelled = threading.Event()
        self.resumed_after: list[list[int]] = []
        """What each caller that resumed had."""
        self.resumes = True
        """False: as gateways of older releases, it does not know what that is."""
        self.reads_documents = False
        self.refuse_resuming: grpc.StatusCode | None = None
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self.register(server)
        port = server.add_insecure_port(self.address)
        self.address = f"127.0.0.1:{port}"
        await server.start()
        self._ready.set()
        await self._stopping.wait()
        await server.stop(0)

    def register(self, server: grpc.aio.Server) -> None:
        """What this server serves."""
        gateway_pb2_grpc.add_GatewayServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    async def Caption(
        self, request_iterator: AsyncIterator[gateway_pb2.CaptionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[CaptionEvent]:
        is_whole = threading.Event()
        context.add_done_callback(lambda context: is_whole.is_set() or self.cancelled.set())
        chunks, after = [], list[int]()
        async for request in request_iterator:
            if request.HasField("options"):
                self.options, after = request.options, list(request.resume_after)
                if self.options.prompt == "refuse":
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, DETAILS)
            else:
                chunks.append(request.video)
        self.chunk_sizes = [len(chunk) for chunk in chunks]
        self.received = b"".join(chunks)
        await self._refuse(context)
        for done in range(1, 4):
            yield CaptionEvent(stage=StageChange(stage="encode", done=done, total=3))
        num_known = await self._find_again(after, context) if after else 0
        if num_known:
            yield CaptionEvent(stage=StageChange(stage="resumed", done=num_known))
        for number, (piece, from_draft) in enumerate(PIECES[num_known:], num_known):
            token = CommittedToken(token_id=number, piece=piece, from_draft=from_draft)
            yield CaptionEvent(text=CommittedText(tokens=[token]))
            if self.received == b"hang" and not self.resumed_after:
                await asyncio.sleep(3600)
        is_whole.set()
        if self.received != b"no summary":
            yield CaptionEvent(summary=make_summary(self.options.method or "slipstream"))

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """With the status that the video names: by gRPC itself, answered by this server, or as unreadable."""
        unreadable = (*ANSWERED, (UNREADABLE_KEY, "1"))
        for verb, metadata in (("refuse ", ()), ("answer ", ANSWERED), ("unread ", unreadable)):
            if self.received.startswith(verb.encode()):
                await context.abort(grpc.StatusCode[self.received.decode().removeprefix(verb)], DETAILS, metadata)

    async def _find_again(self, after: list[int], context: grpc.aio.ServicerContext[Any, Any]) -> int:
        """How many tokens need not be sent, as the caller has them."""
        self.resumed_after.append(after)
        if self.refuse_resuming is not None:
            await context.abort(self.refuse_resuming, DETAILS)
        return len(after) if self.resumes else 0

    async def GetGateway(
        self, request: gateway_pb2.GetGatewayRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gateway_pb2.GatewayInfo:
        return gateway_pb2.GatewayInfo(
            version="9.9.9", target_model="big", max_frames=128, max_video_bytes=10**9, default_prompt="[Describe] it.",
            reads_documents=self.reads_documents,
        )  # fmt: skip


def make_summary(method: str = "slipstream", generate_s: float = 0.5, text: str = TEXT) -> Summary:
    """A summary with plausible figures."""
    summary = Summary(request_id="r1", text=text, num_tokens=5, method=method, pruner="uv", alpha=0.9)
    summary.finish_reason = FinishReason.FINISH_REASON_STOP
    summary.video.num_frames = 8
    summary.video.video_tokens = 500
    summary.timings.first_token_s = 0.25
    summary.timings.generate_s = generate_s
    summary.timings.total_s = generate_s + 0.5
    if method == "slipstream":
        summary.speculation.passes = 2
        summary.speculation.judged = 3
        summary.speculation.accepted = 2
        summary.speculation.tau = 0.75
        summary.speculation.speed_ratio = 12.5
        summary.speculation.kept_tokens = 50
        summary.speculation.guidance_bytes = 2**40
    return summary
