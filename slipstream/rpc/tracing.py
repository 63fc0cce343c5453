"""OpenTelemetry's traces: a span for each call that is served, one trace over all services that a caption crosses, told
to a collector. Without one nothing of OpenTelemetry is imported, and no call takes a step more.

Contexts travel as the metadata `traceparent` (W3C Trace Context). No span holds a prompt, a caption, a path, an address
or an owner.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from slipstream import __version__
from slipstream.errors import InvalidConfig
from slipstream.logs import bound_request_id
from slipstream.rpc.calls import send_along
from slipstream.rpc.guards import AUDITED

TRACEPARENT_KEY = "traceparent"
EXPORT_S = 2.0
"""For telling the collector, each time and for all that is left at the end: a collector that is away delays no end."""


Facts = Mapping[str, str | int]
"""Attributes of a span."""
FAULTS_OF_SERVERS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_STATUSES = {status.name for status in grpc.StatusCode}


def _is_refusal(status: str) -> bool:
    """Whether its caller must do something about it: by OpenTelemetry's conventions (gRPC, HTTP) no error of the server
    that says so. Of gRPC by name, of HTTP by number; what else was raised is no refusal."""
    return status in _STATUSES - FAULTS_OF_SERVERS or (status.isdecimal() and int(status) < 500)


class Tracing:
    """Of one process."""

    def __init__(self, service: str, collector: str) -> None:
        """Raises `InvalidConfig` where OpenTelemetry is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise InvalidConfig(f"--otlp needs {error.name}: install slipstream[otel]") from None
        resource = Resource({"service.name": f"slipstream-{service}", "service.version": __version__})
        exporter = OTLPSpanExporter(endpoint=f"{collector.rstrip('/')}/v1/traces", timeout=EXPORT_S)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("slipstream", __version__)
        self._contexts = TraceContextTextMapPropagator()
        send_along(self.metadata)
        _OF_PROCESS.append(self)

    def metadata(self) -> Iterable[tuple[str, str]]:
        """What a call made within a span carries, so that its own span is the child of that one."""
        carrier: dict[str, str] = {}
        self._contexts.inject(carrier)
        return carrier.items()

    @contextlib.contextmanager
    def span(self, name: str, traceparent: str, facts: Facts, *, is_call: bool = True) -> Iterator[Any]:
        """One call that is served (or one run of a job), as the child of the span that asked for it where there is one;
        `set_attribute` of what it gives adds to it. An error that it raises is its `error.type`, and makes it an error,
        but for a call that was refused (`_is_refusal`); being cancelled is none, as each draft's session ends so."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = self._contexts.extract({TRACEPARENT_KEY: traceparent})
        kind = SpanKind.SERVER if is_call else SpanKind.CONSUMER
        with self._tracer.start_as_current_span(
            name, context, kind, facts, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except asyncio.CancelledError:
                span.set_attribute("slipstream.cancelled", True)
                raise
            except BaseException as error:
                error_type = str(getattr(error, "status", type(error).__name__))
                span.set_attribute("error.type", error_type)
                if not (is_call and _is_refusal(error_type)):
                    span.set_status(Status(StatusCode.ERROR, error_type))
                raise

    def job_run(self, traceparent: str, request_id: str, num_failed: int) -> contextlib.AbstractContextManager[Any]:
        """Surrounds one run of a job; `num_failed`: of its runs before."""
        facts: Facts = {"slipstream.request_id": request_id, "slipstream.failed_runs": num_failed}
        return self.span("archive.run", traceparent, facts, is_call=False)

    def hand_in(self, batch_id: str) -> "HandIn":
        """A trace for a job that is about to be put into the queue, linked to the call that goes on now."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, SpanKind, get_current_span, set_span_in_context

        by = get_current_span().get_span_context()
        links = [Link(by)] if by.is_valid else []
        facts = {"slipstream.batch_id": batch_id}
        span = self._tracer.start_span("archive.hand_in", Context(), SpanKind.PRODUCER, facts, links)
        carrier: dict[str, str] = {}
        self._contexts.inject(carrier, set_span_in_context(span, Context()))
        return HandIn(carrier[TRACEPARENT_KEY], span.end)

    def close(self) -> None:
        """Tells what has not been told: several batches, perhaps, each of which would wait for the collector anew."""
        _OF_PROCESS.remove(self)
        telling = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        telling.start()
        telling.join(EXPORT_S)


# -- jobs of the archive ----------------------------------------------------------------------------------------------

# One trace a job: from its hand-in, whose context its record keeps, over every run of it, wherever and whenever.

_OF_PROCESS: list[Tracing] = []


def tracing_here() -> Tracing | None:
    """That of this process; None where it has no collector."""
    return next(iter(_OF_PROCESS), None)


@dataclass(frozen=True)
class HandIn:
    """The beginning of a job's trace. It is told to nobody before `keep`."""

    traceparent: str
    """For the job's record."""
    keep: Callable[[], None]
    """The job is new, so this is where its trace begins."""


# -- calls ------------------------------------------------------------------------------------------------------------


class TraceCalls:
    """A guard that has a span around each call whose caller has one, or by which somebody wants something done."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    @contextlib.asynccontextmanager
    async def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        given = dict(details.invocation_metadata or ()).get(TRACEPARENT_KEY)
        service, _, method = details.method.strip("/").rpartition("/")
        if given is None and method not in AUDITED:
            yield
            return
        facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
        with self._tracing.span(f"{service}/{method}", str(given or ""), facts) as span:
            try:
                yield
            finally:
                span.set_attribute("slipstream.request_id", bound_request_id())


@contextlib.contextmanager
def traced(service: str, collector: str) -> Iterator[Tracing | None]:
    """What a process does is told to the collector at this address within; '' for none."""
    if not collector:
        yield None
        return
    tracing = Tracing(service, collector)
    try:
        yield tracing
    finally:
        tracing.close()
