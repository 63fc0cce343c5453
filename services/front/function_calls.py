"""Functions that an answer must call (`tools`, `tool_choice`): the text is kept to the JSON of a call, and is told as
OpenAI tells a call. Which of them to call, if any, is not left to the model: none of ours is told of functions."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import Asked, check_names, object_at

MAX_FUNCTIONS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that has no `parameters`."""
NOTHING, REQUIRED = "none", "required"
CHOICES = (NOTHING, "auto", REQUIRED)
_DATA = {"const", "enum", "default", "examples"}
"""Keywords of a schema below which stands none."""
_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
"""Below which stand schemas by names that are no keywords."""
_HEAD = re.compile(r'\s*{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*')

# -- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Functions:
    """Those of which an answer calls one."""

    names: tuple[str, ...]
    is_named: bool
    """The request says which."""

    def call(self, text: str, is_whole: bool) -> tuple[str, str]:
        """The function that an answer's text calls, and its arguments, which are JSON; both empty where the text does
        not say yet. Of a text that is not whole they may lack an end, and never have too much."""
        if len(self.names) == 1:
            return self.names[0], text
        head = _HEAD.match(text)
        if head is None:
            return "", ""
        end = len(text)
        if not is_whole:
            end = len(text.rstrip(" \t\r\n}"))
        elif is_json(text):
            end = text.rindex("}")
        return head[1], text[head.end() : max(end, head.end())].rstrip()

    @property
    def finish_reason(self) -> str:
        """Of an answer that nothing cut: OpenAI's says "stop" where the request has named the function."""
        return "stop" if self.is_named else "tool_calls"


def read_functions(fields: Mapping[str, Any], asked: Asked) -> Functions | None:
    """Gives the schema that the text is kept to; None: nothing is to be called. Raises `ApiError`."""
    schemas, choice = _schemas(fields.get("tools") or []), fields.get("tool_choice")
    names = _chosen(choice, schemas)
    if not names:
        return None
    if len(names) == 1:
        index = list(schemas).index(names[0])
        asked.give("json_schema", schemas[names[0]], f"tools[{index}].function.parameters")
    else:
        asked.give("json_schema", _any_call(schemas), "tools")
    return Functions(names, is_named=choice != REQUIRED)


def _schemas(tools: Any) -> dict[str, Any]:
    """Of each function's arguments, by its name."""
    if not isinstance(tools, list) or len(tools) > MAX_FUNCTIONS:
        raise ApiError(f"tools must be a list of at most {MAX_FUNCTIONS} functions", param="tools")
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = _function(tool, where)
        check_names(function, {"name", "description", "parameters", "strict"}, f"{where}.function")
        name, parameters = _name(function, f"{where}.function.name"), function.get("parameters")
        if name in schemas:
            raise ApiError(f"{where}.function.name {name!r} occurs twice", param=f"{where}.function.name")
        schemas[name] = NO_ARGUMENTS
        if parameters is not None:
            schemas[name] = _arguments(parameters, f"{where}.function.parameters")
    return schemas


def _arguments(said: Any, param: str) -> dict[str, Any]:
    """The schema of arguments. They are an object, as by OpenAI's protocol, also where it does not say so: programs
    read them by their names."""
    schema = object_at(said, param)
    if schema.get("type", "object") != "object":
        raise ApiError(f'{param}.type must be "object"', param=f"{param}.type")
    return {"type": "object", **schema}


def _function(said: Any, param: str) -> Mapping[str, Any]:
    """Of an object `{"type": "function", "function": {...}}`."""
    said = object_at(said, param)
    if said.get("type") != "function":
        where = f"{param}.type"
        raise ApiError(f'{where} must be "function"', param=where, code="unsupported_value")
    check_names(said, {"type", "function"}, param)
    return object_at(said.get("function"), f"{param}.function")


def _name(function: Mapping[str, Any], param: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(f"{param} must be 1 to 64 letters of a to z, digits, _ and -", param=param)
    return name


def _chosen(choice: Any, schemas: Mapping[str, Any]) -> tuple[str, ...]:
    """The functions of which one is to be called; none: nothing is."""
    if isinstance(choice, dict):
        chosen = _function(choice, "tool_choice")
        check_names(chosen, {"name"}, "tool_choice.function")
        name = _name(chosen, "tool_choice.function.name")
        if name not in schemas:
            param = "tool_choice.function.name"
            raise ApiError(f"{param} {name!r} is not among tools", param=param)
        return (name,)
    if choice is not None and choice not in CHOICES:
        raise ApiError("tool_choice must be none, required, or name a function", param="tool_choice")
    if choice == REQUIRED:
        if not schemas:
            raise ApiError("tool_choice requires a call, and tools has no function", param="tool_choice")
        return tuple(schemas)
    if schemas and choice != NOTHING:
        why = "the model is not told of functions and cannot choose whether to call one"
        raise ApiError(
            f'tool_choice must be "required", name a function, or be "none": {why}',
            param="tool_choice",
            code="unsupported_value",
        )
    return ()


def _any_call(schemas: Mapping[str, Any]) -> dict[str, Any]:
    """A call as Hermes and Qwen write it, of any of the functions; a name begins it, which tells the rest."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    try:
        moved = {name: _moved(schema, f"#/$defs/{name}") for name, schema in schemas.items()}
    except RecursionError:
        raise ApiError("tools is nested too deeply", param="tools") from None
    return {"anyOf": calls, "$defs": moved}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stood by itself, for that place of another: what it refers to moves with it. One that has a name
    of its own (`$id`) refers to itself by that, wherever it stands."""
    if isinstance(schema, list):
        return [_moved(inner, place) for inner in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved: dict[str, Any] = {}
    for keyword, inner in schema.items():
        if keyword in _BY_NAME and isinstance(inner, dict):
            moved[keyword] = {name: _moved(one, place) for name, one in inner.items()}
        elif keyword == "$ref" and isinstance(inner, str) and (inner == "#" or inner.startswith("#/")):
            moved[keyword] = place + inner[1:]
        else:
            moved[keyword] = inner if keyword in _DATA else _moved(inner, place)
    return moved


def is_json(text: str) -> bool:
    """Whether it is whole."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


# -- what is answered -------------------------------------------------------------------------------------------------


def whole_calls(functions: Functions, texts: Sequence[str], completion_id: str) -> list[dict[str, Any]]:
    """The calls of an answer, one a page of a document whose text says which; of the form of `message.tool_calls`."""
    calls = [functions.call(text, is_whole=True) for text in texts if text]
    named = [(name, arguments) for name, arguments in calls if name]  # others were cut before that
    return [_call(index, completion_id, name, arguments) for index, (name, arguments) in enumerate(named)]


class StreamedCalls:
    """The calls of an answer while it is written, in pieces of the form of `delta`."""

    def __init__(self, functions: Functions, completion_id: str) -> None:
        self._functions, self._completion_id = functions, completion_id
        self._index = 0
        self._text = ""
        self._told: str | None = None
        """Of this call's arguments; None: nothing of it was told."""

    def add(self, text: str) -> list[dict[str, Any]]:
        """What can be told with this text."""
        self._text += text
        return self._deltas(is_whole=False)

    def end(self) -> list[dict[str, Any]]:
        """What is left of the call, which is whole; the next may begin."""
        deltas = self._deltas(is_whole=True)
        self._index += self._told is not None
        self._text, self._told = "", None
        return deltas

    def _deltas(self, is_whole: bool) -> list[dict[str, Any]]:
        name, arguments = self._functions.call(self._text, is_whole)
        if not self._text or not name:
            return []
        deltas = []
        if self._told is None:
            self._told = ""
            deltas.append({"index": self._index} | _call(self._index, self._completion_id, name, ""))
        if more := arguments[len(self._told) :]:
            self._told = arguments
            deltas.append({"index": self._index, "function": {"arguments": more}})
        return [{"tool_calls": [delta]} for delta in deltas]


def _call(index: int, completion_id: str, name: str, arguments: str) -> dict[str, Any]:
    called = {"name": name, "arguments": arguments}
    return {"id": f"call_{completion_id.removeprefix('chatcmpl-')}-{index}", "type": "function", "function": called}
