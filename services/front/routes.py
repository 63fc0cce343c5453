"""The one table of endpoints; the application and the OpenAPI document are made from it."""

from slipstream.services.front.app import Endpoint
from slipstream.services.front.batch_calls import cancel_batch, create_batch, get_batch, list_batches
from slipstream.services.front.chat import create_chat, get_model, list_models
from slipstream.services.front.files import create_file, delete_file, get_content, get_file, list_files
from slipstream.services.front.operations import get_health, get_metrics, get_ready, get_version

ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models),
    Endpoint("GET", "/v1/models/{model:path}", get_model),
    Endpoint("POST", "/v1/chat/completions", create_chat),
    Endpoint("POST", "/v1/files", create_file),
    Endpoint("GET", "/v1/files", list_files, frozenset({"purpose", "limit", "order", "after"})),
    Endpoint("GET", "/v1/files/{file_id}", get_file),
    Endpoint("GET", "/v1/files/{file_id}/content", get_content),
    Endpoint("DELETE", "/v1/files/{file_id}", delete_file),
    Endpoint("POST", "/v1/batches", create_batch),
    Endpoint("GET", "/v1/batches", list_batches, frozenset({"limit", "after"})),
    Endpoint("GET", "/v1/batches/{batch_id}", get_batch),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", cancel_batch),
    Endpoint("GET", "/health", get_health, is_open=True),
    Endpoint("GET", "/ready", get_ready, is_open=True),
    Endpoint("GET", "/metrics", get_metrics, is_open=True),
    Endpoint("GET", "/version", get_version, is_open=True),
)
