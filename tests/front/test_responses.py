"""`/v1/responses`: read as the chat request that asks for the same, and told in that protocol's form."""

import json
from dataclasses import replace
from typing import Any, Literal

import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from slipstream.messages import Caption, CommittedToken
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import MAX_MESSAGES, MediumKind, StoredFile
from slipstream.services.front.chat_request import ChatRequest, read_chat
from slipstream.services.front.completions import Completion, Written
from slipstream.services.front.function_calls import Functions
from slipstream.services.front.json_body import JsonBody
from slipstream.services.front.responses import REPEATED, ResponseForm
from slipstream.services.front.responses_request import IDLE, read_response, sent_names
from slipstream.speculation.protocol import FinishReason
from tests.front.conftest import NUM_FRAMES, Served
from tests.support.front import PROMPT, asked, data_url, events_of, told_calls

URL = "https://example.org/a.mp4"
WHERE = {"type": "object", "properties": {"place": {"enum": ["at sea", "on land"]}}, "required": ["place"]}
TOOL = {"type": "function", "name": "where", "parameters": WHERE, "strict": True}


JSON_FORMAT = {"type": "json_schema", "name": "place", "schema": WHERE}
CALL = {"type": "function_call", "call_id": "call_1", "name": "where", "arguments": '{"place": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "no"}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": PROMPT}, *parts]}


def request(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": [user({"type": "input_file", "file_url": URL})], **fields}


ASKED = request()["input"]


def read(value: Any) -> ChatRequest:
    with JsonBody(10**6, 10**6) as body:
        body.feed(json.dumps(value).encode())
        return read_response(body.value(), body.media)


def refused(value: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(value)
    return sent_names(error.value)


# -- what is asked ----------------------------------------------------------------------------------------------------


def test_what_has_another_name_is_the_same() -> None:
    said = request(
        instructions="Be brief.",
        max_output_tokens=9,
        text={"format": {"type": "json_schema", "name": "place", "schema": WHERE, "strict": True}},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["END"],
        slipstream={"num_frames": 4},
        stream=True,
        metadata={"a": "b"},
        store=True,
        **{name: values[-1] for name, values in IDLE.items()},
    )
    part = {"type": "file", "file": {"file_url": URL}}
    chat = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": PROMPT}, part]},
            {"role": "system", "content": "Be brief."},
        ],
        "max_completion_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": WHERE}},
        "logprobs": True,
        "top_logprobs": 2,
        "slipstream": {"num_frames": 4},
        "reasoning_effort": "none",
        "stream": True,
    }
    expected = read_chat(chat | {name: said[name] for name in ("temperature", "top_p", "seed", "stop")}, {})
    assert replace(read(said), params={}) == replace(expected, params={})
    assert read(said).options.get("system", "") == "Be brief."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "where"}])
def test_functions_and_what_they_returned(choice: Any) -> None:
    found = read(request(tools=[TOOL], tool_choice=choice) | {"input": [*ASKED, CALL | {"id": "fc_1"}, OUTPUT]})
    assert found.functions == Functions(("where",), is_named=choice != "required")
    assert found.options.get("turns", ()) == (PROMPT, '{"name": "where", "arguments": {"place": 1}}')
    assert found.options.prompt == "no"


@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_instructions_are_no_item(instructions: str | None) -> None:
    more = {"role": "user", "content": "And then?"}
    items = [*ASKED, more, *[{"role": "assistant", "content": "A ship."}, more] * (MAX_MESSAGES // 2 - 1)]
    asked_so = request(instructions=instructions) | {"input": items}
    assert len(items) == MAX_MESSAGES and read(asked_so).options.get("system", "") == (instructions or "")
    for wrong in ([], [*items, more]):
        error = refused(asked_so | {"input": wrong})
        assert (str(error), error.param) == ("input must be text or a list of 1 to 64 items", "input")


def test_an_answer_is_handed_back_as_it_came() -> None:
    text = {"type": "output_text", "text": "A ship.", "annotations": [], "logprobs": []}
    answer = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [text]}
    options = read(request() | {"input": [*request()["input"], answer, {"role": "user", "content": "Where?"}]}).options
    assert options.given() == {"prompt": "Where?", "turns": (PROMPT, "A ship.")}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, MediumKind.IMAGE),
        ({"type": "input_image", "image_url": None, "file_id": "file-1", "detail": "high"}, MediumKind.FILE),
        ({"type": "input_file", "file_id": "file-1", "filename": "a.mp4"}, MediumKind.FILE),
        ({"type": "input_file", "file_data": "data:video/mp4;base64,AAAA", "filename": "a.mp4"}, MediumKind.FILE),
        ({"type": "video_url", "video_url": {"url": URL}}, MediumKind.VIDEO),
    ],
)
def test_a_medium_comes_as_a_part(part: dict[str, Any], kind: MediumKind) -> None:
    medium = read(request(input=[user(part)])).medium
    assert medium.kind is kind and isinstance(medium.source, StoredFile) == (part.get("file_id") is not None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": "Hello"}, "input"),
        ({"input": []}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [user({"type": "input_audio"})]}, "input[0].content[1].type"),
        ({"input": [user(7)]}, "input[0].content[1]"),  # type: ignore[arg-type]
        ({"input": [user({"type": "input_file"})]}, "input[0].content[1].file"),
        ({"input": [user({"type": "input_file", "file_id": ""})]}, "input[0].content[1].file_id"),
        ({"input": [user({"type": "input_file", "file_url": "ftp://x"})]}, "input[0].content[1].file_url"),
        ({"input": [user({"type": "input_image", "image_url": "ftp://x"})]}, "input[0].content[1].image_url"),
        ({"input": [user({"type": "input_image", "file_id": "a", "image_url": URL})]}, "input[0].content[1].image_url"),
        ({"input": [*ASKED, CALL | {"name": None}]}, "input[1].name"),
        ({"input": [*ASKED, CALL | {"arguments": {}}]}, "input[1].arguments"),
        ({"input": [CALL]}, "input[0].type"),
        ({"input": [*ASKED, OUTPUT]}, "input[1].type"),
        ({"input": [*ASKED, CALL, OUTPUT | {"output": 7}]}, "input[2].output"),
        ({"input": [*ASKED, CALL, OUTPUT | {"output": [{"type": "input_text"}]}]}, "input[2].output[0].text"),
        ({"instructions": ["x"]}, "instructions"),
        ({"instructions": "data:video/mp4;base64,AAAA"}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_output_tokens"),
        ({"messages": []}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": [[]]}, "include"),
        ({"include": "x"}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": "json"}, "text"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": JSON_FORMAT | {"description": "data:video/mp4;base64,AAAA"}}}, "text"),
        ({"tools": [TOOL | {"description": "data:video/mp4;base64,AAAA"}], "tool_choice": "none"}, "tools"),
        ({"tools": 7}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0].type"),
        ({"tools": [TOOL | {"name": "a b"}], "tool_choice": "required"}, "tools[0].name"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "where", "magic": 1}}, "tool_choice.magic"),
        ({"metadata": {"a": "data:video/mp4;base64,AAAA"}}, "metadata"),
        ({"metadata": "mine"}, "metadata"),
        ({"metadata": {"a": 7}}, "metadata.a"),
        ({"metadata": {"a" * 65: "b"}}, "metadata." + "a" * 64),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
        ({"metadata": {str(number): "b" for number in range(17)}}, "metadata"),
        ({"user": {"name": "me"}}, "user"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
        ({"magic": 1}, "magic"),
    ],
)
def test_the_field_that_was_sent_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(request(**fields))
    assert (error.status, error.param) == (400, param)
    of_chats = ("messages", "response_format", "max_completion_tokens", "logprobs: true")
    assert not any(name in str(error) for name in of_chats)


# -- what is told -----------------------------------------------------------------------------------------------------


def numbered(told: bytes) -> list[dict[str, Any]]:
    """Its events; their numbers have no gap."""
    events = events_of(told)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({}, None),
        ({"instructions": "Say less."}, "instructions"),
        ({"input": [{"role": "system", "content": "Say less."}, *ASKED]}, "messages[0].content"),
        ({"input": [{"role": "developer", "content": "Say."}, *ASKED], "instructions": "Less."}, "messages"),
    ],
)
def test_errors_about_instructions_name_them(said: dict[str, Any], param: str | None) -> None:
    """A gateway that finds them too long says so of `system`."""
    assert read(request(**said)).params.get("system") == param


@pytest.mark.parametrize("part", [None, {"type": "input_audio"}])
def test_parts_are_called_what_they_are_here(part: dict[str, Any] | None) -> None:
    """LangChain leaves `video_url` out of such a request without a word; that is no part to advise alone."""
    error = str(refused(request(input=[user(*([part] if part else []))])))
    assert "input_file" in error and "image_url" not in error, error


def form(is_called: bool = False) -> ResponseForm:
    return ResponseForm(Completion("chatcmpl-7", "m", 5), {"metadata": {"a": "b"}}, "7", is_called=is_called)


@given(st.lists(st.text(), max_size=5), st.booleans())
def test_a_stream_tells_what_the_whole_has(pieces: list[str], is_cut: bool) -> None:
    text, told = "".join(pieces), form()
    tokens = [CommittedToken(index, piece, False, logprob=-1.0) for index, piece in enumerate(pieces)]
    reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
    written = Written(text, [Caption(text, len(pieces), reason)], tokens)
    stream = told.begin({})
    for token in tokens:
        stream += told.add({"content": token.piece}, [token], {})
    events = numbered(stream + told.end(written, [], {}))
    last, whole = events[-1], form().whole([written])
    assert last["type"] == ("response.incomplete" if is_cut else "response.completed")
    assert last["response"] == whole | {"completed_at": last["response"]["completed_at"]}
    assert (whole["completed_at"] is None) == is_cut
    found = Response.model_validate(whole)  # every field that OpenAI's own has
    assert found.output_text == text and found.metadata == {"a": "b"}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == text
    (item,) = whole["output"]
    assert [one for event in deltas for one in event["logprobs"]] == item["content"][0]["logprobs"]
    assert [event["item"]["status"] for event in events if "item" in event] == ["in_progress", whole["status"]]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == [item]


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=2), min_size=1, max_size=3), st.integers(1, 9))
def test_a_stream_tells_the_calls_that_the_whole_has(arguments: list[dict[str, str]], width: int) -> None:
    functions = Functions(("where", "when"), is_named=False)
    texts = [json.dumps({"name": "where", "arguments": one}) for one in arguments]
    told = form(is_called=True)
    stream = told_calls(told, functions, texts, width)
    written = Written("", [Caption(text, 1, FinishReason.STOP) for text in texts], functions=functions)
    events = numbered(stream + told.end(written, [], {}))
    output = events[-1]["response"]["output"]
    assert [json.loads(item["arguments"]) for item in output] == arguments
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert "".join(event.get("delta", "") for event in own) == item["arguments"]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}


@pytest.mark.parametrize("names", [("where",), ("where", "when")])
def test_each_call_says_for_itself_whether_it_is_whole(names: tuple[str, ...]) -> None:
    """The same in a stream, which has told of the first before the others are known."""
    functions = Functions(names, is_named=False)
    whole = '{"place": 1}' if len(names) == 1 else '{"name": "where", "arguments": {"place": 1}}'
    pages = [(whole[:-2], FinishReason.LENGTH), (whole, FinishReason.STOP), (whole[:-3], FinishReason.LENGTH)]
    told = form(is_called=True)
    stream = told_calls(told, functions, [text for text, _ in pages])
    written = Written("", [Caption(text, 1, reason) for text, reason in pages], functions=functions)
    events = numbered(stream + told.end(written, [], {}))
    output = events[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["incomplete", "completed", "incomplete"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    assert events[-1]["type"] == "response.incomplete"


def test_a_call_that_a_stop_string_cut_is_no_whole_one() -> None:
    functions = Functions(("where",), is_named=True)
    cut = Caption('{"place": "at', 3, FinishReason.STOP, stop_string="sea")
    told = form(is_called=True).whole([Written("", [cut], functions=functions)])
    assert [item["status"] for item in told["output"]] == ["incomplete"]
    none = Written("", [Caption("", 0, FinishReason.STOP)], functions=functions)
    events = numbered((called := form(is_called=True)).begin({}) + called.end(none, [], {}))
    assert events[-1]["response"]["output"] == [] and events[-1]["type"] == "response.completed"


@pytest.mark.parametrize("name", REPEATED)
def test_a_field_that_is_null_is_answered_as_one_left_out(name: str) -> None:
    """As a batch's answer has it, for which no null is kept."""
    completion, cut = Completion("chatcmpl-7", "m", 1), Written("a", [Caption("a", 1, FinishReason.LENGTH)])
    null, none = (ResponseForm(completion, said, "7", is_called=False).whole([cut]) for said in ({name: None}, {}))
    assert null == none


def test_nothing_comes_before_the_response_is_created() -> None:
    """OpenAI's client fails at what does: a stream that is traced says how the prompt goes before there is text."""
    told = form()
    traced = told.aside({"stage": "decoding"}) + told.begin({}) + told.aside({"stage": "prefilled"})
    kinds = [event["type"] for event in numbered(traced)]
    assert kinds[:3] == ["response.created", "response.in_progress", "slipstream.figures"]
    assert kinds.count("response.created") == 1 and kinds[-1] == "slipstream.figures"


# -- through the stack ------------------------------------------------------------------------------------------------


class Place(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    place: Literal["at sea", "on land"]


def given_of(served: Served, **fields: Any) -> dict[str, Any]:
    part = {"type": "input_file", "filename": "0.mp4", "file_data": data_url(served.clips[0])}
    extra = {"slipstream": {"num_frames": NUM_FRAMES}}
    return {"model": served.model, "input": [user(part)], "max_output_tokens": 24, "extra_body": extra} | fields


@pytest.mark.asyncio(loop_scope="session")
async def test_the_text_is_that_of_a_chat(served: Served) -> None:
    """Whole, in a stream, and when it is asked about again; by OpenAI's own client."""
    chat = await served.client.chat.completions.create(
        model=served.model,
        messages=asked(data_url(served.clips[0])),
        max_completion_tokens=24,
        extra_body={"slipstream": {"num_frames": NUM_FRAMES}},
    )
    text = chat.choices[0].message.content
    answer: Any = await served.client.responses.create(
        **given_of(served, include=["message.output_text.logprobs"], top_logprobs=1)
    )
    assert answer.output_text == text and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (chat.usage.prompt_tokens, 24)
    told = answer.output[0].content[0].logprobs
    assert len(told) == 24 and [one.token for one in told] == [one.top_logprobs[0].token for one in told]
    stream = await served.client.responses.create(**given_of(served), stream=True)
    events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert events[0].type == "response.created" and events[-1].response.output_text == text
    more = [*given_of(served)["input"], *answer.output, {"role": "user", "content": "And then?"}]
    again: Any = await served.client.responses.create(**given_of(served, input=more))
    assert again.usage.input_tokens_details.cached_tokens > again.usage.input_tokens / 2


@pytest.mark.asyncio(loop_scope="session")
async def test_objects_come_as_texts_and_as_calls(served: Served) -> None:
    parsed: Any = await served.client.responses.parse(**given_of(served, text_format=Place, max_output_tokens=400))
    assert isinstance(parsed.output_parsed, Place) and parsed.status == "completed"
    tools = [openai.pydantic_function_tool(Place)["function"] | {"type": "function"}]
    given = given_of(served, tools=tools, tool_choice="required", max_output_tokens=400)
    called: Any = await served.client.responses.create(**given)
    (call,) = called.output
    assert (call.type, call.name, call.status) == ("function_call", "Place", "completed")
    assert Place.model_validate_json(call.arguments)
    async with served.client.responses.stream(**given) as stream:
        final = await stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "Call it again."}
    again: Any = await served.client.responses.create(**given | {"input": [*given["input"], call, told]})
    assert Place.model_validate_json(again.output[0].arguments)


@pytest.mark.asyncio(loop_scope="session")
async def test_what_is_wrong_is_told_as_an_error(served: Served) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await served.client.responses.create(**given_of(served, max_output_tokens=10**6))
    assert refused.value.param == "max_output_tokens" and "max_output_tokens" in refused.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        await served.client.responses.create(**given_of(served, model="another"))
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve("resp_1")
