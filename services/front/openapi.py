"""`/openapi.json`: the table of endpoints, told in OpenAPI's form. A test holds every answer's status to it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream import __version__
from slipstream.documents.reading import OCR_WHEN, STAGES
from slipstream.documents.surfaces import SURFACES
from slipstream.option_specs import OptionSpec
from slipstream.options import OPTIONS
from slipstream.services.front.answer_format import IDLE_SWITCHES, OPTION_OF
from slipstream.services.front.anthropic_request import IDLE as MESSAGE_IDLE
from slipstream.services.front.anthropic_request import KEPT, UNANSWERED
from slipstream.services.front.anthropic_request import OF_CHATS as NOT_OF_MESSAGES
from slipstream.services.front.batch_forms import ENDPOINTS as BATCH_ENDPOINTS
from slipstream.services.front.chat_messages import MAX_MESSAGES, ROLES
from slipstream.services.front.chat_request import (
    DOCUMENT_FIELDS,
    MAX_CHOICES,
    METADATA,
    NEUTRAL,
    OWN_NAMES,
    SAMPLING,
    TOLERATED,
)
from slipstream.services.front.endpoints import API_KEY, Endpoint, Schema
from slipstream.services.front.function_calls import CHOICES, MAX_FUNCTIONS, NAME
from slipstream.services.front.responses_request import IDLE, INCLUDED, OF_CHATS

GUARDED = (400, 401, 403, 404, 405, 408, 409, 413, 415, 429, 503, 504)
OPEN = (400, 404, 405)
REASONS = {
    400: "The request cannot be honoured; `param` names the field.",
    401: "No token, or none that is known.",
    403: "Who calls is known, and may not.",
    404: "There is no such thing, or it is another owner's.",
    405: "There is no such method here.",
    408: "The body came too slowly.",
    409: "It is not in a state for that.",
    413: "More than is taken.",
    415: "Another type of content than is taken, or a compressed body.",
    429: "No room now; `retry-after` says when.",
    503: "What it needs is not there now; `retry-after` says when.",
    504: "It took longer than this server serves one request.",
}
_TEXT = {"type": "string"}
_NULL = {"type": "null"}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def kept(kind: str, *required: str) -> Schema:
    """The schema of one thing that has an id."""
    names = ["id", "object", *required]
    return {"type": "object", "required": names, "properties": {"id": _TEXT, "object": {"const": kind}}}


def list_schema(item: Schema) -> Schema:
    """The schema of a list."""
    properties = {"object": {"const": "list"}, "data": {"type": "array", "items": item}}
    return {"type": "object", "required": ["object", "data"], "properties": properties}


MODEL = kept("model", "created", "owned_by")
FILE = kept("file", "bytes", "created_at", "filename", "purpose")
BATCH = kept("batch", "endpoint", "status", "input_file_id", "created_at", "request_counts")
COMPLETION = kept("chat.completion", "created", "model", "choices", "usage")
RESPONSE = kept("response", "created_at", "model", "status", "output", "usage")
MESSAGE: Schema = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"],
    "properties": {"id": _TEXT, "type": {"const": "message"}, "content": {"type": "array"}},
}
COUNT: Schema = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
}
LIMIT = {"type": "integer", "minimum": 1, "maximum": 100}
ORDER = {"enum": ["asc", "desc"]}
UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch", "user_data", "vision"]},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "additionalProperties": False,
}
NEW_BATCH = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": _TEXT,
        "endpoint": {"enum": [*BATCH_ENDPOINTS]},
        "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,5}[smhd]$"},
        "metadata": {"anyOf": [METADATA, _NULL]},
        "output_expires_after": {"type": ["object", "null"]},
    },
    "additionalProperties": _NULL,
}


def option_schema(spec: OptionSpec) -> Schema:
    """Of one row of the table of caption options."""
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean"}
    schema: dict[str, Any] = {"type": kinds[spec.kind]}
    if spec.choices:
        schema["enum"] = list(spec.choices)
    if spec.low is not None:
        schema["minimum"] = spec.low
    if spec.high is not None:
        schema["maximum"] = spec.high
    described = {"description": spec.description}
    return {"type": "array", "items": schema, **described} if spec.repeated else schema | described


def _or_null(schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """Fields that may be null, which asks for nothing."""
    return {name: {"anyOf": [schema, _NULL]} for name, schema in schemas.items()}


def _object(schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """With these fields alone."""
    return {"type": "object", "properties": _or_null(schemas), "additionalProperties": _NULL}


_OF_DOCUMENTS = {"surface": SURFACES, "stage": STAGES, "ocr": OCR_WHEN}
"""Options of documents with a choice."""


_STRUCTURES: Mapping[str, Any] = {
    "json": {"type": ["object", "string"], "minLength": 1},
    "regex": {"type": "string", "minLength": 1},
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    "json_object": {"type": "boolean"},
    **{name: {"const": False} for name in IDLE_SWITCHES},
}
_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "required": ["schema"],
            "properties": {"schema": {"type": "object"}},
        },
    },
}
_FUNCTION = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "parameters": {"type": ["object", "null"]},
            },
        },
    },
}


def chat_schema() -> Schema:
    """Of a chat request."""
    by_name = {spec.name: option_schema(spec) for spec in OPTIONS}
    own = {name: schema for name, schema in by_name.items() if name not in OWN_NAMES}
    kinds = {str: "string", int: "integer", bool: "boolean"}
    own |= {name: {"type": kinds[kind]} for name, kind in DOCUMENT_FIELDS.items()}
    own |= {name: {"enum": list(known)} for name, known in _OF_DOCUMENTS.items()}
    part = {"type": "object", "required": ["type"], "properties": {"type": {"enum": _PARTS}}}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": [*ROLES]},
            "name": {"type": ["string", "null"]},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": part}, _NULL]},
        },
    }
    limit = by_name["max_new_tokens"]
    fields: dict[str, Schema] = {
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "stream": {"type": "boolean"},
        "stream_options": {"type": "object"},
        "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}]},
        "max_tokens": limit,
        "max_completion_tokens": limit,
        "min_tokens": by_name["min_new_tokens"],
        "ignore_eos": {"type": "boolean"},
        "prediction": {"type": "object", "required": ["type", "content"]},
        "media_io_kwargs": {"type": "object"},
        "mm_processor_kwargs": {"type": "object"},
        "chat_template_kwargs": _object({"enable_thinking": {"type": "boolean"}}),
        "reasoning_effort": {"const": "none"},
        "response_format": _FORMAT,
        "structured_outputs": _object(_STRUCTURES),
        "tools": {"type": "array", "items": _FUNCTION, "maxItems": MAX_FUNCTIONS},
        "tool_choice": {"anyOf": [{"enum": [*CHOICES]}, _FUNCTION]},
        "logprobs": {"type": "boolean"},
        "top_logprobs": by_name["top_logprobs"],
        "slipstream": _object(own),
    }
    fields |= {f"guided_{name}": _STRUCTURES[name] for name in OPTION_OF}
    fields |= {name: by_name[name] for name in SAMPLING}
    fields["top_k"] = {**by_name["top_k"], "minimum": -1}
    messages = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": message}
    return {
        "type": "object",
        "required": ["model", "messages"],
        "properties": {
            "model": _TEXT,
            "messages": messages,
            **_or_null(fields),
            **{name: {"enum": [*values, None]} for name, values in NEUTRAL.items()},
            **{name: {} for name in sorted(TOLERATED)},
        },
        "additionalProperties": _NULL,
    }


def response_schema() -> Schema:
    """Of a request to `/v1/responses`: what is not said otherwise is as in a chat request."""
    chat = chat_schema()
    others = {name: schema for name, schema in chat["properties"].items() if name not in OF_CHATS}
    own: dict[str, Schema] = {
        "instructions": _TEXT,
        "metadata": METADATA,
        "user": {"type": "string"},
        "text": {"type": "object"},
        "include": {"type": "array", "items": {"enum": [*INCLUDED]}},
        "tools": {"type": "array", "items": {"type": "object"}, "maxItems": MAX_FUNCTIONS},
        "tool_choice": {"anyOf": [{"enum": [*CHOICES]}, {"type": "object"}]},
    }
    properties = {
        **others,
        **_or_null(own),
        "input": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}, "maxItems": MAX_MESSAGES}]},
        "max_output_tokens": chat["properties"]["max_tokens"],
        "previous_response_id": _NULL,
        **{name: _idle(values) for name, values in IDLE.items()},
    }
    return {"type": "object", "required": ["model", "input"], "properties": properties} | {
        "additionalProperties": _NULL
    }


def message_schema() -> Schema:
    """Of a request to `/v1/messages`, likewise."""
    chat = chat_schema()
    left_out = (*NOT_OF_MESSAGES, *UNANSWERED, "messages")
    others = {name: schema for name, schema in chat["properties"].items() if name not in left_out}
    blocks: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]}
    own: dict[str, Schema] = {
        "system": blocks,
        "output_config": {"type": "object"},
        "tools": {"type": "array", "items": {"type": "object"}, "maxItems": MAX_FUNCTIONS},
        "tool_choice": {"type": "object", "required": ["type"]},
    }
    message = {"type": "object", "required": ["role"], "properties": {"role": {"enum": [*ROLES]}}}
    properties = {
        **others,
        **_or_null(own),
        "stop_sequences": chat["properties"]["stop"],
        "messages": {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": message},
        **{name: _idle(values) for name, values in MESSAGE_IDLE.items()},
        KEPT: {},
    }
    return {"type": "object", "required": ["model", "messages"], "properties": properties} | {
        "additionalProperties": _NULL
    }


def _idle(values: Sequence[Any]) -> Schema:
    """One of these values, or null; of those that are objects a member may be null, too."""
    members = {name: inner for value in values if isinstance(value, dict) for name, inner in value.items()}
    if not members:
        return {"enum": [*values, None]}
    told: dict[str, Schema] = {name: {"const": inner} for name, inner in members.items()}
    return {"anyOf": [_object(told), _NULL]}


_PARTS = ["text", "video_url", "video", "image_url", "file"]


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The whole."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = re.sub(r":\w+}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": API_KEY},
            },
        },
        "security": [{}, {"token": []}, {"key": []}],
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    schemas = {kind: {"schema": endpoint.answer if kind == "application/json" else _TEXT} for kind in endpoint.content}
    statuses = {*(OPEN if endpoint.is_open else GUARDED), *endpoint.statuses}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": schemas}}
    responses |= {str(status): {"description": REASONS[status], "content": error} for status in sorted(statuses)}
    if endpoint.is_open and 503 in endpoint.statuses:
        responses["503"]["content"] = schemas  # it tells what is missing
    names = re.findall(r"{(\w+)}", path)
    parameters = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()]
    told: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": getattr(endpoint.serve, "__name__", "serve"),
        "parameters": parameters,
        "responses": responses,
    }
    if endpoint.body:
        content = {kind: {"schema": schema} for kind, schema in endpoint.body.items()}
        told["requestBody"] = {"required": True, "content": content}
    return told
