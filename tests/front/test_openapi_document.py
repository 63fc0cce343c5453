"""The document is that of the table, and is one."""

import json
import re

from slipstream.services.front.chat_request import DOCUMENT_FIELDS
from slipstream.services.front.openapi import chat_schema
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
    own = chat_schema()["properties"]["slipstream"]["properties"]
    message = chat_schema()["properties"]["messages"]["items"]["properties"]
    assert message["role"]["enum"] == ["user", "assistant", "system", "developer", "tool"]
    assert own.keys() >= DOCUMENT_FIELDS.keys()
    assert own["stage"] == {"enum": ["page", "region+page"]} and own["ocr"] == {"enum": ["always", "paying", "never"]}


def test_every_failure_has_a_form() -> None:
    for methods in DOCUMENT["paths"].values():
        for told in methods.values():
            assert {"200", "400", "404", "405"} <= set(told["responses"])
            assert not {"500", "501", "502"} & set(told["responses"])
