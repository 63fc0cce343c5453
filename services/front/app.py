"""The application: finds an endpoint, finds out who calls, makes room, and answers every failure once."""

import asyncio
import contextlib
import errno
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from slipstream.errors import ServiceStopping, SlipstreamError, Unauthenticated, machine_lacks
from slipstream.logs import LineBudget, get_logger
from slipstream.rpc.callers import begin_call, current_caller, name_owner
from slipstream.rpc.security import AUTHORIZATION_KEY, bearer_token
from slipstream.rpc.tracing import TRACEPARENT_KEY
from slipstream.services.front.api_errors import ApiError, as_api_error, no_room, not_found
from slipstream.services.front.bodies import ClientGone, linger
from slipstream.services.front.browsers import Browsers, listed
from slipstream.services.front.call import EVENTS_TYPE, JSON_TYPE, Call
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.endpoints import API_KEY, Endpoint, TellError
from slipstream.services.front.front import Front

GONE = 499
"""What is logged and counted where the client went before its answer was whole."""
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,100}")


@dataclass
class Api:
    """The ASGI application."""

    front: Front
    endpoints: Sequence[Endpoint]
    browsers: Browsers
    _lines: LineBudget = field(default_factory=LineBudget)

    def __post_init__(self) -> None:
        self._patterns = [(compile_path(endpoint.path)[0], endpoint) for endpoint in self.endpoints]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        call = Call(self.front, scope, receive, send, _request_id(scope))
        host, port = scope["client"] or ("127.0.0.1", 0)
        begin_call(f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}")
        structlog.contextvars.bind_contextvars(request_id=call.request_id)
        start, name, status = time.monotonic(), "none", GONE
        try:
            call.tell_error = self._told_below(scope["path"]) or call.tell_error
            endpoint, call.params = self._find(scope)
            name = endpoint.path
            await self._serve(call, endpoint)
            status = call.status
        except ClientGone:
            pass
        except ApiError as error:
            status = error.status
            await self._fail(call, error)
        except SlipstreamError as error:
            status = (answer := as_api_error(error)).status
            await self._fail(call, answer)
        except asyncio.CancelledError:
            if not self.front.stopping.is_set():
                raise
            status = 503
            await self._fail(call, as_api_error(ServiceStopping("this server is stopping; try again")))
        except Exception as error:
            status = (answer := _unforeseen(error)).status
            await self._fail(call, answer)
        finally:
            self.front.figures.ended(name, status, time.monotonic() - start)

    def _told_below(self, path: str) -> TellError | None:
        """How errors are told at a path, and at those below it, where there is nothing."""
        above = (each for each in self.endpoints if f"{path}/".startswith(f"{each.path}/"))
        return next((each.tell_error for each in above if each.tell_error), None)

    def _find(self, scope: Scope) -> tuple[Endpoint, dict[str, str]]:
        path, steps, allowed = scope["path"], _steps(scope["raw_path"]), set()
        for pattern, endpoint in self._patterns:
            found = pattern.fullmatch(steps)
            if found and endpoint.method in (scope["method"], {"HEAD": "GET"}.get(scope["method"])):
                return endpoint, {name: unquote(value) for name, value in found.groupdict().items()}
            if found:
                allowed.add(endpoint.method)
        if allowed:
            methods = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
            what = f"{path[:256]} takes {methods}, and not {scope['method'][:16]}"
            raise ApiError(what, status=405, code="method_not_allowed", allow=methods)
        raise not_found(f"there is nothing at {path[:256]!r}; see /openapi.json", code="unknown_url")

    async def _serve(self, call: Call, endpoint: Endpoint) -> None:
        call.query = _query(call.scope["query_string"], endpoint)
        if endpoint.is_open:
            await endpoint.serve(call)
            return
        self.browsers.check(call.scope["method"], call.header)
        self._identify(call)
        with self.front.requests.held(), self.front.figures.in_work.track_inprogress(), self._traced(call, endpoint):
            await endpoint.serve(call)

    @contextlib.contextmanager
    def _traced(self, call: Call, endpoint: Endpoint) -> Iterator[None]:
        """A span, in a process that has a collector."""
        if self.front.tracing is None:
            yield
            return
        facts = {"http.request.method": endpoint.method, "http.route": endpoint.path}
        parent = call.header(TRACEPARENT_KEY)
        with self.front.tracing.span(f"{endpoint.method} {endpoint.path}", parent, facts) as span:
            try:
                yield
            finally:
                measured = {f"slipstream.{name}": value for name, value in call.measured.items()}
                span.set_attributes({"slipstream.request_id": call.request_id} | measured)

    def _identify(self, call: Call) -> None:
        """Where tokens are asked for, they say who calls; the gateways ask again."""
        if self.front.tokens is None:
            return
        token = bearer_token(call.header(AUTHORIZATION_KEY)) or call.header(API_KEY)
        owner = self.front.tokens.owner(token) if token else None
        if owner is None:
            raise Unauthenticated(
                "this server needs a token that it knows; send `authorization: Bearer TOKEN`, or `x-api-key: TOKEN`"
            )
        call.owner, call.token = owner, token
        name_owner(owner)

    async def _fail(self, call: Call, error: ApiError) -> None:
        """Answers, as a status where none was sent yet, and else in the stream; logs once."""
        if (left_out := self._lines.spend(current_caller().name)) is not None:
            get_logger().info("request.refused", status=error.status, reason=str(error)[:500], left_out=left_out)
        try:
            if not call.status:
                await _refuse(call, error)
            elif call.kind == EVENTS_TYPE:
                await call.body(call.tell_failure(error.body["error"]), is_last=True)
        except ClientGone:
            pass


def _unforeseen(error: Exception) -> ApiError:
    """What no endpoint speaks of: a disk or a machine that is full, which passes, or an error of ours, which is
    logged."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        get_logger().error("disk.full", error=str(error))
        return no_room("the request", error)
    if (lack := machine_lacks(error)) is not None:
        return as_api_error(lack)
    get_logger().error("request.failed", exc_info=error)
    return as_api_error(SlipstreamError("internal error; the server's log has the details"))


async def _refuse(call: Call, error: ApiError) -> None:
    """A status. Where the body has not come to its end, nothing more is taken on this connection."""
    body = call.tell_error(error.body["error"])
    if call.is_read:
        await call.answer(body, error.status, error.headers)
        return
    data = json.dumps(body).encode()
    headers = {"connection": "close", "content-length": str(len(data))}
    await call.begin(error.status, JSON_TYPE, headers | error.headers)
    await call.body(data)
    await linger(call.receive)
    await call.body(b"", is_last=True)


def _steps(raw_path: bytes) -> str:
    """The path in one spelling; a slash that is part of a name, as `%2F`, stays so."""
    return "/".join(quote(unquote(step), safe="") for step in raw_path.decode("ascii").split("/"))


def _request_id(scope: Scope) -> str:
    """The client's, where it can stand in a log, or a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _query(text: bytes, endpoint: Endpoint) -> dict[str, str]:
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, max_num_fields=32)
    except ValueError:
        raise ApiError("the query behind the ? cannot be read") from None
    for name, _ in pairs:
        if name not in endpoint.query:
            raise ApiError(
                f"{name[:64]!r} is not supported in the query", param=name[:64], code="unsupported_parameter"
            )
    return dict(pairs)


def browsers_of(config: FrontConfig, *, has_tokens: bool) -> Browsers:
    """As the options say."""
    names = None if has_tokens else frozenset(name.lower().rstrip(".") for name in listed(config.hosts))
    return Browsers(frozenset(listed(config.cors_origins)), names)


def make_app(front: Front, endpoints: Sequence[Endpoint]) -> ASGIApp:
    """The application, with CORS where origins are allowed."""
    app: ASGIApp = Api(front, endpoints, browsers_of(front.config, has_tokens=bool(front.tokens)))
    if origins := listed(front.config.cors_origins):
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients send their own, such as x-stainless-*
            allow_private_network=True,  # browsers ask on behalf of a page of the internet that calls us in a local one
            expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
        )
    return app
