"""Target and draft that do not fit each other: at the gateway's start, and when a draft is replaced later."""

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.errors import InvalidConfig, InvalidRequest
from slipstream.rpc.calls import open_channel
from slipstream.rpc.grpc_options import SERVER_OPTIONS
from slipstream.rpc.v1 import common_pb2, draft_pb2_grpc, gateway_pb2, gateway_pb2_grpc, target_pb2_grpc
from slipstream.sampling.params import CAME_LATER
from slipstream.stack.local import Stack
from tests.faults.fake_draft import FakeDraft, writes
from tests.support.gateway_client import caption
from tests.support.processes import failed_start, logged, running
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

SMALL: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": 16}
Change = Callable[[common_pb2.ModelInfo], None]


def other_tokenizer(model: common_pb2.ModelInfo) -> None:
    model.tokenizer_digest = "0" * 64


def other_frames(model: common_pb2.ModelInfo) -> None:
    model.tokens_per_frame += 1


def last_release(model: common_pb2.ModelInfo) -> None:
    model.protocol_version = model.least_protocol_version = 0


CHANGES = (
    (other_tokenizer, "different tokenizers"),
    (other_frames, "tokens of a frame"),
    (last_release, "upgrade the draft"),
)


class OldTarget(target_pb2_grpc.TargetServicer):
    """One that says nothing of protocol versions, or nothing of what came later."""

    def __init__(self, protocol_version: int = 0) -> None:
        self._version = protocol_version

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        versions = {"protocol_version": self._version, "least_protocol_version": self._version}
        return common_pb2.ModelInfo(model_id="old", tokens_per_frame=4, max_frames=64, **versions)


class ReplacedTarget(OldTarget):
    """One of this release, in whose place there is an older one as soon as it is asked for a text."""

    num_sessions = 0

    async def GetModel(
        self, request: common_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.ModelInfo:
        model = await super().GetModel(request, context)
        model.keeps_structure = not self.num_sessions
        return model

    async def Session(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        self.num_sessions += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, "it is replaced")


@contextlib.asynccontextmanager
async def served(target: OldTarget, folder: Path) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    target_pb2_grpc.add_TargetServicer_to_server(target, server)
    address = f"unix:{folder / 'old.sock'}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


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
    """A draft costs speed only, also one that is no draft of this target: the caption says so, and goes on."""
    good = common_pb2.ModelInfo()
    good.CopyFrom(draft.model)
    flags = ("--target", stack.processes["target"].address, "--draft", draft.address)
    async with running("gateway", tmp_path, *flags) as process, open_channel(process.address) as gateway:
        for change, complaint in CHANGES:
            fitting = await caption(gateway, world.clips[0], **SMALL)
            assert fitting.token_ids == world.answer(0, 16) and "draft_missing" not in fitting.stage_names
            change(draft.model)
            for method in ("slipstream", "autoregressive"):
                captioned = await caption(gateway, world.clips[0], method=method, **SMALL)
                assert captioned.token_ids == world.answer(0, 16)
                said = [stage.detail for stage in captioned.stages if stage.stage == "draft_missing"]
                assert all(complaint in detail for detail in said) and bool(said) == (method == "slipstream")
            draft.model.CopyFrom(good)


async def test_a_draft_of_the_last_release_at_the_start(
    stack: Stack, draft: FakeDraft, tmp_path: Path, world: World
) -> None:
    """It may be about to be replaced: the gateway starts, says what to upgrade, and captions."""
    last_release(draft.model)
    flags = ("--target", stack.processes["target"].address, "--draft", draft.address)
    async with running("gateway", tmp_path, *flags) as process, open_channel(process.address) as gateway:
        (missing,) = logged(process.log_path, "draft.missing")
        assert "the draft speaks protocol version 1" in missing["reason"] and "upgrade the draft" in missing["reason"]
        assert (await caption(gateway, world.clips[0], **SMALL)).token_ids == world.answer(0, 16)


async def test_a_target_of_the_last_release(tmp_path: Path) -> None:
    async with served(OldTarget(), tmp_path) as address:
        status, log = await failed_start("gateway", tmp_path, "--target", address)
    assert status == 2
    assert "the target speaks protocol version 1" in log[0]["error"] and "upgrade the target" in log[0]["error"]


@pytest.mark.parametrize("structure", [{"choice": ["a"]}, {"regex": "a"}, {"json_schema": "{}"}])
async def test_a_target_that_knows_no_structure_is_asked_for_no_text_of_one(
    tmp_path: Path, world: World, structure: dict[str, Any]
) -> None:
    """It would ignore that, and say anything."""
    async with (
        served(OldTarget(protocol_version=2), tmp_path) as address,
        running("gateway", tmp_path, "--target", address) as process,
        open_channel(process.address) as gateway,
    ):
        with pytest.raises(InvalidConfig, match=r"json_schema, regex or choice: it is of an older release"):
            await caption(gateway, world.clips[0], **SMALL, **structure)


async def test_a_target_is_not_asked_for_what_its_release_ignores(tmp_path: Path, world: World) -> None:
    async with (
        served(OldTarget(protocol_version=2), tmp_path) as address,
        running("gateway", tmp_path, "--target", address) as process,
        open_channel(process.address) as gateway,
    ):
        with pytest.raises(InvalidConfig, match="of an older release, which tells no logprobs"):
            await caption(gateway, world.clips[0], **SMALL, logprobs=True)
        with pytest.raises(InvalidRequest, match="top_logprobs is for logprobs"):
            await caption(gateway, world.clips[0], **SMALL, top_logprobs=2)
        for name in CAME_LATER:
            with pytest.raises(InvalidConfig, match=f"of an older release, which knows no {name}"):
                await caption(gateway, world.clips[0], **SMALL, **{name: 1})
        with pytest.raises(InvalidConfig, match="of an older release, which knows no thinking"):
            await caption(gateway, world.clips[0], **SMALL, thinking="off")


async def test_a_text_of_a_structure_does_not_go_on_at_a_target_that_knows_none(tmp_path: Path, world: World) -> None:
    target = ReplacedTarget(protocol_version=2)
    async with (
        served(target, tmp_path) as address,
        running("gateway", tmp_path, "--target", address) as process,
        open_channel(process.address) as gateway,
    ):
        with pytest.raises(InvalidConfig, match=r"json_schema, regex or choice: it is of an older release"):
            await caption(gateway, world.clips[0], choice=["a"], **SMALL)
    assert target.num_sessions == 1


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
