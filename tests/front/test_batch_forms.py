"""A batch's answers are those of the endpoint that it names: what they have of their requests outlives both the front
and the requests' file."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from slipstream.services.front.batch_forms import Kept, KeptReader, KeptWriter
from slipstream.services.front.batch_records import BatchRecords, HttpBatch, Stage
from slipstream.services.front.function_calls import Functions
from tests.cli.fake_archive import FakeArchive
from tests.front.conftest import NUM_FRAMES, Served
from tests.front.test_openai_batches import body, ended, lines_of, opened
from tests.front.test_responses import TOOL, WHERE, request, user
from tests.support.front import CHAT, batch_line, client_of, data_url, front_at

CHAT_TOOL = {"type": "function", "function": {"name": "where", "parameters": WHERE, "strict": True}}

RESPONSES = "/v1/responses"
KEPT = Kept({"instructions": "Say less.", "tools": [TOOL]}, Functions(("where", "when"), is_named=False))

# -- on disk ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "batch.kept"
    with closing(KeptWriter(path)) as writer:
        writer.add("plain", Kept())
        assert not path.exists(), "most batches keep nothing"
        writer.add("a", KEPT)
        with KeptReader(path) as reader:
            assert reader.get("a") == KEPT, "it is there before the job is"
    with KeptReader(path) as reader:
        assert (reader.get("a"), reader.get("plain"), reader.get("other")) == (KEPT, Kept(), Kept())
    with KeptReader(tmp_path / "none") as reader:
        assert reader.get("a") == Kept()


@given(cut=st.integers(1, 200))
def test_a_line_that_was_cut_off_is_written_again(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """By whoever goes on behind a front that was killed as it wrote."""
    path = tmp_path_factory.mktemp("kept") / "batch.kept"
    with closing(KeptWriter(path)) as writer:
        writer.add("a", KEPT)
        writer.add("b", Kept({"instructions": "é" * 80}))
    path.write_bytes(path.read_bytes()[:-cut])
    with closing(KeptWriter(path)) as writer:
        writer.add("a", KEPT)
        writer.add("b", Kept({"instructions": "é" * 80}))
    with KeptReader(path) as reader:
        assert (reader.get("a"), reader.get("b").said) == (KEPT, {"instructions": "é" * 80})


def test_who_hands_in_again_adds_what_is_missing(tmp_path: Path) -> None:
    """However often that is, such as while the archive's store is away."""
    path = tmp_path / "batch.kept"
    for names in ("ab", "ab", "abc", "abc"):
        with closing(KeptWriter(path)) as writer:
            for name in names:
                writer.add(name, KEPT)
    assert len([line for line in path.read_bytes().splitlines() if line]) == 3
    with KeptReader(path) as reader:
        assert {name: reader.get(name) for name in "abc"} == dict.fromkeys("abc", KEPT)


@pytest.mark.asyncio
async def test_what_answers_are_written_from_is_durable_before_all_was_handed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, after a loss of power, refused requests have no lines and calls of functions are told as text."""
    events: list[str] = []
    fsync, put = os.fsync, BatchRecords.put

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded(self: BatchRecords, owner: str, batch: HttpBatch) -> None:
        events.append(batch.stage)
        put(self, owner, batch)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(BatchRecords, "put", recorded)
    lines = [
        batch_line("text", request(model="big", instructions="Say less."), RESPONSES),
        batch_line("refused", request(model="another"), RESPONSES),
    ]
    with FakeArchive() as archive:
        async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
            batch, done, (refused,) = await answers_of(client, lines, RESPONSES)
    assert done["text"]["instructions"] == "Say less." and refused["custom_id"] == "refused"
    before = events[events.index(Stage.VALIDATING) : events.index(Stage.HANDED_IN)]
    assert f"{batch.id}.kept" in before
    assert len([name for name in before if name.startswith(batch.id)]) == 3, "the record, what is kept, the refusals"


# -- by OpenAI's own client at a real stack ---------------------------------------------------------------------------


async def answers_of(client: openai.AsyncOpenAI, lines: list[str], url: str) -> tuple[Any, dict[str, Any], Any]:
    """The batch when it has ended, its answers by name, and the lines of its errors."""
    batch = await opened(client, lines, endpoint=url)
    batch = await ended(client, batch)
    done = {line["custom_id"]: line["response"]["body"] for line in await lines_of(client, batch.output_file_id)}
    return batch, done, await lines_of(client, batch.error_file_id)


@pytest.mark.asyncio(loop_scope="session")
async def test_responses_are_those_of_their_endpoint(served: Served) -> None:
    part = {"type": "input_file", "file_url": f"file://{served.folder}/0.mp4"}
    own = {"slipstream": {"num_frames": NUM_FRAMES}}
    asked = request(model=served.model, input=[user(part)], instructions="Say it in a word.", max_output_tokens=9) | own
    called = asked | {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 400}
    lines = [
        batch_line("text", asked, RESPONSES),
        batch_line("call", called, RESPONSES),
        batch_line("likely", asked | {"include": ["message.output_text.logprobs"]}, RESPONSES),
        batch_line("unknown", asked | {"max_tokens": 3}, RESPONSES),
        batch_line("too long", asked | {"max_output_tokens": 10**7}, RESPONSES),
    ]
    batch, done, errors = await answers_of(served.client, lines, RESPONSES)
    assert (batch.status, batch.endpoint, set(done)) == ("completed", RESPONSES, {"text", "call"})
    told = {line["custom_id"]: line["response"]["body"]["error"]["param"] for line in errors}
    assert told == {"likely": "include", "unknown": "max_output_tokens", "too long": None}
    for name, given_ in (("text", asked), ("call", called)):
        extra = {"slipstream": given_.pop("slipstream")}
        direct: Any = await served.client.responses.create(**given_, extra_body=extra)
        answer: Any = Response.model_validate(done[name])
        assert [_told(item) for item in answer.output] == [_told(item) for item in direct.output]
        for field in ("status", "instructions", "max_output_tokens", "tools", "tool_choice", "text", "object"):
            assert getattr(answer, field) == getattr(direct, field), field
        assert answer.usage.output_tokens == direct.usage.output_tokens and answer.id != direct.id


def _told(item: Any) -> Any:
    return item.arguments if item.type == "function_call" else [part.text for part in item.content]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "where"}}])
async def test_functions_are_called_in_a_batch(served: Served, choice: Any) -> None:
    clip = f"file://{served.folder}/1.mp4"
    calling = body(served, clip, tools=[CHAT_TOOL], tool_choice=choice, max_tokens=400)
    lines = [
        batch_line("text", body(served, clip)),
        batch_line("call", calling),
        batch_line("likely", calling | {"logprobs": True}),
    ]
    _, done, (refused,) = await answers_of(served.client, lines, CHAT)
    assert refused["response"]["body"]["error"]["param"] == "logprobs", "no job keeps them"
    direct: Any = await served.client.chat.completions.create(
        **{name: value for name, value in calling.items() if name != "slipstream"},
        extra_body={"slipstream": calling["slipstream"]},
    )
    answer: Any = ChatCompletion.model_validate(done["call"]).choices[0]
    (call,), (expected,) = answer.message.tool_calls, direct.choices[0].message.tool_calls
    assert (call.function, answer.finish_reason) == (expected.function, direct.choices[0].finish_reason)
    assert answer.message.content is None and done["text"]["choices"][0]["message"]["content"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_line_goes_where_its_batch_does(served: Served) -> None:
    lines = [batch_line("a", {}), batch_line("b", {}, RESPONSES)]
    batch = await ended(served.client, await opened(served.client, lines, endpoint=RESPONSES))
    assert batch.status == "failed" and [(error.line, error.code) for error in batch.errors.data] == [
        (1, "invalid_url")
    ]
    with pytest.raises(openai.BadRequestError, match="endpoint must be"):
        await opened(served.client, lines, endpoint="/v1/embeddings")


@pytest.mark.asyncio
async def test_no_data_url_is_taken_for_the_name_of_something(tmp_path: Path) -> None:
    """What stands for media while a body is read was answered in its place."""
    url = data_url(b"a picture", "image/png")
    with FakeArchive() as archive:
        async with front_at(archive.address, data=str(tmp_path)) as address, client_of(address) as client:
            with pytest.raises(openai.BadRequestError, match="opened without media"):
                await opened(client, [batch_line("a", {})], metadata={"picture": url})
            batch = await ended(client, await opened(client, [batch_line(url, {})]))
    assert batch.status == "failed" and "custom_id is a data: URL" in batch.errors.data[0].message
