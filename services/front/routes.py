"""The one table of endpoints; the application and the OpenAPI document are made from it."""

from slipstream.services.front.app import Endpoint
from slipstream.services.front.chat import create_chat, get_model, list_models
from slipstream.services.front.operations import get_health, get_metrics, get_ready, get_version

ENDPOINTS = (
    Endpoint("GET", "/v1/models", list_models),
    Endpoint("GET", "/v1/models/{model:path}", get_model),
    Endpoint("POST", "/v1/chat/completions", create_chat),
    Endpoint("GET", "/health", get_health, is_open=True),
    Endpoint("GET", "/ready", get_ready, is_open=True),
    Endpoint("GET", "/metrics", get_metrics, is_open=True),
    Endpoint("GET", "/version", get_version, is_open=True),
)
