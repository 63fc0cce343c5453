"""Functions that an answer must call: how they are asked for, what is kept of the text, and how OpenAI's own client is
told of it."""

import json
from typing import Any

import llguidance
import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import Asked
from slipstream.services.front.function_calls import Functions, StreamedCalls, read_functions, whole_calls
from tests.front.conftest import NUM_FRAMES, Served
from tests.front.test_chat_requests import URL, read, refused, request
from tests.front.test_openai_chat import chat
from tests.support.front import asked, data_url

WHERE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["place", "next"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["indoors", "outdoors"]}},
}
"""Refers to itself and to a part of it."""
PLAIN = {"type": "object", "properties": {"$ref": {"const": {"$ref": "#/x"}}}, "required": ["$ref"]}
"""Whose references are none."""
EITHER = Functions(("where", "plain-2"), is_named=False)
NAMED = Functions(("where",), is_named=True)


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("where", WHERE), tool("plain-2", PLAIN)]

# -- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "chosen", "functions", "schema"),
    [
        (TOOLS, choice("where"), NAMED, WHERE),
        (TOOLS[:1], "required", Functions(("where",), is_named=False), WHERE),
        (TOOLS, "none", None, None),
        ([], "auto", None, None),
        (None, "none", None, None),
        (TOOLS[1:], choice("plain-2"), Functions(("plain-2",), is_named=True), PLAIN),
    ],
)
def test_the_text_is_kept_to_the_arguments(tools: Any, chosen: Any, functions: Any, schema: Any) -> None:
    chat = read(request(tools=tools, tool_choice=chosen, parallel_tool_calls=False))
    said = chat.options.given().get("json_schema")
    assert chat.functions == functions and (None if said is None else json.loads(said)) == schema


def test_a_function_without_parameters_has_no_arguments() -> None:
    chat = read(request(tools=[tool("now")], tool_choice="required"))
    assert allows(chat.options.given()["json_schema"], "{}")
    assert not allows(chat.options.given()["json_schema"], '{"a": 1}')


@pytest.mark.parametrize("others", [[], [tool("other")]])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"properties": {"a": {"type": "integer"}}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
    ],
)
def test_arguments_are_an_object(parameters: dict[str, Any], others: list[Any]) -> None:
    """Also by a schema that allows all else: it says nothing of what is none."""
    chat = read(request(tools=[tool("f", parameters), *others], tool_choice="required"))
    schema = chat.options.given()["json_schema"]
    begin, end = ('{"name": "f", "arguments": ', "}") if others else ("", "")
    assert all(allows(schema, f"{begin}{text}{end}") for text in ("{}", '{"a": 1}'))
    assert not any(allows(schema, f"{begin}{text}{end}") for text in ("4.3e-0", '"a"', "[1]", "null"))


@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ({"place": "indoors", "next": {"place": "outdoors", "next": None}}, True),
        ({"place": "indoors", "next": {"place": "at sea", "next": None}}, False),
        ({"place": "at sea", "next": None}, False),
        ({"$ref": {"$ref": "#/x"}}, False),
    ],
)
def test_of_several_functions_each_has_its_own_arguments(arguments: Any, is_allowed: bool) -> None:
    """References in a schema mean the same when it is a part of another."""
    chat = read(request(tools=TOOLS, tool_choice="required"))
    schema = chat.options.given()["json_schema"]
    assert chat.functions == EITHER
    assert allows(json.dumps(WHERE), json.dumps(arguments)) is is_allowed
    assert allows(schema, json.dumps({"name": "where", "arguments": arguments})) is is_allowed
    assert not allows(schema, json.dumps({"name": "plain-2", "arguments": arguments})) or "$ref" in arguments
    assert not allows(schema, json.dumps({"name": "another", "arguments": arguments}))
    assert allows(schema, json.dumps({"name": "plain-2", "arguments": {"$ref": {"$ref": "#/x"}}}))


@pytest.mark.parametrize(
    "parameters",
    [
        WHERE | {"$id": "https://example.org/where"},
        WHERE | {"$id": "Where"},
        WHERE | {"properties": {"place": WHERE["$defs"]["Place"] | {"$id": "Place"}, "next": {"type": "null"}}},
        {
            "type": "object",
            "required": ["place"],
            "properties": {"place": {"$id": "Inner", "$ref": "#/$defs/Place"} | {"$defs": WHERE["$defs"]}},
        },
    ],
)
def test_a_schema_with_a_name_of_its_own_refers_to_itself(parameters: dict[str, Any]) -> None:
    chat = read(request(tools=[tool("named", parameters), *TOOLS], tool_choice="required"))
    schema = chat.options.given()["json_schema"]
    for name in ("named", "where"):
        told = [json.dumps({"name": name, "arguments": {"place": at, "next": None}}) for at in ("indoors", "at sea")]
        assert [allows(schema, one) for one in told] == [True, False]


def allows(schema: str, text: str) -> bool:
    """What llguidance says by itself."""
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_json_schema(schema)
    )
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": choice("other")}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "where", "magic": 1}}},
            "tool_choice.function.magic",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": choice("where")}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": {}, "tool_choice": {}}, "tool_choice.type"),
        ({"tools": "x"}, "tools"),
        ({"tools": [tool(f"f{index}") for index in range(129)], "tool_choice": "required"}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool("a", "{}")]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", {"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("a", {"type": ["object", "null"]})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("a") | {"magic": 1}]}, "tools[0].magic"),
        ({"tools": TOOLS, "tool_choice": choice("where"), "guided_regex": "a"}, "tools[0].function.parameters"),
        (
            {"tools": TOOLS, "tool_choice": choice("plain-2"), "response_format": {"type": "json_object"}},
            "tools[1].function.parameters",
        ),
        ({"functions": [{"name": "where"}]}, "functions"),
    ],
)
def test_the_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(request(**fields))
    assert (error.status, error.param) == (400, param)


def test_a_schema_is_not_nested_without_end() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"not": deep}
    with pytest.raises(ApiError, match="too deeply"):
        read_functions({"tools": [tool("a", deep), tool("b")], "tool_choice": "required"}, Asked({}))


def test_calls_and_what_they_returned_are_a_conversation() -> None:
    """As programs hand an answer back, and what is wrong with it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "where", "arguments": '{"place": "at sea"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": "call_1", "name": "where", "content": "place is wrong"}
    parts = told | {"content": [{"type": "text", "text": "try again"}]}
    options = read(request(messages=[*asked(URL, "What?"), answer, told, parts])).options
    said = '{"name": "where", "arguments": {"place": "at sea"}}'
    assert options.given() == {"prompt": "place is wrong\ntry again", "turns": ("What?", said)}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"role": "assistant", "tool_calls": {}}, {"role": "user", "content": []}], "messages"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[1].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[1].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[1].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "messages[1].tool_calls"),
        (
            [{"role": "assistant"}, {"role": "tool", "content": [{"type": "image_url", "image_url": URL}]}],
            "messages[2].content[0].type",
        ),
        ([{"role": "assistant"}, {"role": "tool", "content": ""}], "messages"),
    ],
)
def test_what_is_wrong_with_a_conversation_about_calls(messages: list[Any], param: str) -> None:
    error = refused(request(messages=[*asked(URL), *messages]))
    assert (error.status, error.param) == (400, param)


# -- what is answered -------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\{}[]: \n\u00e9'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a}{", max_size=2), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text('a"}', max_size=3), VALUES, max_size=3)


def streamed(functions: Functions, pages: list[list[str]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The calls that the pieces of a stream make, and each piece of arguments."""
    calls, told, pieces = StreamedCalls(functions, "chatcmpl-7"), list[dict[str, Any]](), list[str]()
    for page in pages:
        for delta in [delta for piece in page for delta in calls.add(piece)] + calls.end():
            (call,) = delta["tool_calls"]
            if "id" in call:
                told.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                pieces.append(call["function"]["arguments"])
                told[-1]["function"]["arguments"] += pieces[-1]
            assert call["index"] == len(told) - 1
    return told, pieces


@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_a_stream_tells_the_same_calls(said: list[Any], width: int, indent: int | None, is_either: bool) -> None:
    functions = EITHER if is_either else NAMED
    texts = [
        json.dumps({"name": "where", "arguments": one} if is_either else one, indent=indent, ensure_ascii=False)
        for one in said
    ]
    whole = whole_calls(functions, [texts[0], "", *texts[1:]], "chatcmpl-7")
    assert [json.loads(call["function"]["arguments"]) for call in whole] == said
    assert [call["function"]["name"] for call in whole] == ["where"] * len(said)
    assert [call["id"] for call in whole] == [f"call_7-{index}" for index in range(len(said))]
    pages = [[text[at : at + width] for at in range(0, len(text), width)] for text in texts]
    calls, pieces = streamed(functions, [pages[0], [], [""], *pages[1:]])
    assert calls == whole and all(pieces)


@pytest.mark.parametrize("arguments", ['{"n": ' + "9" * 5000 + "}", '{"n": ' + "[" * 3000 + "]" * 3000 + "}"])
def test_arguments_that_python_does_not_read_are_told_all_the_same(arguments: str) -> None:
    """Whether their last brace is theirs or the call's cannot be seen then."""
    name, told = EITHER.call(f'{{"name": "where", "arguments": {arguments}}}', is_whole=True)
    assert name == "where" and told.removesuffix("}") == arguments


@given(ARGUMENTS, st.integers(0, 60), st.booleans())
def test_of_a_text_that_was_cut_all_arguments_are_told(said: Any, num_chars: int, is_either: bool) -> None:
    functions, arguments = EITHER if is_either else NAMED, json.dumps(said)
    text = f'{{"name": "where", "arguments": {arguments}}}' if is_either else arguments
    cut = text[:num_chars]
    name, got = functions.call(cut, is_whole=True)
    assert arguments.startswith(got) and (name == "where" or not got)
    if name and is_either and cut != text:
        assert len(got) >= min(len(cut), len(text) - 1) - text.index(arguments) - 1
    calls, _ = streamed(functions, [list(cut)])
    assert calls == whole_calls(functions, [cut], "chatcmpl-7")
    assert not cut or len(calls) == bool(name)


def test_a_page_that_was_cut_before_its_functions_name_has_no_call() -> None:
    """And its number is the next one's."""
    texts = ['{"na', '{"name": "where", "arguments": {}}']
    (call,) = whole_calls(EITHER, texts, "chatcmpl-7")
    assert call == {"id": "call_7-0", "type": "function", "function": {"name": "where", "arguments": "{}"}}
    assert streamed(EITHER, [[text] for text in texts])[0] == [call]


# -- through the stack ------------------------------------------------------------------------------------------------


class Scene(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    objects: int = pydantic.Field(ge=1, le=99)


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    is_indoors: bool


SCENES = [openai.pydantic_function_tool(Scene), openai.pydantic_function_tool(Place)]


@pytest.mark.parametrize("chosen", [choice("Scene"), "required"])
@pytest.mark.asyncio(loop_scope="session")
async def test_an_answer_calls_the_function(served: Served, chosen: Any) -> None:
    """By the client's own way of asking for it, whole and as a stream."""
    given: dict[str, Any] = {
        "model": served.model,
        "messages": asked(data_url(served.clips[0])),
        "tools": SCENES,
        "tool_choice": chosen,
        "max_completion_tokens": 400,
        "extra_body": {"slipstream": {"num_frames": NUM_FRAMES}},
    }
    answer: Any = await served.client.chat.completions.parse(**given)
    (said,) = answer.choices
    (call,) = said.message.tool_calls
    assert said.message.content is None and isinstance(call.function.parsed_arguments, Scene | Place)
    assert said.finish_reason == ("tool_calls" if chosen == "required" else "stop")
    async with served.client.chat.completions.stream(**given) as stream:
        events = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final: Any = (await stream.get_final_completion()).choices[0]
    assert final.message.tool_calls[0].function == call.function and final.finish_reason == said.finish_reason
    assert "".join(event.arguments_delta for event in events) == call.function.arguments
    told = {"role": "tool", "tool_call_id": call.id, "content": "Call it again."}
    again: Any = await served.client.chat.completions.parse(
        **given | {"messages": [*given["messages"], said.message, told]}
    )
    assert again.choices[0].message.tool_calls[0].function.parsed_arguments
    assert again.usage.prompt_tokens_details.cached_tokens > again.usage.prompt_tokens / 2


@pytest.mark.asyncio(loop_scope="session")
async def test_a_call_that_was_cut_says_so(served: Served) -> None:
    fields = {"tools": SCENES, "tool_choice": choice("Scene"), "max_completion_tokens": 2}
    answer = await chat(served, data_url(served.clips[0]), **fields)
    (said,) = answer.choices
    assert said.finish_reason == "length" and said.message.tool_calls[0].function.arguments


@pytest.mark.asyncio(loop_scope="session")
async def test_a_stop_string_leaves_no_call_to_answer(served: Served) -> None:
    """Programs run what `tool_calls` says."""
    fields = {"tools": SCENES, "tool_choice": "required", "stop": "name"}
    (said,) = (await chat(served, data_url(served.clips[0]), max_completion_tokens=400, **fields)).choices
    assert (said.finish_reason, said.message.content, said.message.tool_calls) == ("stop", None, [])
