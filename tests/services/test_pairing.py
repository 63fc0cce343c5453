"""Target and draft that do not fit each other: at the gateway's start, and when a draft is replaced later."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.rpc.calls import open_channel
from slipstream.rpc.v1 import common_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from slipstream.stack.local import Stack
from tests.faults.fake_draft import FakeDraft, writes
from tests.support.gateway_client import caption, options_message, refusal, upload_messages
from tests.support.processes import failed_start, logged, running
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 16}
Change = Callable[[common_pb2.ModelInfo], None]


def other_tokenizer(model: common_pb2.ModelInfo) -> None:
    model.tokenizer_digest = "0" * 64


def other_frames(model: common_pb2.ModelInfo) -> None:
    model.tokens_per_frame += 1


@pytest_asyncio.fixture(loop_scope="session")
async def draft(stack: Stack, tmp_path: Path) -> AsyncIterator[FakeDraft]:
    """A draft that fits, until a test changes what it says of itself."""
    async with open_channel(stack.processes["draft"].address) as channel:
        model = await draft_pb2_grpc.DraftStub(channel).GetModel(common_pb2.GetModelRequest())
    async with FakeDraft(tmp_path, model) as fake:
        fake.behaviour = writes(lambda at: 7)
        yield fake


@pytest.mark.parametrize(
    ("change", "complaint"), [(other_tokenizer, "have different tokenizers"), (other_frames, "tokens of a frame")]
)
async def test_at_the_start(stack: Stack, draft: FakeDraft, tmp_path: Path, change: Change, complaint: str) -> None:
    change(draft.model)
    flags = ("--target", stack.processes["target"].address, "--draft", draft.address)
    status, log = await failed_start("gateway", tmp_path, *flags)
    assert status == 2
    assert [entry["event"] for entry in log] == ["service.failed"]
    assert complaint in log[0]["error"]


async def test_replaced_by_one_that_does_not_fit_and_back(
    stack: Stack, draft: FakeDraft, tmp_path: Path, world: World
) -> None:
    good = common_pb2.ModelInfo()
    good.CopyFrom(draft.model)
    video = upload_messages(world.clips[0])
    flags = ("--target", stack.processes["target"].address, "--draft", draft.address)
    async with running("gateway", tmp_path, *flags) as process, open_channel(process.address) as gateway:
        for change, complaint in ((other_tokenizer, "different tokenizers"), (other_frames, "tokens of a frame")):
            assert (await caption(gateway, world.clips[0], **SMALL)).token_ids == world.answer(0, 16)
            change(draft.model)
            code, message = await refusal(gateway, [options_message(**SMALL, method="slipstream"), *video])
            assert code == grpc.StatusCode.FAILED_PRECONDITION and complaint in message
            plain = await caption(gateway, world.clips[0], method="autoregressive", **SMALL)
            assert plain.token_ids == world.answer(0, 16)
            draft.model.CopyFrom(good)


async def test_a_draft_that_is_not_there(stack: Stack, tmp_path: Path, world: World) -> None:
    flags = ("--target", stack.processes["target"].address, "--draft", f"unix:{tmp_path / 'fake.sock'}")
    async with running("gateway", tmp_path, *flags) as process, open_channel(process.address) as gateway:
        assert logged(process.log_path, "draft.missing")
        stub = gateway_pb2_grpc.GatewayStub(gateway)
        assert (await stub.GetGateway(gateway_pb2.GetGatewayRequest())).draft_model == ""
        captioned = await caption(gateway, world.clips[0], **SMALL)
        assert captioned.token_ids == world.answer(0, 16)
        assert captioned.summary.options["method"] == "slipstream" and captioned.summary.speculation.drafts_lost == 0
        assert "draft_missing" in captioned.stage_names
