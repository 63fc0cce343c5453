"""What the front counts about itself, for Prometheus. No label holds an id, an address, an owner or a model."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class FrontFigures:
    """Requests, streams, and bytes that were taken in."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self._requests = Counter(
            "slipstream_http_requests", "Requests that ended, by endpoint and status", ["endpoint", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "slipstream_http_seconds", "From a request's head to the end of its answer", ["endpoint"],
            buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self.in_work = Gauge("slipstream_http_in_work", "Requests in work", registry=self._registry)
        self.streams = Gauge("slipstream_http_streams", "Streams that are open", registry=self._registry)
        self.spooled = Counter(
            "slipstream_http_media_bytes", "Bytes of media that came by value", registry=self._registry
        )

    def ended(self, endpoint: str, status: int, seconds: float) -> None:
        """A request ended; 499: its client went."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)
