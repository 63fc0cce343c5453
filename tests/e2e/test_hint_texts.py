"""Hints from end to end: the text is plain decoding's whatever they say, true ones save passes, bad ones are told."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.errors import InvalidRequest, LimitExceeded, VideoNotFound
from slipstream.options import MAX_PREDICTION_BYTES
from slipstream.rpc import session_codec
from slipstream.rpc.calls import open_channel
from slipstream.rpc.peers import RemoteTarget
from slipstream.rpc.v1 import target_pb2, target_pb2_grpc
from slipstream.session_messages import TargetStart
from slipstream.speculation.hints.tolerance import Hints
from slipstream.stack.local import POCKET_DIR, Stack, StackOptions
from tests.e2e.test_archive_command import OPTIONS, run
from tests.services.model_sessions import CAPABILITY, Owner, open_session, some_frames
from tests.support.clips import make_colour_clip
from tests.support.gateway_client import Captioned, caption, options_message, refusal, until, upload_messages
from tests.support.variants import one_in
from tests.support.world import NUM_FRAMES, PROMPT, World

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 64
ASKED: dict[str, Any] = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS}


async def check(gateway: grpc.aio.Channel, world: World, clip: int = 0, **asked: Any) -> Captioned:
    captioned = await caption(gateway, world.clips[clip], **ASKED | asked)
    assert captioned.token_ids == world.answer(clip, NUM_TOKENS)
    return captioned


LIES = {
    "another text": "The quick brown fox jumps over the lazy dog. " * 20,
    "one word for ever": "red " * 5000,
    "empty": "",
    "special tokens": "<|im_end|><video><|endoftext|>",
    "not of this alphabet": "\u4e2d\u6587 \U0001f600 \u0000\u0301",
}


@pytest.mark.parametrize("method", ["hints", "hsd", "hints_draft"])
@pytest.mark.parametrize("lie", LIES)
@one_in(3, "method", "lie")
async def test_what_hints_say_does_not_change_the_text(
    gateway: grpc.aio.Channel, world: World, method: str, lie: str
) -> None:
    captioned = await check(gateway, world, method=method, prediction=(LIES[lie], world.clips[1][:2000].hex()))
    assert captioned.summary.options["tolerance"] in (0, 1)


async def test_a_prediction_chooses_its_method_and_is_counted(gateway: grpc.aio.Channel, world: World) -> None:
    text = world.reference.text(world.answer(0, NUM_TOKENS))
    captioned = await check(gateway, world, prediction=(text,))
    summary = captioned.summary
    assert summary.options["method"] == "hints"
    assert summary.speculation.accepted_prediction_tokens == sum(token.from_draft for token in captioned.tokens)
    lying = await check(gateway, world, method="hsd", prediction=(LIES["another text"], text[: len(text) // 2]))
    assert lying.summary.speculation.accepted_prediction_tokens + lying.summary.speculation.passes + 1 == NUM_TOKENS
    plain = await check(gateway, world, method="autoregressive")
    assert plain.summary.speculation.rejected_prediction_tokens == 0


@pytest.mark.parametrize("gate", [False, True])
async def test_hints_and_a_draft_are_counted_apart(gateway: grpc.aio.Channel, world: World, gate: bool) -> None:
    """The hint knows the first half of the text, so the draft is of use in the other."""
    text = world.reference.text(world.answer(0, NUM_TOKENS)[: NUM_TOKENS // 2])
    asked: dict[str, Any] = {"method": "hints_draft", "prediction": (text,), "alpha": 0.1, "gate": gate}

    def used_both(captioned: Captioned) -> bool:
        speculation = captioned.summary.speculation
        return gate or (speculation.accepted > 0 and speculation.accepted_prediction_tokens > 0)

    captioned = await until(used_both, lambda: check(gateway, world, **asked))
    speculation = captioned.summary.speculation
    assert captioned.summary.options["method"] == "hints_draft"
    num_drafted = sum(token.from_draft for token in captioned.tokens)
    assert speculation.accepted_prediction_tokens <= num_drafted
    assert num_drafted <= speculation.accepted_prediction_tokens + speculation.accepted
    assert num_drafted + speculation.passes + 1 == NUM_TOKENS
    sampled = [
        await caption(gateway, world.clips[0], **ASKED | asked | {"method": method, "temperature": 0.8} | more)
        for method, more in (("hints_draft", {}), ("autoregressive", {"prediction": (), "gate": False}))
    ]
    assert sampled[0].token_ids == sampled[1].token_ids


async def test_hints_go_on_without_the_draft(world: World) -> None:
    """A draft that is gone costs the hybrid its half of the windows, and the text nothing."""
    text = world.reference.text(world.answer(0, NUM_TOKENS))
    async with Stack(world.stack_options()) as stack, open_channel(stack.gateway_address) as gateway:
        before = await check(gateway, world, method="hints_draft", prediction=(text,), gate=False)
        stack.processes["draft"].kill()
        after = await check(gateway, world, method="hints_draft", prediction=(text,), gate=False)
    for captioned in (before, after):
        assert captioned.summary.speculation.accepted_prediction_tokens > 0
    assert after.summary.speculation.accepted == 0


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"method": "slipstream", "prediction": ("a",)}, InvalidRequest, "drafts from no prediction"),
        ({"method": "hints", "tolerance": 0.75}, InvalidRequest, "ask for method 'hsd'"),
        ({"method": "hsd", "tolerance": 0.75, "temperature": 0.5}, InvalidRequest, "temperature 0"),
        ({"method": "hsd", "tolerance": 0.0}, InvalidRequest, "above 0 to 1"),
        ({"prediction": ("\ud800",)}, InvalidRequest, "no valid Unicode"),
        ({"prediction": ("x" * 10_000_000,)}, LimitExceeded, "at most 1048576"),
        ({"prediction": ("x" * 600_000, "y" * 600_000)}, LimitExceeded, "1200000 bytes"),
    ],
)
async def test_what_is_refused(
    gateway: grpc.aio.Channel, world: World, asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await caption(gateway, world.clips[0], **ASKED | asked)


async def test_what_a_foreign_client_sends(gateway: grpc.aio.Channel, world: World) -> None:
    """Ten million bytes are more than a message may have; a little over the limit is told in our words."""
    for num_bytes, code in ((10_000_000, "RESOURCE_EXHAUSTED"), (MAX_PREDICTION_BYTES + 1, "OUT_OF_RANGE")):
        asked = options_message(**ASKED, prediction=["x" * num_bytes])
        status, _ = await refusal(gateway, [asked, *upload_messages(world.clips[0])])
        assert status.name == code
    await check(gateway, world, prediction=("x" * MAX_PREDICTION_BYTES,))


async def test_tolerance_marks_its_text_as_lossy(gateway: grpc.aio.Channel, world: World) -> None:
    text = world.reference.text(world.answer(0, NUM_TOKENS))
    captioned = await caption(gateway, world.clips[0], **ASKED, method="hsd", tolerance=0.5, prediction=(text,))
    assert captioned.summary.options["tolerance"] == 0.5
    assert captioned.summary.options["tolerance_rule"] == "log_ratio"


async def test_hints_reach_a_session_in_the_middle(stack: Stack) -> None:
    """As the gateway sends them when a page's draft comes: whoever does must know the session and its capability."""
    address = stack.processes["target"].address
    frames = some_frames()
    asked: dict[str, Any] = {"local_drafter": "hints", "hints": Hints(max_rows=24), "guidance_capability": CAPABILITY}
    remote, said, texts, num_drafted = RemoteTarget(address), "", [], []
    async with open_channel(address) as channel:
        for with_hints in (False, True):
            start = TargetStart(f"late-hints-{with_hints}", PROMPT, 40, False, **asked)
            session = open_session(target_pb2_grpc.TargetStub(channel))
            await session.send(session_codec.target_start(start, frames))
            await session.send(
                *(target_pb2.TargetRequest(frames=part) for part in session_codec.frame_chunks(Owner(frames)))
            )
            tokens = [await _own_token(session)]
            if with_hints:
                assert await remote.add_hints(start, [said]) > 1
                with pytest.raises(VideoNotFound, match="no session"):
                    await remote.add_hints(replace(start, guidance_capability=b""), ["text"])
            await session.send(target_pb2.TargetRequest(judge=target_pb2.Judge(num_passes=100, self_draft=8)))
            num_drafted.append(0)
            while True:
                verdict = (await session.read()).verdict
                num_drafted[-1] += verdict.num_drafted
                tokens += [*verdict.drafted, *([verdict.own_token] if verdict.HasField("own_token") else [])]
                said += "".join(verdict.pieces)
                if verdict.finish_reason:
                    break
            texts.append(tokens)
    assert texts[0] == texts[1]
    assert num_drafted[0] == 0 < num_drafted[1]
    await remote.close()


async def _own_token(session: Any) -> int:
    while (event := await session.read()).WhichOneof("message") != "verdict":
        pass
    return int(event.verdict.own_token)


# -- archive ----------------------------------------------------------------------------------------------------------


async def test_an_archive_is_captioned_again_with_its_own_captions(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    for index, clip in enumerate(world.clips[:2]):
        (folder / f"{index}.mp4").write_bytes(clip)
    options = replace(
        world.stack_options(), draft_model=None, archive=True, data=tmp_path / "data", video_roots=(folder,)
    )
    first, again = tmp_path / "first.jsonl", tmp_path / "again.jsonl"
    async with Stack(options) as stack:
        status, errors = await run(stack, "submit", folder, "--output", first, *OPTIONS)
        assert status == 0, errors
        (folder / "1.mp4").rename(folder / "moved.mp4")
        # hsd, as what it drafts depends on no clock
        words = ("submit", folder, "--output", again, "--hints-from", first, "--method", "hsd")
        status, errors = await run(stack, *words, *OPTIONS)
        assert (status, "2 of 2 items have hints" in errors) == (0, True), errors
    before, after = (
        {line["receipt"]["video_sha256"]: line for line in map(json.loads, path.read_text().splitlines())}
        for path in (first, again)
    )
    assert {digest: line["text"] for digest, line in before.items()} == {
        digest: line["text"] for digest, line in after.items()
    }
    assert {line["custom_id"] for line in after.values()} == {"0.mp4", "moved.mp4"}
    for line in after.values():
        receipt = line["receipt"]
        assert receipt["accepted_prediction_tokens"] == receipt["speculation"]["accepted_prediction_tokens"]
        assert "prediction" not in receipt["options"]
        assert not receipt["reused"]


# -- the pocket pair --------------------------------------------------------------------------------------------------

POCKET: dict[str, Any] = {"prompt": "Describe this video in detail.", "num_frames": 8, "max_new_tokens": 60}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pocket() -> AsyncIterator[grpc.aio.Channel]:
    options = StackOptions(target_model=POCKET_DIR / "target", draft_model=None, threads=1)
    async with Stack(options) as stack, open_channel(stack.gateway_address) as channel:
        yield channel


def takes_passes(fewer_than: float, captioned: Captioned) -> bool:
    """Not so when a busy machine made passes slow: windows are as long as the last ones say that they may be."""
    return captioned.summary.speculation.passes < fewer_than


@pytest.mark.long
async def test_the_pocket_pairs_own_caption_gives_several_tokens_a_pass(pocket: grpc.aio.Channel) -> None:
    clip, other = make_colour_clip(5), make_colour_clip(6)
    plain = await caption(pocket, clip, **POCKET, method="autoregressive")
    sampled = await caption(pocket, clip, **POCKET, method="autoregressive", temperature=0.8, seed=7)
    another = await caption(pocket, other, **POCKET, method="autoregressive")
    texts = (plain.text, sampled.text, another.text)
    for method in ("hints", "hsd", "prompt_lookup"):
        for prediction in ((texts[0],), (texts[2],), texts) if method != "prompt_lookup" else ((),):
            asked = {**POCKET, "method": method, "prediction": prediction, "gate": False}
            few = len(plain.tokens) / 3 if prediction == (texts[0],) else math.inf
            captioned = await until(partial(takes_passes, few), partial(caption, pocket, clip, **asked))
            assert captioned.token_ids == plain.token_ids
            assert takes_passes(few, captioned)
            if prediction == (texts[0],):
                speculation = captioned.summary.speculation
                assert speculation.accepted_prediction_tokens > len(plain.tokens) / 2
        with_seed = await caption(pocket, clip, **POCKET, method=method, prediction=prediction, temperature=0.8, seed=7)
        assert with_seed.token_ids == sampled.token_ids


async def test_captions_with_hints_side_by_side(pocket: grpc.aio.Channel) -> None:
    """Packed into the same passes, none sees another's hints."""
    clips = [make_colour_clip(seed) for seed in (5, 6, 7)]
    plain = [await caption(pocket, clip, **POCKET, method="autoregressive") for clip in clips]
    hinted = await asyncio.gather(
        *(
            caption(pocket, clip, **POCKET, method="hints", prediction=(said.text,))
            for clip, said in zip(clips, plain, strict=True)
        ),
        caption(pocket, clips[0], **POCKET, method="hints"),
    )
    assert [one.token_ids for one in hinted] == [one.token_ids for one in (*plain, plain[0])]
    assert hinted[-1].summary.speculation.judged == 0
