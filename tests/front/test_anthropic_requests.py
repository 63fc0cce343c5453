"""A request to `/v1/messages` is the chat request that asks for the same, and errors name the field that was sent."""

import base64
import json
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.services.front.anthropic_request import BARE_MEDIA, IDLE, SentNames, read_message
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import MediumKind, StoredFile
from slipstream.services.front.chat_request import ChatRequest, read_chat
from slipstream.services.front.function_calls import Functions
from slipstream.services.front.json_body import JsonBody, Media
from tests.support.front import PROMPT

URL = "https://example.org/a.mp4"
WHERE = {"type": "object", "properties": {"place": {"enum": ["at sea", "on land"]}}, "required": ["place"]}
TOOL = {"name": "where", "description": "Says where.", "input_schema": WHERE}
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
        "reasoning_effort": "none",
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


class Asked(dict[str, str]):
    """Paths that may be looked up, and not gone through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("a body may have a hundred thousand")


def test_an_error_about_many_blocks_goes_through_no_list_of_them() -> None:
    """Nobody else is served meanwhile."""
    names = SentNames()
    with pytest.raises(ApiError) as error:
        read(request(messages=[user(*[{"type": "text", "text": "x"}] * 2000)], max_tokens=0), names)
    names._ours = Asked(names._ours)
    assert names.told(error.value).param == "max_tokens"


def test_only_the_messages_themselves_are_counted() -> None:
    """What several functions return is one of them, and what the system says is none."""
    returned = {"role": "user", "content": [RESULT] * 3}
    said = [user(VIDEO), *[answer(USE), returned] * 31, {"role": "user", "content": "So?"}]
    assert len(read(request(messages=said, system="Be brief.")).options.get("turns", ())) == 62
    assert refused(request(messages=[*said, returned])).param == "messages"
