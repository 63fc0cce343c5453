"""The one table of endpoints; the application and the OpenAPI document are made from it."""

from slipstream.services.front.anthropic_messages import count_tokens, create_message, error_body
from slipstream.services.front.archive_calls import (
    cancel_archive_batch,
    get_archive_batch,
    list_archive_batches,
    list_archive_errors,
    list_archive_gateways,
    list_archive_jobs,
    list_archive_parts,
    retry_archive_batch,
)
from slipstream.services.front.batch_calls import cancel_batch, create_batch, get_batch, list_batches
from slipstream.services.front.call import EVENTS_TYPE, JSON_TYPE, Call
from slipstream.services.front.chat import create_chat, get_model, list_models
from slipstream.services.front.endpoints import Endpoint
from slipstream.services.front.files import create_file, delete_file, get_content, get_file, list_files
from slipstream.services.front.openapi import (
    BATCH,
    COMPLETION,
    COUNT,
    FILE,
    LIMIT,
    MESSAGE,
    MODEL,
    NEW_BATCH,
    ORDER,
    RESPONSE,
    UPLOAD,
    chat_schema,
    document,
    list_schema,
    message_schema,
    response_schema,
)
from slipstream.services.front.operations import TEXT_TYPE, get_health, get_metrics, get_ready, get_version
from slipstream.services.front.responses import create_response
from slipstream.services.front.web_files import TYPES, get_page, get_web_file

BYTES = "application/octet-stream"
_AFTER = {"type": "string"}
WEB_TYPES = tuple(kind.partition(";")[0] for kind in TYPES.values())


async def get_openapi(call: Call) -> None:
    """GET /openapi.json."""
    await call.answer(DOCUMENT)


ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models, "What is served.", list_schema(MODEL)),
    Endpoint("GET", "/v1/models/{model:path}", get_model, "One model.", MODEL),
    Endpoint(
        "POST", "/v1/chat/completions", create_chat, "Asks about one video, picture or document.", COMPLETION,
        {JSON_TYPE: chat_schema()}, content=(JSON_TYPE, EVENTS_TYPE),
    ),
    Endpoint(
        "POST", "/v1/responses", create_response, "The same, as OpenAI's newer protocol has it.", RESPONSE,
        {JSON_TYPE: response_schema()}, content=(JSON_TYPE, EVENTS_TYPE),
    ),
    Endpoint(
        "POST", "/v1/messages", create_message, "The same, as Anthropic's protocol has it.", MESSAGE,
        {JSON_TYPE: message_schema()}, query={"beta": {"type": "string"}}, content=(JSON_TYPE, EVENTS_TYPE),
        tell_error=error_body,
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", count_tokens, "How many tokens its prompt has.", COUNT,
        {JSON_TYPE: message_schema()}, query={"beta": {"type": "string"}}, tell_error=error_body,
    ),
    Endpoint(
        "POST", "/v1/files", create_file, "Uploads a file.", FILE, {"multipart/form-data": UPLOAD}
    ),
    Endpoint(
        "GET", "/v1/files", list_files, "The caller's files.", list_schema(FILE),
        query={"purpose": {"type": "string"}, "limit": LIMIT | {"maximum": 10_000}, "order": ORDER, "after": _AFTER},
    ),
    Endpoint("GET", "/v1/files/{file_id}", get_file, "One file.", FILE),
    Endpoint("GET", "/v1/files/{file_id}/content", get_content, "What a file holds.", content=(BYTES,)),
    Endpoint("DELETE", "/v1/files/{file_id}", delete_file, "Removes a file."),
    Endpoint("POST", "/v1/batches", create_batch, "Opens a batch.", BATCH, {JSON_TYPE: NEW_BATCH}),
    Endpoint(
        "GET", "/v1/batches", list_batches, "The caller's batches.", list_schema(BATCH),
        query={"limit": LIMIT, "after": _AFTER},
    ),
    Endpoint("GET", "/v1/batches/{batch_id}", get_batch, "One batch.", BATCH),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "Ends a batch.", BATCH),
    Endpoint("GET", "/archive/gateways", list_archive_gateways, "How each gateway stands."),
    Endpoint("GET", "/archive/batches", list_archive_batches, "The caller's batches in the archive."),
    Endpoint("GET", "/archive/batches/{batch}", get_archive_batch, "One of them."),
    Endpoint(
        "GET", "/archive/batches/{batch}/jobs", list_archive_jobs, "Its jobs, a page at a time.",
        query={"states": {"type": "string"}, "page": {"type": "string"}},
    ),
    Endpoint(
        "GET", "/archive/batches/{batch}/jobs/{job}/parts", list_archive_parts, "Pages or segments of a job.",
        query={"page": {"type": "string"}},
    ),
    Endpoint("GET", "/archive/batches/{batch}/errors", list_archive_errors, "What failed, by message."),
    Endpoint("POST", "/archive/batches/{batch}/cancel", cancel_archive_batch, "Ends it."),
    Endpoint(
        "POST", "/archive/batches/{batch}/retry", retry_archive_batch, "Runs again what was given up.",
        query={"failed": {"enum": ["true", "false"]}},
    ),
    Endpoint("GET", "/health", get_health, "The process answers.", is_open=True),
    Endpoint("GET", "/ready", get_ready, "It can do its work.", statuses=(503,), is_open=True),
    Endpoint("GET", "/metrics", get_metrics, "What it counts.", content=(TEXT_TYPE.partition(";")[0],), is_open=True),
    Endpoint("GET", "/version", get_version, "Its release.", is_open=True),
    Endpoint("GET", "/openapi.json", get_openapi, "This document.", is_open=True),
    Endpoint("GET", "/", get_page, "The page for people.", content=("text/html",), is_open=True),
    Endpoint("GET", "/web/{name}", get_web_file, "What the page is made of.", content=WEB_TYPES, is_open=True),
)  # fmt: skip
DOCUMENT = document(ENDPOINTS)
