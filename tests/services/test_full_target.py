"""A target without room: its refusal, and when to come back, reach the client of the gateway."""

from pathlib import Path

import grpc
import pytest

from slipstream.rpc.client import open_channel
from slipstream.rpc.v1 import target_pb2_grpc
from tests.services.model_sessions import open_session, target_start
from tests.support.gateway_client import caption
from tests.support.media import ClipSpec, even_times_ms, make_clip
from tests.support.processes import model_flags, running
from tests.support.tiny_checkpoint import write_tiny_llava


async def test_a_full_target_says_when_to_come_back(tmp_path: Path) -> None:
    checkpoint = write_tiny_llava(tmp_path / "target", seed=3)
    video = make_clip(ClipSpec(times_ms=even_times_ms(4, 100)))
    async with (
        running("target", tmp_path, *model_flags(checkpoint, "--max-sessions", "1", "--max-queued", "0")) as target,
        running("gateway", tmp_path, "--target", target.address) as gateway,
        open_channel(target.address) as to_target,
        open_channel(gateway.address) as to_gateway,
    ):
        session = open_session(target_pb2_grpc.TargetStub(to_target))
        await session.send(*target_start())
        await session.read_until("verdict")
        with pytest.raises(grpc.aio.AioRpcError, match="the target has no room: 1 of at most 1 captions") as refused:
            await caption(to_gateway, video, num_frames=2, max_new_tokens=4, method="autoregressive")
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(str(dict(refused.value.trailing_metadata() or ())["retry-after-ms"])) >= 500
