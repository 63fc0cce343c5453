"""OpenTelemetry's traces: a span for each call that is served, one trace over all services that a caption crosses, told
to a collector. Without one nothing of OpenTelemetry is imported, and no call takes a step more.

Contexts travel as the metadata `traceparent` (W3C Trace Context). No span holds a prompt, a caption, a path, an address
or an owner.
"""

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc

from slipstream import __version__
from slipstream.errors import InvalidConfig, SlipstreamError
from slipstream.logs import bound_request_id
from slipstream.rpc.calls import send_along
from slipstream.rpc.guards import AUDITED

TRACEPARENT_KEY = "traceparent"
EXPORT_S = 2.0
"""For telling the collector, each time and once more at the end: a collector that is away delays no end."""


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

    def metadata(self) -> Iterable[tuple[str, str]]:
        """What a call made within a span carries, so that its own span is the child of that one."""
        carrier: dict[str, str] = {}
        self._contexts.inject(carrier)
        return carrier.items()

    @contextlib.contextmanager
    def span(self, name: str, traceparent: str, **attributes: Any) -> Iterator[Any]:
        """One call that is served, as the child of the caller's span where it has one; `set_attribute` of what it gives
        adds to it. What it raises is its status."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = self._contexts.extract({TRACEPARENT_KEY: traceparent})
        with self._tracer.start_as_current_span(
            name, context, SpanKind.SERVER, attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                told = error.status if isinstance(error, SlipstreamError) else type(error).__name__
                span.set_status(Status(StatusCode.ERROR, told))
                raise

    def close(self) -> None:
        """Tells what has not been told."""
        self._provider.shutdown()


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
        with self._tracing.span(f"{service}/{method}", str(given or ""), **facts) as span:
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
