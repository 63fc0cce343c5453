"""The body of a request to `/v1/messages`, as Anthropic's clients write it, read as the chat request that asks for the
same. What the two protocols have in common is read there; here are the names that differ, both ways."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import check_names, list_of_messages, object_at, strings_in, text_at
from slipstream.services.front.chat_request import ChatRequest, read_chat
from slipstream.services.front.json_body import Media
from slipstream.services.front.responses_request import check_idle

OF_CHATS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "stream_options": "stream",
}
"""Fields that a chat request alone has, and what says the same here."""
UNANSWERED = ("logprobs", "top_logprobs", "n")
"""Fields of a chat request whose answer this protocol has no place for."""
IDLE: Mapping[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "service_tier": ("auto", "standard_only"),
    "mcp_servers": ([],),
}
"""Fields that a chat request does not have, or has with other values, and the values that ask for nothing."""
OWN = {"messages", "system", "stop_sequences", "tools", "tool_choice", "output_config", *IDLE}
"""Fields that are read here; all others are called as in a chat request."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""How a function is chosen, here and there."""
KEPT = "cache_control"
"""How a block, or the whole request, is to be kept."""
UNUSED = {KEPT, "citations"}
"""What a block says of how it is kept or quoted, which changes no answer: prefixes are found again by themselves, and
nothing is quoted."""
SOURCES = {"base64": "data", "url": "url", "file": "file_id"}
"""Kinds of a medium's source, and where each has what it is."""
_IN_FILES = {"data": "file_data", "url": "file_url", "file_id": "file_id"}
BARE_MEDIA = re.compile(rb'"source"\s*:\s*\{[^{}\[\]]*"data"\s*:\s*"$')
"""Before a string that is media in base64 without the head of a `data:` URL."""


class SentNames:
    """Which fields of the request the fields of the chat request were made of."""

    def __init__(self) -> None:
        self._ours = {
            "response_format.json_schema": "output_config.format",
            "response_format": "output_config.format",
            "tool_choice.function": "tool_choice",
        }

    def add(self, ours: Mapping[str, str]) -> None:
        """Paths of this request, by those of the chat request that was made of it."""
        self._ours |= ours

    def told(self, error: ApiError) -> ApiError:
        """The same error about the fields that were sent."""
        said = self._renamed(str(error))
        for theirs, ours in _KINDS_SAID:
            said = said.replace(theirs, ours)
        error.args = (said,)
        error.param = None if error.param is None else self._renamed(error.param)
        return error

    def _renamed(self, text: str) -> str:
        return _PATH.sub(lambda found: self._sent(found[0]), re.sub(r"^stop\b", "stop_sequences", text))

    def _sent(self, path: str) -> str:
        """By the longest beginning that is known: a body may have made a hundred thousand paths."""
        end = len(path)
        while end > 0 and path[:end] not in self._ours:
            end = max(path.rfind(".", 0, end), path.rfind("[", 0, end))
        return self._ours[path[:end]] + path[end:] if end > 0 else path


_PATH = re.compile(r"(?<![\w.])[a-z_]+(?:\[\d+\]|\.\w+)*")
_KINDS_SAID = (
    ('must be "required", name a function, or be "none"', "must be of type any, tool or none"),
    ("one of text, video_url, video, image_url, file", "one of text, image, document, video"),
    ("a part `video_url`, `video`, `image_url` or `file`", "a block `image`, `document` or `video`"),
)
"""What a chat request calls kinds of choices and of parts, and what they are called here."""


def read_message(body: Any, media: Mapping[str, Media], names: SentNames) -> ChatRequest:
    """The chat request that asks for the same, of whose fields `names` is told. Raises `ApiError`, of which
    `SentNames.told` makes one about the fields of this request, where it is none yet."""
    said = object_at(body, "the body").items()
    fields = {name: value for name, value in said if value is not None and name != KEPT}
    for name, ours in OF_CHATS.items():
        if name in fields:
            raise ApiError(f"{ours} says this here; fields of chat completions are not read", param=ours)
    for name in UNANSWERED:
        if name in fields:
            why = "an answer of this protocol has no place for it; ask /v1/chat/completions"
            raise ApiError(f"{name} is not supported here: {why}", param=name, code="unsupported_parameter")
    for name, idle in IDLE.items():
        check_idle(name, fields.get(name), idle)
    chat = {name: value for name, value in fields.items() if name not in OWN}
    chat |= {"stop": fields.get("stop_sequences"), "response_format": _format(fields.get("output_config"))}
    if "thinking" in fields:  # of which `IDLE` lets "disabled" through
        chat["reasoning_effort"] = "none"
        names.add({"reasoning_effort": "thinking"})
    if fields.get("stream") is True:
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    messages, tools = _Messages(media), _Tools()
    chat["messages"] = messages.read(fields.get("messages"), fields.get("system"))
    chat |= {"tools": tools.read(fields.get("tools")), "tool_choice": _choice(fields.get("tool_choice"))}
    names.add(messages.names | tools.names)
    return read_chat(chat, media, len(chat["messages"]))  # what the system says is none of them, nor what tools return


# -- messages ---------------------------------------------------------------------------------------------------------


class _Messages:
    """Those of a chat request, where what a function returned is a message of its own."""

    def __init__(self, media: Mapping[str, Media]) -> None:
        self.names: dict[str, str] = {}
        """Of what the messages were made: paths by paths."""
        self._media = media
        self._chat: list[dict[str, Any]] = []

    def read(self, said: Any, system: Any) -> list[dict[str, Any]]:
        """What the system says comes last, as it is no turn of anybody's."""
        for index, message in enumerate(list_of_messages(said)):
            self._read_message(dict(object_at(message, f"messages[{index}]")), f"messages[{index}]")
        if system is not None:
            content = system if isinstance(system, str) else [_text(block) for block in _list(system, "system")]
            self._add({"role": "system", "content": content}, {".content": "system"})
        return self._chat

    def _read_message(self, message: dict[str, Any], param: str) -> None:
        check_names(message, {"role", "content", "name"}, param)
        content = message.pop("content", None)
        if not isinstance(content, list):
            self._add(message | {"content": content}, {"": param})
            return
        run: list[tuple[str, dict[str, Any]]] = []
        for index, block in enumerate(content):
            where = f"{param}.content[{index}]"
            fields = {name: value for name, value in object_at(block, where).items() if name not in UNUSED}
            if fields.get("type") != "tool_result":
                run.append((where, fields))
                continue
            if run:
                self._add_blocks(message, run, param)
                run = []
            self._add_result(fields, where)
        if run or not content:
            self._add_blocks(message, run, param)

    def _add_blocks(self, message: Mapping[str, Any], run: Sequence[tuple[str, dict[str, Any]]], param: str) -> None:
        """Text and media, or text and calls of functions; each block by its path."""
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        names = {"": param}
        for where, block in run:
            if block.get("type") == "tool_use":
                names.setdefault(".tool_calls", where)
                function = f".tool_calls[{len(calls)}].function"
                names |= {f"{function}.name": f"{where}.name", f"{function}.arguments": f"{where}.input"}
                calls.append({"function": {"name": block.get("name"), "arguments": self._arguments(block, where)}})
            else:
                part, sources = _part(block, where)
                place = f".content[{len(parts)}]"
                names |= {place: where} | {place + theirs: where + ours for theirs, ours in sources.items()}
                parts.append(part)
        more = {"tool_calls": calls} if calls else {}
        self._add({**message, "content": parts or None if calls else parts, **more}, names)

    def _arguments(self, block: Mapping[str, Any], where: str) -> str:
        check_names(block, {"type", "id", "name", "input", "caller"}, where)
        said = object_at(block.get("input"), f"{where}.input")
        if any(text in self._media for text in strings_in(said)):
            raise ApiError(f"{where}.input holds base64, which media alone may be", param=f"{where}.input")
        return json.dumps(said, ensure_ascii=False)

    def _add_result(self, block: Mapping[str, Any], where: str) -> None:
        """Of a call that failed, its text says so."""
        check_names(block, {"type", "tool_use_id", "content", "is_error"}, where)
        content = block.get("content")
        told = [_text(inner) for inner in content] if isinstance(content, list) else content
        told = "" if told is None else told  # it returned nothing
        names = {"": where, ".role": f"{where}.type"}
        self._add({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told}, names)

    def _add(self, message: dict[str, Any], names: Mapping[str, str]) -> None:
        place = f"messages[{len(self._chat)}]"
        self._chat.append(message)
        self.names |= {place + theirs: ours for theirs, ours in names.items()}


def _part(block: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A block as a part of a chat's message, and which paths below the part are which below the block. What is none of
    this protocol is left as it is: parts of a chat may stand here, too."""
    kind = block.get("type")
    if kind not in ("image", "document") and not (kind == "video" and "source" in block):
        return dict(block), {}
    check_names(block, {"type", "source"}, where)
    source = object_at(block.get("source"), f"{where}.source")
    key = SOURCES.get(str(source.get("type")))
    if key is None:
        param = f"{where}.source.type"
        raise ApiError(f"{param} must be one of {', '.join(SOURCES)}", param=param, code="unsupported_value")
    check_names(source, {"type", "media_type", key}, f"{where}.source")
    text_at(source.get(key), f"{where}.source.{key}")
    if not isinstance(source.get("media_type"), str | None):
        raise ApiError(f"{where}.source.media_type must be text", param=f"{where}.source.media_type")
    if kind == "document" or key == "file_id":
        name = _IN_FILES[key]
        sources = {f".file.{name}": f".source.{key}", ".file": f".source.{key}"}
        return {"type": "file", "file": {name: source.get(key)}}, sources
    name = f"{kind}_url"
    return {"type": name, name: {"url": source.get(key)}}, {f".{name}.url": f".source.{key}", f".{name}": ".source"}


def _text(block: Any) -> Any:
    """A block of text; what is none is left for the chat request to refuse."""
    return {name: value for name, value in block.items() if name not in UNUSED} if isinstance(block, dict) else block


# -- what is asked ----------------------------------------------------------------------------------------------------


def _format(said: Any) -> dict[str, Any] | None:
    if said is None:
        return None
    config = object_at(said, "output_config")
    check_names(config, {"format"}, "output_config")
    if config.get("format") is None:
        return None
    form = object_at(config["format"], "output_config.format")
    check_names(form, {"type", "schema"}, "output_config.format")
    if form.get("type") != "json_schema":
        param = "output_config.format.type"
        raise ApiError(f'{param} must be "json_schema"', param=param, code="unsupported_value")
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


class _Tools:
    """Functions, which have name and schema in an object of their own in a chat."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """Of what they were made: paths by paths."""

    def read(self, said: Any) -> list[Any] | None:
        """None: there are none."""
        if said is None:
            return None
        return [self._read_tool(dict(object_at(tool, f"tools[{n}]")), n) for n, tool in enumerate(_list(said, "tools"))]

    def _read_tool(self, function: dict[str, Any], index: int) -> dict[str, Any]:
        where, theirs = f"tools[{index}]", f"tools[{index}].function"
        if function.pop("type", None) not in (None, "custom"):
            what = f'{where}.type must be "custom": this server runs no tools'
            raise ApiError(what, param=f"{where}.type", code="unsupported_value")
        function.pop(KEPT, None)
        check_names(function, {"name", "description", "input_schema", "strict"}, where)
        function["parameters"] = function.pop("input_schema", None)
        self.names |= {theirs: where, f"{theirs}.parameters": f"{where}.input_schema"}
        return {"type": "function", "function": function}


def _choice(said: Any) -> Any:
    """Whether calls are made in parallel says nothing: an answer has one."""
    if said is None:
        return None
    choice = object_at(said, "tool_choice")
    check_names(choice, {"type", "name", "disable_parallel_tool_use"}, "tool_choice")
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        raise ApiError("tool_choice.type must be any, tool or none", param="tool_choice.type")
    return CHOICES[kind]


def _list(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        raise ApiError(f"{param} must be a list", param=param)
    return value
