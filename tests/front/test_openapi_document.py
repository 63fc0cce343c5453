"""The document is that of the table, and is one."""

import json
import re
from typing import Any

import pytest

from slipstream.services.front.chat_request import DOCUMENT_FIELDS
from slipstream.services.front.openapi import NEW_BATCH, chat_schema, message_schema, response_schema
from slipstream.services.front.routes import DOCUMENT, ENDPOINTS


def test_every_endpoint_is_told_of() -> None:
    told = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert told == {(endpoint.method, re.sub(r":\w+}", "}", endpoint.path)) for endpoint in ENDPOINTS}


def test_it_is_plain_json_without_loose_ends() -> None:
    text = json.dumps(DOCUMENT)
    for reference in re.findall(r'"\$ref": "#/([^"]+)"', text):
        part = DOCUMENT
        for name in reference.split("/"):
            part = part[name]
        assert part
    operations = [method["operationId"] for methods in DOCUMENT["paths"].values() for method in methods.values()]
    assert len(set(operations)) == len(operations) == len(ENDPOINTS)


def test_what_may_be_said_of_documents_is_told() -> None:
    own = _not_null(chat_schema()["properties"]["slipstream"])["properties"]
    message = chat_schema()["properties"]["messages"]["items"]["properties"]
    assert message["role"]["enum"] == ["user", "assistant", "system", "developer", "tool"]
    assert own.keys() >= DOCUMENT_FIELDS.keys()
    assert _not_null(own["stage"]) == {"enum": ["page", "region+page"]}
    assert _not_null(own["ocr"]) == {"enum": ["always", "paying", "never"]}


@pytest.mark.parametrize("schema", [chat_schema(), response_schema(), message_schema(), NEW_BATCH])
def test_what_is_null_asks_for_nothing_here_too(schema: Any) -> None:
    """Who checks requests by the document refused what the front takes, as clients write it."""
    optional = {name: inner for name, inner in schema["properties"].items() if name not in schema["required"]}
    assert [name for name, inner in optional.items() if not _may_be_null(inner)] == []
    assert schema["additionalProperties"] == {"type": "null"}
    if "slipstream" in optional:
        own = _not_null(optional["slipstream"])["properties"]
        assert own and all(map(_may_be_null, own.values()))


def test_what_the_front_takes_is_told() -> None:
    chat, response = chat_schema()["properties"], response_schema()["properties"]
    assert _not_null(chat["top_k"])["minimum"] == -1
    assert chat["messages"]["items"]["required"] == ["role"], "an answer may be calls alone"
    assert _may_be_null(_not_null(response["reasoning"])["properties"]["effort"])
    message = message_schema()["properties"]
    assert message["cache_control"] == {}
    assert message["stop_sequences"] == chat["stop"], "one may stand without a list"
    assert DOCUMENT["components"]["securitySchemes"]["key"]["name"] == "x-api-key"
    assert {"key": []} in DOCUMENT["security"]


def _may_be_null(schema: Any) -> bool:
    is_told = "null" in schema.get("type", ()) or {"type": "null"} in schema.get("anyOf", ())
    return not schema or is_told or None in schema.get("enum", ())


def _not_null(schema: Any) -> Any:
    found, _ = schema["anyOf"]
    return found


def test_every_failure_has_a_form() -> None:
    for methods in DOCUMENT["paths"].values():
        for told in methods.values():
            assert {"200", "400", "404", "405"} <= set(told["responses"])
            assert not {"500", "501", "502"} & set(told["responses"])
