"""What the text is to be, as OpenAI's clients and vLLM's say it: `response_format`, `structured_outputs`, and vLLM's
older `guided_*`. All become one of three caption options."""

from collections.abc import Mapping
from typing import Any

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_messages import Asked, check_names, object_at

ANY_OBJECT = {"type": "object"}
OPTION_OF: Mapping[str, str] = {"json": "json_schema", "regex": "regex", "choice": "choice"}
"""By vLLM's names for them."""
IDLE_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
"""Of vLLM's `structured_outputs`, which a program that spells out all of its fields has as false."""
FORMAT_FIELDS = ("response_format", "structured_outputs", *(f"guided_{name}" for name in OPTION_OF))


def read_format(fields: Mapping[str, Any], asked: Asked) -> None:
    """Gives the options that the request's fields stand for. Raises `ApiError`."""
    if "response_format" in fields:
        _read_response_format(object_at(fields["response_format"], "response_format"), asked)
    if "structured_outputs" in fields:
        _read_structured_outputs(object_at(fields["structured_outputs"], "structured_outputs"), asked)
    for name, option in OPTION_OF.items():
        _give(option, fields.get(f"guided_{name}"), f"guided_{name}", asked)


def _read_response_format(said: Mapping[str, Any], asked: Asked) -> None:
    kind = said.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise ApiError(
            "response_format.type must be text, json_object or json_schema",
            param="response_format.type",
            code="unsupported_value",
        )
    check_names(said, {"type", "json_schema"} if kind == "json_schema" else {"type"}, "response_format")
    if kind == "json_object":
        asked.give("json_schema", ANY_OBJECT, "response_format")
    elif kind == "json_schema":
        where = "response_format.json_schema"
        named = object_at(said.get("json_schema"), where)
        check_names(named, {"name", "description", "schema", "strict"}, where)
        asked.give("json_schema", object_at(named.get("schema"), f"{where}.schema"), f"{where}.schema")


def _read_structured_outputs(said: Mapping[str, Any], asked: Asked) -> None:
    said = {name: value for name, value in said.items() if not (name in IDLE_SWITCHES and value is False)}
    check_names(said, {*OPTION_OF, "json_object"}, "structured_outputs")
    is_any_object = said.get("json_object")
    if not isinstance(is_any_object, bool | None):
        param = "structured_outputs.json_object"
        raise ApiError(f"{param} must be true or false", param=param)
    if is_any_object:
        asked.give("json_schema", ANY_OBJECT, "structured_outputs.json_object")
    for name, option in OPTION_OF.items():
        _give(option, said.get(name), f"structured_outputs.{name}", asked)


def _give(option: str, value: Any, param: str, asked: Asked) -> None:
    """What is empty would ask for free text, which is not what the field says."""
    if value in ("", []):
        raise ApiError(f"{param} is empty; leave it out for free text", param=param)
    asked.give(option, value, param)
