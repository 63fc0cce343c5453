"""What goes wrong, in OpenAI's form: a status, a type, the field that is meant, and when to try again."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.errors import (
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    Overloaded,
    PermissionDenied,
    ResumeMismatch,
    ServiceUnavailable,
    SessionExists,
    SessionIdle,
    SlipstreamError,
    Unauthenticated,
    UnreadableMedia,
    VideoNotFound,
)
from slipstream.options import OPTIONS_BY_NAME

INVALID = "invalid_request_error"
UNAVAILABLE_RETRY_S, NO_ROOM_RETRY_S = 1.0, 10.0

_ANSWERS: tuple[tuple[type[SlipstreamError], int, str, str | None], ...] = (
    (UnreadableMedia, 400, INVALID, "unreadable_media"),
    (SessionExists, 409, INVALID, "conflict"),
    (InvalidRequest, 400, INVALID, None),
    (LimitExceeded, 413, INVALID, "limit_exceeded"),
    (VideoNotFound, 404, INVALID, "not_found"),
    (InvalidConfig, 400, INVALID, "not_served"),
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PermissionDenied, 403, "permission_error", "permission_denied"),
    (Overloaded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (SessionIdle, 409, INVALID, "aborted"),
    (ResumeMismatch, 409, "server_error", "aborted"),
    (DeadlineExceeded, 504, "server_error", "timeout"),
    (ServiceUnavailable, 503, "server_error", "unavailable"),
    (SlipstreamError, 500, "server_error", "internal_error"),
)
"""Status, type and code of each error; of several that fit, the first."""
_WIDE = {InvalidRequest, LimitExceeded, VideoNotFound, InvalidConfig, SessionIdle, ServiceUnavailable}
"""Those that answer for all errors of their gRPC status, such as the archive's own."""


class ApiError(Exception):
    """An answer that is an error. `param` is the path of the field that is meant, such as `messages[0].content`."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """When to try again, rounded up so that nobody comes too early; which methods there are; how to say who
        calls."""
        told: dict[str, str] = {}
        if self.status == 401:
            told["www-authenticate"] = "Bearer"
        if self.allow:
            told["allow"] = self.allow
        if self.retry_after_s is not None:
            told["retry-after"] = str(math.ceil(self.retry_after_s))
            told["retry-after-ms"] = str(math.ceil(self.retry_after_s * 1000))
        return told


def as_api_error(error: SlipstreamError, params: Mapping[str, str | None] | None = None) -> ApiError:
    """One of our errors as an answer. `params`: which field of the request gave an option (None: one that is not known
    any more), by the option's name, with which messages about it begin, with a colon behind it or not. The answer's
    begins with the field."""
    status, kind, code = next(
        row[1:] for row in _ANSWERS if isinstance(error, row[0]) or (error.status == row[0].status and row[0] in _WIDE)
    )
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status in (429, 503):
        retry_after_s = UNAVAILABLE_RETRY_S
    name = str(error).partition(" ")[0].removesuffix(":")
    param = (params or {}).get(name, f"slipstream.{name}" if name in OPTIONS_BY_NAME else None)
    message = str(error) if param is None else param + str(error).removeprefix(name)
    return ApiError(message, status=status, kind=kind, param=param, code=code, retry_after_s=retry_after_s)


def not_found(what: str, *, param: str | None = None, code: str = "not_found") -> ApiError:
    """There is no such thing, or it is another owner's."""
    return ApiError(what, status=404, param=param, code=code)


@contextlib.contextmanager
def about(param: str) -> Iterator[None]:
    """What fails within is said of this field of the request, by which who failed was asked."""
    try:
        yield
    except ApiError as error:
        error.param = param
        raise


def no_room(what: str, error: OSError) -> ApiError:
    """The disk is full, or takes nothing for another reason, which may pass."""
    return ApiError(
        f"{what} cannot be kept now: {error.strerror}", status=503, kind="server_error", code="unavailable",
        retry_after_s=NO_ROOM_RETRY_S,
    )  # fmt: skip


def too_large(what: str, *, param: str | None = None) -> ApiError:
    """More bytes than are taken."""
    return ApiError(what, status=413, param=param, code="too_large")
