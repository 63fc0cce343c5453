"""What a chat request may say that the text is to be, as OpenAI's clients and vLLM's say it."""

import json
from typing import Any

import pytest

from tests.front.test_chat_requests import read, refused, request

SCHEMA = {"type": "object", "properties": {"caf\u00e9": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "description": None, "schema": SCHEMA},
                }
            },
            {"json_schema": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": None}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": {}, "grammar": None, "disable_fallback": False}}, {"json_schema": {}}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json_object": False, "regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ("a", "b")}),
    ],
)
def test_what_the_text_is_to_be(fields: dict[str, Any], options: dict[str, Any]) -> None:
    given = read(request(**fields)).options.given()
    assert given.pop("prompt")
    if "json_schema" in given:
        given["json_schema"] = json.loads(given["json_schema"])
    assert given == options


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": ""}, "guided_json"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex"),
        ({"slipstream": {"regex": "a"}}, "slipstream.regex"),
        ({"guided_json": {"enum": ["a", ["data:image/png;base64,AAAA"]]}}, "guided_json"),
        ({"guided_json": {"properties": {"data:image/png;base64,AAAA": {}}}}, "guided_json"),
        ({"structured_outputs": {"choice": ["a", "data:;base64,AAAA"]}}, "structured_outputs.choice"),
        ({"guided_regex": "data:;base64,[A-Z]+"}, "guided_regex"),
    ],
)
def test_the_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(request(**fields))
    assert (error.status, error.param) == (400, param)
