"""The body of a request to `/v1/responses`, read as the chat request that asks for the same. What the two protocols
have in common is read there; here are the names that differ, both ways: errors name the field that was sent."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import MAX_MESSAGES, check_names, object_at, strings_in
from slipstream.services.front.chat_request import ChatRequest, read_chat, read_metadata
from slipstream.services.front.json_body import Media

RENAMED = {"max_output_tokens": "max_completion_tokens"}
"""Fields that a chat request has under another name."""
OF_CHATS = {
    "messages": "input",
    "response_format": "text.format",
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
"""Fields that a chat request alone has, and what says the same here."""
IDLE: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": "none"}),
}
"""Fields that a chat request does not have, or has with more values, and the values that ask for nothing."""
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""What may be asked for beside the text; of reasoning there is none."""
UNREAD = ("metadata", "user")
"""Said by clients about themselves, and answered."""
REPEATED = ("text", "tools", *UNREAD)
"""What the answer has as it was sent, also words in it that nobody reads."""
_TEXTS = ("input_text", "output_text")
_OF_CALL = {"type", "id", "call_id", "name", "arguments", "status", "namespace"}
_NAMES = (
    (re.compile(r"\bmessages\[(\d+)\]"), r"input[\1]"),
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"(?<=\])\.image_url\.(?:url|detail)"), ".image_url"),
    (re.compile(r"(?<=\])\.file\."), "."),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"(?<=\])\.function\."), "."),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\blogprobs: true"), f"include: {LOGPROBS}"),
    (re.compile(r"^logprobs\b"), "include"),
    (re.compile(r"`video_url`, `video`, `image_url` or `file`"), "`input_file`, `input_image` or `video_url`"),
    (re.compile(r"\btext, video_url, video, image_url, file\b"), "input_text, input_file, input_image, video_url"),
)
"""Paths of a chat request, and its kinds of parts, and what they are called here."""


def read_response(body: Any, media: Mapping[str, Media]) -> ChatRequest:
    """The chat request that asks for the same. Raises `ApiError`, as `sent_names` has it."""
    fields = {name: value for name, value in object_at(body, "the body").items() if value is not None}
    for name, ours in OF_CHATS.items():
        if name in fields:
            raise ApiError(f"{ours} says this here; fields of chat completions are not read", param=ours)
    if "previous_response_id" in fields:
        param = "previous_response_id"
        raise ApiError("answers are not kept: send what was said before in input", param=param, code="not_served")
    chat = {RENAMED.get(name, name): value for name, value in fields.items() if name not in (*IDLE, "input", "include")}
    for name, idle in IDLE.items():
        check_idle(name, fields.get(name), idle)
    if fields.get("reasoning"):  # `IDLE` lets no other effort through than "none"
        chat["reasoning_effort"] = fields["reasoning"].get("effort")
    instructions = chat.pop("instructions", None)
    chat["messages"] = _messages(fields.get("input"), instructions)
    chat |= _format(chat.pop("text", None)) | _included(fields.get("include"))
    if "tools" in chat:
        chat["tools"] = [_function(tool) for tool in chat["tools"]] if _is_list(chat["tools"]) else chat["tools"]
    if "tool_choice" in chat:
        chat["tool_choice"] = _function(chat["tool_choice"])
    try:
        asked = read_chat(chat, media, MAX_MESSAGES + 1)  # instructions are no item
    except ApiError as error:
        raise _renamed(error, _names_of(fields)) from error
    _check_repeated(fields, media)
    return _instructed(asked, chat["messages"]) if instructions else asked


def _check_repeated(fields: Mapping[str, Any], media: Mapping[str, Media]) -> None:
    """Raises `ApiError` for what an answer of this protocol cannot have."""
    read_metadata(fields.get("metadata"))
    if not isinstance(fields.get("user", ""), str):
        raise ApiError("user must be text", param="user")
    for name in REPEATED:
        if any(text in media for text in strings_in(fields.get(name))):
            raise ApiError(f"{name} holds a data: URL in base64, which media alone may be", param=name)


def sent_names(error: ApiError) -> ApiError:
    """The same about the fields that were sent."""
    return _renamed(error, _NAMES)


def _names_of(fields: Mapping[str, Any]) -> list[tuple[re.Pattern[str], str]]:
    """As `_NAMES`, of what has another place in each request."""
    items = fields["input"] if _is_list(fields["input"]) else [fields["input"]]
    names = [("verbosity", "text.verbosity"), (f"messages[{len(items)}].content", "instructions")]
    for index, item in enumerate(items):
        theirs, ours = f"messages[{index}]", f"input[{index}]"
        match item:
            case {"type": "function_call"}:
                names += [(f"{theirs}.role", f"{ours}.type"), (f"{theirs}.tool_calls[0].function", ours)]
            case {"type": "function_call_output"}:
                names += [(f"{theirs}.role", f"{ours}.type"), (f"{theirs}.content", f"{ours}.output")]
    return [(re.compile(rf"^{re.escape(path)}\b"), name) for path, name in names]


def _renamed(error: ApiError, names: Iterable[tuple[re.Pattern[str], str]]) -> ApiError:
    said, param = str(error), error.param
    for path, name in names:
        said = path.sub(name, said)
        param = None if param is None else path.sub(name, param)
    error.args, error.param = (said,), param
    return error


def check_idle(name: str, value: Any, idle: tuple[Any, ...]) -> None:
    if isinstance(value, dict):
        value = {inner: said for inner, said in value.items() if said is not None}
    if value is not None and not any(value == one and type(value) is type(one) for one in idle):
        raise ApiError(f"{name} cannot be honoured with this value; leave it out", param=name, code="unsupported_value")


# -- what was said ----------------------------------------------------------------------------------------------------


def _messages(said: Any, instructions: Any) -> Any:
    """An item of the input is a message, in its place; instructions come last, as they are no turn of anybody's."""
    if isinstance(said, str):
        messages: list[Any] = [{"role": "user", "content": said}]
    elif _is_list(said) and 0 < len(said) <= MAX_MESSAGES:
        messages = [_message(item, f"input[{index}]") for index, item in enumerate(said)]
    else:
        raise ApiError(f"input must be text or a list of 1 to {MAX_MESSAGES} items", param="input")
    if instructions is not None and not isinstance(instructions, str):
        raise ApiError("instructions must be text", param="instructions")
    return [*messages, {"role": "system", "content": instructions}] if instructions else messages


def _message(said: Any, param: str) -> dict[str, Any]:
    item = object_at(said, param)
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        parts = [_part(part) for part in content] if isinstance(content, list) else content
        more = {name: value for name, value in item.items() if name not in ("type", "id", "status", "phase", "content")}
        return more | {"content": parts}
    if kind == "function_call":
        check_names(item, _OF_CALL, param)
        called = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": called}]}
    if kind == "function_call_output":
        output = item.get("output")
        parts = [_part(part) for part in output] if isinstance(output, list) else output
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": parts}
    known = "message, function_call or function_call_output"
    raise ApiError(f"{param}.type must be {known}", param=f"{param}.type", code="unsupported_value")


def _instructed(asked: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """The same, with `instructions`, the last of the messages, named as what gave an option that they alone gave."""
    last = f"messages[{len(messages) - 1}].content"
    return replace(asked, params={name: "instructions" if by == last else by for name, by in asked.params.items()})


def _part(said: Any) -> Any:
    """A part of a message as a chat's; what is none is left for that to refuse."""
    if not isinstance(said, dict):
        return said
    part = {name: value for name, value in said.items() if value is not None}
    match part.pop("type", None):
        case kind if kind in _TEXTS:
            return {"type": "text"} | {name: value for name, value in part.items() if name not in _BESIDE_TEXT}
        case "input_image" if "file_id" not in part:
            return {"type": "image_url", "image_url": {"url": part.pop("image_url", None)} | part}
        case "input_image" | "input_file":
            part.pop("detail", None)
            return {"type": "file", "file": part}
        case kind:
            return {"type": kind} | part


_BESIDE_TEXT = ("annotations", "logprobs")


# -- what is asked ----------------------------------------------------------------------------------------------------


def _format(said: Any) -> dict[str, Any]:
    if said is None:
        return {}
    text = object_at(said, "text")
    check_names(text, {"format", "verbosity"}, "text")
    asked = {} if text.get("verbosity") is None else {"verbosity": text["verbosity"]}
    if text.get("format") is None:
        return asked
    form = dict(object_at(text["format"], "text.format"))
    if form.get("type") == "json_schema":
        form = {"type": form.pop("type"), "json_schema": form}
    return asked | {"response_format": form}


def _included(said: Any) -> dict[str, Any]:
    if said is None:
        return {}
    if not _is_list(said) or not all(name in INCLUDED for name in said):
        raise ApiError(f"include may have {' and '.join(INCLUDED)}", param="include", code="unsupported_value")
    return {"logprobs": True} if LOGPROBS in said else {}


def _function(said: Any) -> Any:
    """A function, or the choice of one, which has its name and schema in an object of its own in a chat."""
    if not isinstance(said, dict) or said.get("type") != "function":
        return said
    return {"type": "function", "function": {name: value for name, value in said.items() if name != "type"}}


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
