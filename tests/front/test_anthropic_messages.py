"""`/v1/messages`: read as the chat request that asks for the same, and told in Anthropic's form, to its own client."""

import base64
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from slipstream.messages import Caption, CommittedToken
from slipstream.services.front.anthropic_messages import MessageForm, error_body
from slipstream.services.front.anthropic_request import BARE_MEDIA, IDLE, SentNames, read_message
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import MediumKind, StoredFile
from slipstream.services.front.chat_request import ChatRequest, read_chat
from slipstream.services.front.completions import Completion, Written
from slipstream.services.front.function_calls import Functions, StreamedCalls
from slipstream.services.front.json_body import JsonBody, Media
from slipstream.speculation.protocol import FinishReason
from tests.front.conftest import NUM_FRAMES, Served, png
from tests.support.front import PROMPT, asked, data_url

URL = "https://example.org/a.mp4"
WHERE = {"type": "object", "properties": {"place": {"enum": ["at sea", "on land"]}}, "required": ["place"]}
TOOL = {"name": "where", "description": "Says where.", "input_schema": WHERE}
CHAT_TOOL = {"type": "function", "function": {"name": "where", "description": "Says where.", "parameters": WHERE}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "where", "input": {"place": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no", "is_error": True}
VIDEO = {"type": "video", "source": {"type": "url", "url": URL}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": PROMPT}, *blocks]}


def answer(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [user(VIDEO)], **fields}


def read(value: Any, names: SentNames | None = None, indent: int | None = None) -> ChatRequest:
    with JsonBody(10**6, 10**6, BARE_MEDIA) as body:
        body.feed(json.dumps(value, indent=indent).encode())
        return read_message(body.value(), body.media, names or SentNames())


def refused(value: Any) -> ApiError:
    names = SentNames()
    with pytest.raises(ApiError) as error:
        read(value, names)
    return names.told(error.value)


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_what_has_another_name_is_the_same() -> None:
    alike = {"model": "m", "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3}
    alike |= {"slipstream": {"num_frames": 4}, "stream": True, "metadata": {"user_id": "b"}}
    said = alike | {
        "messages": [user(VIDEO)],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "stop_sequences": ["END"],
        "output_config": {"format": {"type": "json_schema", "schema": WHERE}},
        "cache_control": {"type": "ephemeral"},
        **{name: values[-1] for name, values in IDLE.items()},
    }
    parts = [{"type": "text", "text": PROMPT}, {"type": "video_url", "video_url": {"url": URL}}]
    chat = alike | {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
        "stop": ["END"],
        "response_format": {"type": "json_schema", "json_schema": {"schema": WHERE}},
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    expected, found = read_chat(chat, {}), read(said)
    medium = replace(expected.medium, param=found.medium.param)
    assert replace(found, params={}) == replace(expected, params={}, medium=medium)


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "where"}]
)
def test_functions_and_what_they_returned(choice: Any) -> None:
    more = [user(VIDEO), answer({"type": "text", "text": "Let me see."}, USE), user()]
    more[2]["content"] = [RESULT, {"type": "text", "text": "Again."}]
    found = read(request(tools=[TOOL], tool_choice=choice, messages=more))
    assert found.functions == Functions(("where",), is_named=choice["type"] == "tool")
    call = '{"name": "where", "arguments": {"place": 1}}'
    assert sorted(found.options.get("turns", ())[1].split("\n")) == sorted(["Let me see.", call])
    assert found.options.prompt == "no\nAgain."


def test_an_answer_is_handed_back_as_it_came() -> None:
    said = answer({"type": "text", "text": "A ship.", "citations": None})
    options = read(request(messages=[user(VIDEO), said, {"role": "user", "content": "Where?"}])).options
    assert options.given() == {"prompt": "Where?", "turns": (PROMPT, "A ship."), "max_new_tokens": 9}


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "image", "source": {"type": "url", "url": URL}}, MediumKind.IMAGE),
        ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, MediumKind.FILE),
        ({"type": "document", "source": {"type": "url", "url": URL}, "citations": {"enabled": False}}, MediumKind.FILE),
        ({"type": "document", "source": {"type": "file", "file_id": "file-1"}}, MediumKind.FILE),
        (VIDEO, MediumKind.VIDEO),
        ({"type": "video", "source": {"type": "file", "file_id": "file-1"}}, MediumKind.FILE),
        ({"type": "video_url", "video_url": {"url": URL}}, MediumKind.VIDEO),
    ],
)
def test_a_medium_comes_as_a_block(block: dict[str, Any], kind: MediumKind) -> None:
    medium = read(request(messages=[user(block)])).medium
    assert medium.kind is kind and isinstance(medium.source, StoredFile) == ("file" in str(block.get("source")))


@given(data=st.binary(min_size=1, max_size=3000), order=st.permutations(["type", "media_type", "data"]))
def test_base64_without_a_head_is_media(data: bytes, order: list[str]) -> None:
    """However long it is, and in whatever order its fields come; what else is called `data` is not."""
    source = {"type": "base64", "media_type": "video/mp4", "data": base64.b64encode(data).decode()}
    block = {"type": "video", "source": {name: source[name] for name in order}}
    use = USE | {"input": {"data": "as said", "sources": [{"source": "x"}, {"data": "y" * 2000}]}}
    messages = [user(block), answer(use), {"role": "user", "content": [RESULT]}]
    for indent in (None, 2):
        found = read(request(messages=messages), indent=indent)
        assert isinstance(found.medium.source, Media) and found.medium.source.num_bytes == len(data)
        assert json.loads(found.options.get("turns", ())[1])["arguments"] == use["input"]


LONG = [user(VIDEO), answer(USE), {"role": "user", "content": [RESULT, {"type": "text", "text": "So?"}]}]


def with_block(*blocks: Any) -> dict[str, Any]:
    return {"messages": [user(*blocks)]}


def after(*messages: Any) -> dict[str, Any]:
    return {"messages": [*LONG, *messages]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": 7}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (with_block(7), "messages[0].content[1]"),
        (with_block({"type": "audio"}), "messages[0].content[1].type"),
        (with_block({"type": "image"}), "messages[0].content[1].source"),
        (with_block(VIDEO | {"source": 7}), "messages[0].content[1].source"),
        (with_block(VIDEO | {"source": {"type": "s3"}}), "messages[0].content[1].source.type"),
        (with_block(VIDEO | {"source": {"type": "url"}}), "messages[0].content[1].source.url"),
        (with_block(VIDEO | {"source": {"type": "url", "url": "ftp://x"}}), "messages[0].content[1].source.url"),
        (with_block(VIDEO | {"source": {"type": "base64", "data": "?"}}), "messages[0].content[1].source.data"),
        (with_block(VIDEO | {"source": {"type": "file"}}), "messages[0].content[1].source.file_id"),
        (with_block({"type": "document", "source": {"type": "url"}}), "messages[0].content[1].source.url"),
        (with_block({"type": "image", "source": {"type": "base64"}}), "messages[0].content[1].source.data"),
        (
            with_block(VIDEO | {"source": {"type": "base64", "media_type": [], "data": "AAAA"}}),
            "messages[0].content[1].source.media_type",
        ),
        (
            with_block({"type": "document", "source": {"type": "text", "data": "x"}}),
            "messages[0].content[1].source.type",
        ),
        (with_block(VIDEO | {"title": "x"}), "messages[0].content[1].title"),
        (with_block(VIDEO, VIDEO), "messages"),
        (after({"role": "assistant", "content": "x"}), "messages"),
        (after(answer({"type": "text", "text": 7})), "messages[3].content[0].text"),
        (after(answer(USE | {"name": None})), "messages[3].content[0].name"),
        (after(answer({"type": "text", "text": "x"}, USE | {"input": "x"})), "messages[3].content[1].input"),
        (after(answer({"type": "thinking", "thinking": "x"})), "messages[3].content[0].type"),
        (after(answer(USE), {"role": "user", "content": [RESULT | {"content": 7}]}), "messages[4].content[0].content"),
        (after(answer(USE), {"role": "user", "content": [RESULT | {"x": 7}]}), "messages[4].content[0].x"),
        ({"messages": [{"role": "user", "content": [RESULT, VIDEO]}]}, "messages[0].content[0].type"),
        ({"messages": [user(VIDEO), user(USE)]}, "messages[1].content[1]"),
        (after(answer(USE), {"role": "user", "content": [RESULT, USE]}), "messages[4].content[1]"),
        (after(answer(USE) | {"tool_calls": []}), "messages[3].tool_calls"),
        (after(answer(USE), {"role": "user", "content": [RESULT | {"content": 0}]}), "messages[4].content[0].content"),
        (after(answer(USE | {"input": {"a": "data:video/mp4;base64,AAAA"}})), "messages[3].content[0].input"),
        ({"system": 7}, "system"),
        ({"system": [{"type": "text", "text": 7}]}, "system[0].text"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_tokens"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x" * 2000}, "stop_sequences"),
        ({"response_format": {"type": "text"}}, "output_config"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2}, "n"),
        ({"tools": 7}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "a b"}], "tool_choice": {"type": "any"}}, "tools[0].name"),
        ({"tools": [TOOL | {"input_schema": 7}], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": ["any"]}}, "tool_choice.type"),
        ({"tool_choice": {"type": {}}}, "tool_choice.type"),
        ({"magic": 1}, "magic"),
    ],
)
def test_the_field_that_was_sent_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(request(**fields))
    assert (error.status, error.param) == (400, param)
    of_chats = ("image_url.url", "file_data", "response_format", ".function", '"required"')
    assert param.endswith(".tool_calls") == ("tool_calls" in str(error))
    assert not any(name in str(error) for name in of_chats)


@pytest.mark.parametrize("messages", [[user(VIDEO)], LONG, [{"role": "user", "content": [VIDEO]}]])
def test_errors_about_the_system_name_it(messages: Any) -> None:
    """A gateway that finds it too long says so of `system`, or of the question, where there is no other."""
    names = SentNames()
    found = read(request(system="Say less.", messages=messages), names)
    asked_by = found.params.get("system") or found.params["prompt"]
    error = names.told(ApiError(f"{asked_by} has 9000 characters", param=asked_by))
    assert (error.param, str(error)) == ("system", "system has 9000 characters")


def test_an_error_about_many_blocks_is_soon_told() -> None:
    """Nobody else is served meanwhile: less than the reading of them takes."""
    names, started = SentNames(), time.process_time()
    with pytest.raises(ApiError) as error:
        read(request(messages=[user(*[{"type": "text", "text": "x"}] * 20_000)], max_tokens=0), names)
    is_read = time.process_time()
    assert names.told(error.value).param == "max_tokens"
    assert time.process_time() - is_read < is_read - started


def test_only_the_messages_themselves_are_counted() -> None:
    """What several functions return is one of them, and what the system says is none."""
    returned = {"role": "user", "content": [RESULT] * 3}
    said = [user(VIDEO), *[answer(USE), returned] * 31, {"role": "user", "content": "So?"}]
    assert len(read(request(messages=said, system="Be brief.")).options.get("turns", ())) == 62
    assert refused(request(messages=[*said, returned])).param == "messages"


# -- what is told -----------------------------------------------------------------------------------------------------


def events_of(told: bytes) -> list[dict[str, Any]]:
    """Each is what its line says it is."""
    events = []
    for block in told.decode().removesuffix("\n\n").split("\n\n"):
        head, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        assert head == f"event: {events[-1]['type']}"
    return events


def form(is_called: bool = False) -> MessageForm:
    return MessageForm(Completion("chatcmpl-7", "m", 5), "7", is_called=is_called)


ENDS = {
    "end_turn": Caption("", 1, FinishReason.STOP),
    "max_tokens": Caption("", 1, FinishReason.LENGTH),
    "stop_sequence": Caption("", 1, FinishReason.STOP, stop_string="END"),
}


@given(st.lists(st.text(), max_size=5), st.sampled_from(sorted(ENDS)))
def test_a_stream_tells_what_the_whole_has(pieces: list[str], reason: str) -> None:
    text, told = "".join(pieces), form()
    written = Written(text, [replace(ENDS[reason], text=text)])
    stream = told.begin({"usage": {"prompt_tokens": 5, "completion_tokens": 0}})
    for index, piece in enumerate(pieces):
        stream += told.add({"content": piece}, [CommittedToken(index, piece, False)], {})
    events = events_of(stream + told.end(written, [], {}) + told.close([written]))
    whole = form().whole([written])
    assert Message.model_validate(whole).content[0].text == text  # type: ignore[union-attr]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, "END" if reason == "stop_sequence" else None)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == text
    assert events[-2]["usage"] == whole["usage"] and events[-2]["delta"]["stop_reason"] == reason


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=2), min_size=1, max_size=3), st.integers(1, 9))
def test_a_stream_tells_the_calls_that_the_whole_has(arguments: list[dict[str, str]], width: int) -> None:
    functions = Functions(("where", "when"), is_named=False)
    texts = [json.dumps({"name": "where", "arguments": one}) for one in arguments]
    told, calls = form(is_called=True), StreamedCalls(functions, "chatcmpl-7")
    stream = told.begin({})
    for text in texts:
        pieces = [text[at : at + width] for at in range(0, len(text), width)]
        for delta in [delta for piece in pieces for delta in calls.add(piece)] + calls.end():
            stream += told.add(delta, [], {})
    written = Written("", [Caption(text, 1, FinishReason.STOP) for text in texts], functions=functions)
    events = events_of(stream + told.end(written, [], {}))
    whole = Message.model_validate(form(is_called=True).whole([written]))
    assert [block.input for block in whole.content] == arguments  # type: ignore[union-attr]
    assert whole.stop_reason == events[-2]["delta"]["stop_reason"] == "tool_use"
    for index, block in enumerate(whole.content):
        own = [event for event in events if event.get("index") == index]
        assert own[0]["content_block"] == {"type": "tool_use", "id": block.id, "name": "where", "input": {}}  # type: ignore[union-attr]
        assert json.loads("".join(event["delta"]["partial_json"] for event in own[1:-1])) == arguments[index]
        assert own[-1]["type"] == "content_block_stop"


def test_a_call_that_was_cut_is_text() -> None:
    """Programs call what they find with the arguments that they find."""
    cut = Caption('{"place": "at', 3, FinishReason.LENGTH)
    whole = form(is_called=True).whole([Written("", [cut], functions=Functions(("where",), is_named=True))])
    assert whole["stop_reason"] == "max_tokens" and whole["content"][0] == {
        "type": "text", "text": '{"place": "at', "citations": None,
    }  # fmt: skip


@pytest.mark.parametrize("number", ["3E999", "9" * 5000])
def test_a_call_with_a_number_that_nobody_reads_is_text(number: str) -> None:
    """`Infinity` is no JSON: browsers' programs could read nothing of the answer."""
    text = f'{{"place": {number}}}'
    written = Written(text, [Caption(text, 3, FinishReason.STOP)], functions=Functions(("where",), is_named=True))
    whole = form(is_called=True).whole([written])
    json.dumps(whole, allow_nan=False)
    assert whole["stop_reason"] == "end_turn" and whole["content"] == [
        {"type": "text", "text": text, "citations": None}
    ]


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        (None, "invalid_request_error", "invalid_request_error"),
        ("model_not_found", "invalid_request_error", "not_found_error"),
        ("too_large", "invalid_request_error", "request_too_large"),
        ("rate_limit_exceeded", "rate_limit_error", "rate_limit_error"),
        ("unavailable", "server_error", "overloaded_error"),
        ("internal_error", "server_error", "api_error"),
    ],
)
def test_kinds_of_errors(code: str | None, kind: str, told: str) -> None:
    said = error_body(ApiError("x", kind=kind, code=code, param="p").body["error"])
    assert said == {"type": "error", "error": {"message": "x", "type": told, "param": "p", "code": code}}
    (event,) = events_of(form().fail(ApiError("x", kind=kind, code=code, param="p").body["error"]))
    assert event == said


# -- through the stack ------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(loop_scope="session")
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Anthropic's own, which asks once."""
    address = f"http://{served.stack.http_address}"
    async with anthropic.AsyncAnthropic(base_url=address, api_key="nobody", max_retries=0, timeout=240) as opened:
        yield opened


def given_of(served: Served, **fields: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "video/mp4", "data": base64.b64encode(served.clips[0]).decode()}
    extra = {"slipstream": {"num_frames": NUM_FRAMES}}
    messages = [user({"type": "video", "source": source})]
    return {"model": served.model, "messages": messages, "max_tokens": 24, "extra_body": extra} | fields


@pytest.mark.asyncio(loop_scope="session")
async def test_the_text_is_that_of_a_chat(served: Served, client: anthropic.AsyncAnthropic) -> None:
    """Whole, in a stream, and when it is asked about again."""
    chat = await served.client.chat.completions.create(
        model=served.model,
        messages=asked(data_url(served.clips[0])),
        max_completion_tokens=24,
        extra_body={"slipstream": {"num_frames": NUM_FRAMES}},
    )
    text = chat.choices[0].message.content
    message = await client.messages.create(**given_of(served))
    assert message.content[0].text == text and message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == chat.usage.prompt_tokens
    assert message.usage.output_tokens == 24
    async with client.messages.stream(**given_of(served)) as stream:
        assert "".join([piece async for piece in stream.text_stream]) == text
        final = await stream.get_final_message()
    assert final.content[0].text == text and final.stop_reason == "max_tokens"  # type: ignore[union-attr]
    assert final.usage.output_tokens == 24
    more = [*given_of(served)["messages"], {"role": "assistant", "content": message.content}]
    again = await client.messages.create(**given_of(served, messages=[*more, {"role": "user", "content": "And then?"}]))
    assert again.usage.cache_read_input_tokens and again.usage.cache_read_input_tokens > again.usage.input_tokens


@pytest.mark.asyncio(loop_scope="session")
async def test_objects_come_as_texts_and_as_calls(served: Served, client: anthropic.AsyncAnthropic) -> None:
    schema = WHERE | {"additionalProperties": False}
    config = {"format": {"type": "json_schema", "schema": schema}}
    message = await client.messages.create(**given_of(served, output_config=config, max_tokens=400))
    assert json.loads(message.content[0].text)["place"] in ("at sea", "on land") and message.stop_reason == "end_turn"
    given = given_of(served, tools=[TOOL | {"input_schema": schema}], tool_choice={"type": "any"}, max_tokens=400)
    called = await client.messages.create(**given)
    (call,) = called.content
    assert (call.type, call.name, called.stop_reason) == ("tool_use", "where", "tool_use")
    async with client.messages.stream(**given) as stream:
        final = await stream.get_final_message()
    assert final.content[0].input == call.input  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Call it again."}
    more = [*given["messages"], {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    again = await client.messages.create(**given | {"messages": more})
    assert again.content[0].input["place"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_picture(served: Served, client: anthropic.AsyncAnthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(90)).decode()}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": PROMPT}]
    message = await client.messages.create(
        model=served.model, max_tokens=8, messages=[{"role": "user", "content": blocks}]
    )
    assert message.content[0].type == "text" and message.usage.output_tokens <= 8


@pytest.mark.asyncio(loop_scope="session")
async def test_the_clients_beta_interface(served: Served, client: anthropic.AsyncAnthropic) -> None:
    """Clients before 1.0 ask by `?beta=true` then."""
    message = await client.messages.create(**given_of(served), extra_query={"beta": "true"})
    assert message.content[0].type == "text"


@pytest.mark.asyncio(loop_scope="session")
async def test_what_is_wrong_is_told_as_an_error(served: Served, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.APIStatusError) as refused:
        await client.messages.create(**given_of(served, max_tokens=10**6))
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["param"] == "max_tokens"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(**given_of(served, model="another"))
    assert unknown.value.type == "not_found_error"
