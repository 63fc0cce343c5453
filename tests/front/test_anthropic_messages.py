"""Answers of `/v1/messages`: whole and in events as Anthropic's protocol has them, and to Anthropic's own client."""

import base64
import json
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
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.completions import Completion, Written
from slipstream.services.front.function_calls import Functions
from slipstream.speculation.protocol import FinishReason
from tests.front.conftest import NUM_FRAMES, Served, png
from tests.support.front import PROMPT, asked, data_url, events_of, told_calls

WHERE = {
    "type": "object",
    "properties": {"place": {"enum": ["at sea", "on land"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL = {"name": "where", "description": "Says where.", "input_schema": WHERE}


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
    told = form(is_called=True)
    stream = told_calls(told, functions, texts, width)
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
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}, {"type": "video", "source": source}]}]
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
async def test_tokens_are_counted_before_they_are_asked_about(served: Served, client: anthropic.AsyncAnthropic) -> None:
    """Also of a request that has more than what is counted; a message finds the prompt that was run for it."""
    given = given_of(served)
    asked_for = {name: given[name] for name in ("model", "messages", "extra_body")}
    asked_for["messages"] += [{"role": "assistant", "content": "A."}, {"role": "user", "content": "?"}]
    counted = await client.messages.count_tokens(**asked_for, system="Be brief.")
    message = await client.messages.create(**given | asked_for, system="Be brief.")
    assert message.usage.cache_read_input_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == counted.input_tokens
    more = {"stream": True, "stop_sequences": ["."], "max_tokens": 10**6}
    asked_for["extra_body"] |= more
    assert await client.messages.count_tokens(**asked_for, system="Be brief.") == counted
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.count_tokens(**asked_for | {"messages": []})
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["param"] == "messages"


@pytest.mark.asyncio(loop_scope="session")
async def test_objects_come_as_texts_and_as_calls(served: Served, client: anthropic.AsyncAnthropic) -> None:
    config = {"format": {"type": "json_schema", "schema": WHERE}}
    message = await client.messages.create(**given_of(served, output_config=config, max_tokens=400))
    assert json.loads(message.content[0].text)["place"] in ("at sea", "on land") and message.stop_reason == "end_turn"
    given = given_of(served, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=400)
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
    with pytest.raises(anthropic.NotFoundError) as nothing:
        await client.messages.batches.list()
    assert nothing.value.type == "not_found_error"
