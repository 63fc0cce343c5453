"""Texts that are kept to a structure, through the running stack: the tokens are those of `transformers.generate` under
the same structure, whoever drafts."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from slipstream.errors import InvalidRequest
from slipstream.rpc.calls import open_channel
from slipstream.speculation.protocol import FinishReason
from slipstream.stack.local import Stack
from tests.support.clips import sample_clip
from tests.support.gateway_client import Captioned, caption, until
from tests.support.partial_regex import PartialRegex
from tests.support.processes import check_logs
from tests.support.world import NUM_FRAMES, PROMPT, World, make_endless_world

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 40
REGEX = r"[a-z]{3,8}( [a-z]{2,8}){4,6}\."
CHOICES = ("indoors", "outdoors", "in a (car)", "in")
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "scenes": {"type": "integer", "minimum": 1, "maximum": 40},
        "mood": {"enum": ["calm", "lively"]},
    },
    "required": ["title", "scenes", "mood"],
    "additionalProperties": False,
}
STRUCTURES: dict[str, dict[str, Any]] = {
    "regex": {"regex": REGEX},
    "choice": {"choice": list(CHOICES)},
    "json": {"json_schema": json.dumps(SCHEMA)},
}
TOLD = ["It is a tale of two cities.", '{"title": "a", "scenes": 3, "mood": "calm"}']
DRAFTED: tuple[dict[str, Any], ...] = (
    {"max_window": 1, "pruner": "none"},
    {"max_window": 9, "pruner": "uv", "policy": "fixed"},
    {"method": "slipstream_tree"},
    {"method": "slipstream_branches"},
    {"method": "sd_tree"},
    {"method": "prompt_lookup"},
    {"method": "std"},
    {"method": "hints", "prediction": TOLD},
    {"method": "hints_draft", "prediction": TOLD},
)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Whose end-of-text token is no word."""
    return make_endless_world(tmp_path_factory.mktemp("structured"), extra_layers=4)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def channel(endless: World) -> AsyncIterator[grpc.aio.Channel]:
    async with Stack(endless.stack_options()) as stack, open_channel(stack.gateway_address) as channel:
        yield channel
        check_logs(stack)


async def run(channel: grpc.aio.Channel, world: World, **options: Any) -> Captioned:
    asked = {"prompt": PROMPT, "num_frames": NUM_FRAMES, "max_new_tokens": NUM_TOKENS, "gate": False} | options
    return await caption(channel, world.clips[0], **asked)


def expected(world: World, pattern: str) -> list[int]:
    """What transformers says of the clip, kept to the expression by another library than ours."""
    reference, video = world.reference, sample_clip(world.clips[0], NUM_FRAMES)
    model = reference.model
    partial = PartialRegex(pattern, reference.tokenizer.backend_tokenizer, [model.generation_config.eos_token_id])
    allowed = partial.behind(len(reference.prompt_ids(video, PROMPT)))
    return reference.answer(video, PROMPT, NUM_TOKENS, prefix_allowed_tokens_fn=allowed)


@pytest.mark.parametrize("method", ["autoregressive", "slipstream"])
async def test_a_regex_gives_the_tokens_of_transformers(channel: grpc.aio.Channel, endless: World, method: str) -> None:
    captioned = await run(channel, endless, method=method, regex=REGEX)
    assert captioned.token_ids == expected(endless, REGEX) != endless.answer(0, NUM_TOKENS)


async def test_a_choice_is_made_as_transformers_makes_it(channel: grpc.aio.Channel, endless: World) -> None:
    captioned = await run(channel, endless, choice=CHOICES)
    assert captioned.token_ids == expected(endless, r"indoors|outdoors|in a \(car\)|in")
    assert captioned.text in CHOICES
    assert captioned.summary.finish_reason == FinishReason.STOP


async def test_json_has_its_schema(channel: grpc.aio.Channel, endless: World) -> None:
    captioned = await run(channel, endless, max_new_tokens=400, **STRUCTURES["json"])
    assert captioned.summary.finish_reason == FinishReason.STOP
    said = json.loads(captioned.text)
    assert list(said) == ["title", "scenes", "mood"]
    assert len(said["title"]) <= 12 and 1 <= said["scenes"] <= 40 and said["mood"] in ("calm", "lively")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}])
async def test_the_text_is_that_of_plain_decoding_whoever_drafts(
    channel: grpc.aio.Channel, endless: World, structure: str, sampling: dict[str, Any]
) -> None:
    asked = STRUCTURES[structure] | sampling
    plain = await run(channel, endless, method="autoregressive", **asked)
    for drafted in DRAFTED:
        assert (await run(channel, endless, **asked, **drafted)).token_ids == plain.token_ids, drafted


async def test_the_papers_rule_draws_texts_of_the_structure(channel: grpc.aio.Channel, endless: World) -> None:
    drawn = {"temperature": 1.0, "sampling_rule": "rejection", "policy": "fixed", "max_new_tokens": 60}
    for seed in range(4):
        captioned = await run(channel, endless, regex=REGEX, seed=seed, **drawn)
        assert re.fullmatch(REGEX, captioned.text), captioned.text


async def test_the_draft_writes_what_can_be_accepted(channel: grpc.aio.Channel, endless: World) -> None:
    """Where one text alone is possible, every token that a draft writes is right."""
    only = "This is all that there is to be said about it, and it is said at some length, to the end."
    captioned = await until(
        lambda one: one.summary.speculation.judged,
        lambda: run(channel, endless, choice=[only], max_new_tokens=96, policy="fixed"),
    )
    assert captioned.text == only
    assert captioned.summary.speculation.accepted == captioned.summary.speculation.judged


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"regex": "(?=a)b"}, "regex: no text can be kept to it: .*look-around"),
        ({"json_schema": '{"type": "foo"}'}, "json_schema: no text can be kept to it: Invalid type: foo"),
        ({"json_schema": '{"$ref": "file:///etc/passwd"}'}, "json_schema: no text can be kept to it"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice cannot be asked for together"),
    ],
)
async def test_what_cannot_be_followed_is_refused_by_its_name(
    channel: grpc.aio.Channel, endless: World, asked: dict[str, Any], told: str
) -> None:
    with pytest.raises((InvalidRequest, grpc.aio.AioRpcError), match=told):
        await run(channel, endless, **asked)
