"""A target without room: who waits for it, and who is refused and told when to come back."""

import asyncio
import errno
import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest

from slipstream.errors import Overloaded
from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import draft_pb2_grpc, target_pb2_grpc
from slipstream.sampling.grammar import try_out
from slipstream.sampling.params import SamplingParams
from tests.services.model_sessions import TIMEOUT_S, draft_start, open_session, target_end, target_start
from tests.support.gateway_client import Captioned, caption
from tests.support.media import ClipSpec, even_times_ms, make_clip
from tests.support.processes import all_running, eventually, model_flags, running
from tests.support.tiny_checkpoint import write_tiny_llava

LONG = 3000


async def test_who_waits_for_the_target_takes_no_place_at_the_draft(tmp_path: Path) -> None:
    checkpoint = write_tiny_llava(tmp_path / "model", seed=3, max_context=4096)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 100000}')  # no text ends before its draft
    flags, full = ("--max-new-tokens", str(LONG)), model_flags(checkpoint, "--max-sessions", "1")
    video = make_clip(ClipSpec(times_ms=even_times_ms(4, 100)))
    async with (
        all_running(*(running(name, tmp_path, *full) for name in ("target", "draft"))) as (target, draft),
        running("gateway", tmp_path, *flags, "--target", target.address, "--draft", draft.address) as gateway,
        open_channel(target.address) as to_target,
        open_channel(draft.address) as to_draft,
        open_channel(gateway.address) as to_gateway,
    ):
        served = open_session(target_pb2_grpc.TargetStub(to_target))
        await served.send(*target_start())
        await served.read_until("verdict")
        waits = asyncio.Event()

        def on_event(captioned: Captioned) -> bool:
            if "queued" in captioned.stage_names:
                waits.set()
            return "draft_ready" in captioned.stage_names

        options = {"num_frames": 2, "max_new_tokens": LONG, "gate": False}
        waiting = asyncio.create_task(caption(to_gateway, video, on_event=on_event, **options))
        await asyncio.wait_for(waits.wait(), TIMEOUT_S)
        await eventually(lambda: draft_has_room(to_draft), TIMEOUT_S)
        assert not waiting.done()
        await served.send(target_end())
        assert "draft_ready" in (await waiting).stage_names


async def draft_has_room(to_draft: grpc.aio.Channel) -> bool:
    session = open_session(draft_pb2_grpc.DraftStub(to_draft))
    try:
        await session.send(*draft_start())
        await session.read_until("ready")
    except asyncio.InvalidStateError:  # it was refused before all frames were sent
        return False
    except grpc.aio.AioRpcError as error:
        if error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL):
            raise
        return False
    finally:
        session.call.cancel()
    return True


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
        with pytest.raises(Overloaded, match="the target has no room: 1 of at most 1 captions") as refused:
            await caption(to_gateway, video, num_frames=2, max_new_tokens=4, method="autoregressive")
        assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 0.5


def test_a_structure_may_be_asked_for_later_where_no_process_is_to_be_had_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an internal error, and jobs of the archive were dead some seconds later."""
    refused = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=refused))
    with pytest.raises(Overloaded, match="choice: it cannot be tried now: Resource temporarily unavailable"):
        try_out(SamplingParams(choice=("a", "b")))
