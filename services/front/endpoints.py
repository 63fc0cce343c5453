"""What an endpoint is, for the application that serves it and for the OpenAPI document that tells of it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.services.front.call import Call

Serve = Callable[[Call], Awaitable[None]]
Schema = Mapping[str, Any]
TellError = Callable[[Mapping[str, Any]], Mapping[str, Any]]
API_KEY = "x-api-key"
"""Where Anthropic's clients say their token."""


@dataclass(frozen=True)
class Endpoint:
    """One method at one path."""

    method: str
    path: str
    serve: Serve
    summary: str
    answer: Schema = field(default_factory=lambda: {"type": "object"})
    """Of the JSON that status 200 brings."""
    body: Mapping[str, Schema] = field(default_factory=dict)
    """Schemas by type of content; empty: it takes no body."""
    query: Mapping[str, Schema] = field(default_factory=dict)
    """What may stand behind the `?`."""
    content: tuple[str, ...] = ("application/json",)
    """Types of what status 200 brings."""
    statuses: tuple[int, ...] = ()
    """Beside 200, and those that every guarded endpoint may answer with."""
    tell_error: TellError | None = None
    """The body of an answer that is an error, by what it says, there and below that path; None: as OpenAI has it."""
    is_open: bool = False
    """Nobody is asked for a token, and it takes nobody's place."""
