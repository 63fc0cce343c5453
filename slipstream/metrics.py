"""What a service counts about itself, for Prometheus, on a port of its own.

No label and no name ever holds an id, a prompt, a path, an address or an owner: whoever may read the metrics may not
read what is captioned, and the number of series stays small.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream import __version__
from slipstream.errors import FaultKind, InvalidConfig, SlipstreamError
from slipstream.logs import get_logger
from slipstream.messages import Caption, CaptionEvent, CommittedText
from slipstream.service_info import PeerInfo
from slipstream.speculation.caption_book import CaptionBook, Start
from slipstream.speculation.methods import METHODS

LOOPBACK = "127.0.0.1"
REGISTRY = CollectorRegistry()
"""What this process shows. Objects that are made without a registry count for nobody, as in tests."""
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_PASS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
_TOKEN_SECONDS = (*_PASS_SECONDS, 10, 30)
_SHARES = tuple(tenth / 10 for tenth in range(11))
_SESSIONS = (1, 2, 4, 8, 16, 32)

for _collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
    REGISTRY.register(_collector)

# What has one place in a process, wherever it is counted.
TOKENS_UNREADABLE = Gauge(
    "slipstream_tokens_unreadable",
    "1 while the file of tokens cannot be used; its former content holds",
    registry=REGISTRY,
)
DECODER_RESTARTS = Counter(
    "slipstream_decoder_restarts", "Decoders that had to be replaced", ["cause"], registry=REGISTRY
)
WAIT_SECONDS = Histogram("slipstream_wait_seconds", "Waits for a place", ["place"], buckets=_SECONDS, registry=REGISTRY)


class GatewayMetrics:
    """Captions through either door, their videos, and the archive's queue."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        to = registry or CollectorRegistry()
        self._captions = Counter(
            "slipstream_captions", "Captions that ended, by gRPC status", ["method", "outcome"], registry=to
        )
        self._in_work = Gauge("slipstream_captions_in_work", "Captions in work", ["door"], registry=to)
        self._seconds = Histogram(
            "slipstream_caption_seconds", "Of captions that were finished", ["stage"], buckets=_SECONDS, registry=to
        )
        self._ended_seconds = Histogram(
            "slipstream_caption_ended_seconds",
            "From a caption's admission to its end, by gRPC status",
            ["outcome"],
            buckets=_SECONDS,
            registry=to,
        )
        self._token_seconds = Histogram(
            "slipstream_inter_token_seconds", "Between two tokens of a caption", buckets=_TOKEN_SECONDS, registry=to
        )
        self._tokens = Counter("slipstream_tokens", "Tokens of finished captions", ["origin"], registry=to)
        self._tau = Histogram(
            "slipstream_tau", "Share of a caption's draft tokens that were accepted", buckets=_SHARES, registry=to
        )
        self._gate_starts = Counter(
            "slipstream_gate_captions",
            "Captions by what those before them said of their draft: open, trial or rest (without one)",
            ["start"],
            registry=to,
        )
        self._gate_kinds = Gauge("slipstream_gate_kinds", "Kinds of captions whose drafts are known", registry=to)
        self._gate_resting = Gauge("slipstream_gate_kinds_resting", "Those of them without a draft now", registry=to)
        self._drafts_lost = Counter("slipstream_drafts_lost", "Drafts lost within captions", registry=to)
        self._draft_faults = Counter(
            "slipstream_draft_faults", "How drafts broke the protocol, or were silent", ["kind"], registry=to
        )
        self._resumptions = Counter("slipstream_resumptions", "Targets lost within captions that went on", registry=to)
        self._video_bytes = Counter("slipstream_video_bytes", "Bytes of the videos to be decoded", registry=to)
        self._decode_failures = Counter(
            "slipstream_decode_failures", "Videos that gave no frames", ["kind"], registry=to
        )
        self._protected = Gauge(
            "slipstream_decoder_protection", "1: taken from decoders; 0: this machine cannot", ["kind"], registry=to
        )
        self._queue = Gauge("slipstream_queue_jobs", "Jobs in the archive's queue", ["state"], registry=to)
        self._jobs = Counter("slipstream_jobs", "Runs of jobs that ended here", ["outcome"], registry=to)
        self._oldest = Gauge(
            "slipstream_queue_oldest_job_age_seconds", "Of the job that has waited longest for its turn", registry=to
        )
        self._writable = Gauge(
            "slipstream_queue_writable", "1 while the queue's store takes writes", ["store"], registry=to
        )
        self._last_take = Gauge(
            "slipstream_queue_last_take_age_seconds",
            "Since the queue last answered this gateway's take of jobs, or it had no free slot",
            registry=to,
        )
        self._store_seconds = Histogram(
            "slipstream_redis_call_seconds", "Calls of the queue's Redis", ["call"], buckets=_PASS_SECONDS, registry=to
        )
        self._stale = Counter("slipstream_stale_commits", "Results refused as their lease was lost", registry=to)

    @contextlib.contextmanager
    def captioning(self, method: str, *, door: str = "interactive") -> Iterator[None]:
        """Surrounds one caption, from its admission to its end. `door`: interactive or archive."""
        with self._in_work.labels(door).track_inprogress():
            outcome, began = "CANCELLED", time.monotonic()
            try:
                yield
                outcome = "OK"
            except SlipstreamError as error:
                outcome = error.status
                raise
            except Exception:
                outcome = "INTERNAL"
                raise
            finally:
                self._captions.labels(method if method in METHODS else "other", outcome).inc()
                self._ended_seconds.labels(outcome).observe(time.monotonic() - began)

    def timing(self, emit: Callable[[CaptionEvent], None]) -> Callable[[CaptionEvent], None]:
        """`emit` for one caption, with the time from text to text shared out among the tokens of the later."""
        last_text = None

        def timed(event: CaptionEvent) -> None:
            nonlocal last_text
            emit(event)
            if not isinstance(event, CommittedText) or not event.tokens:
                return
            now = time.monotonic()
            if last_text is not None:
                for _ in event.tokens:
                    self._token_seconds.observe((now - last_text) / len(event.tokens))
            last_text = now

        return timed

    def captioned(self, caption: Caption) -> None:
        """A caption was finished."""
        timings, speculation = caption.timings, caption.speculation
        stages = {
            "total": timings.total_s,
            "first_token": timings.first_token_s,
            "decode": timings.decode_s,
            "prefill": timings.target_prefill_s,
            "generate": timings.generate_s,
        }
        for stage, seconds in stages.items():
            self._seconds.labels(stage).observe(seconds)
        from_draft = min(speculation.accepted, caption.num_tokens)
        self._tokens.labels("draft").inc(from_draft)
        self._tokens.labels("target").inc(caption.num_tokens - from_draft)
        if speculation.judged:
            self._tau.observe(speculation.tau)
        if speculation.gate_start in tuple(Start):
            self._gate_starts.labels(speculation.gate_start).inc()
        self._drafts_lost.inc(speculation.drafts_lost)
        self._resumptions.inc(timings.resumptions)

    def watch_gate(self, book: CaptionBook) -> None:
        """Shows how many kinds of captions the gate knows, and how many rest, whenever somebody asks."""
        self._gate_kinds.set_function(lambda: book.num_kinds)
        self._gate_resting.set_function(lambda: book.num_resting)

    def draft_faulted(self, kind: FaultKind) -> None:
        """A draft broke the protocol within a caption, or was silent."""
        self._draft_faults.labels(kind).inc()

    @contextlib.contextmanager
    def decoding(self, num_bytes: int) -> Iterator[None]:
        """Surrounds the decoding of one video; counts its failure by the error's class."""
        self._video_bytes.inc(num_bytes)
        try:
            yield
        except Exception as error:
            self._decode_failures.labels(type(error).__name__).inc()
            raise

    def confined(self, kinds: Mapping[str, bool]) -> None:
        """What was taken from decoders, by kind of protection, and what could not be."""
        for kind, was_taken in kinds.items():
            self._protected.labels(kind).set(was_taken)

    def queue_depth(self, jobs: Mapping[str, int], oldest_s: float = 0.0) -> None:
        """Jobs by state, and the age of the one that has waited longest."""
        for state, number in jobs.items():
            self._queue.labels(state).set(number)
        self._oldest.set(oldest_s)

    def queue_writable(self, is_writable: bool) -> None:
        """Whether the queue's store took a write just now."""
        self._writable.labels("redis").set(is_writable)

    def store_called(self, call: str, seconds: float) -> None:
        """The queue's store has answered, or failed to. `call`: what it was asked, one of a fixed set of words."""
        self._store_seconds.labels(call).observe(seconds)

    def watch_takes(self, age_s: Callable[[], float]) -> None:
        """Shows how long ago the worker could last take jobs, whenever somebody asks."""
        self._last_take.set_function(age_s)

    def run_ended(self, outcome: str, was_held: bool) -> None:
        """A run of a job ended: done, failed, cancelled, retried or crashed. Not held: somebody else has the job."""
        self._jobs.labels(outcome if was_held else "lost").inc()
        if not was_held and outcome not in ("retried", "crashed"):
            self._stale.inc()


class PeerFigures(Collector):
    """Each of several targets and drafts of a gateway, by its number: an address is no label."""

    def __init__(self, infos: Callable[[], Iterable[PeerInfo]]) -> None:
        self._infos = infos

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        labels = ["role", "number"]
        is_up = GaugeMetricFamily("slipstream_peer_up", "1 while captions may be sent there", labels=labels)
        sessions = GaugeMetricFamily("slipstream_peer_sessions", "Sessions it serves, as it said last", labels=labels)
        free = GaugeMetricFamily("slipstream_peer_kv_free_bytes", "Keys and values it has room for", labels=labels)
        placed = CounterMetricFamily("slipstream_peer_placed", "Captions that were sent there", labels=labels)
        for peer in self._infos():
            named = [peer.role, str(peer.number)]
            is_up.add_metric(named, not peer.left_out)
            sessions.add_metric(named, peer.load.sessions)
            free.add_metric(named, peer.load.kv_budget_bytes - peer.load.kv_bytes)
            placed.add_metric(named, peer.placed)
        yield from (is_up, sessions, free, placed)


class Ceiling(Protocol):
    """Something of which there is only so much."""

    @property
    def what(self) -> str: ...
    @property
    def used(self) -> int: ...
    @property
    def limit(self) -> int: ...


class ProcessMetrics(Collector):
    """What every service counts: calls it refused, how full its ceilings are, its certificates, what it is."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._refusals = Counter("slipstream_refusals", "Calls refused", ["status", "reason"], registry=registry)
        self._expiry = Gauge("slipstream_certificate_expiry_seconds", "Until it expires", ["use"], registry=registry)
        self._build = Gauge(
            "slipstream_build_info", "What runs here; always 1", ["version", "service", "torch"], registry=registry
        )
        self._ceilings: dict[str, Ceiling] = {}
        registry.register(self)

    def started(self, service: str, expiries: Mapping[str, Callable[[], float]]) -> None:
        """Says what this process is, and until when its certificates hold."""
        torch = getattr(sys.modules.get("torch"), "__version__", "")
        self._build.labels(__version__, service, torch).set(1)
        for use, seconds_left in expiries.items():
            self._expiry.labels(use).set_function(seconds_left)

    def refused(self, error: SlipstreamError) -> None:
        """A call ended with this error."""
        self._refusals.labels(error.status, error.ceiling or type(error).__name__).inc()

    def watch(self, *ceilings: Ceiling) -> None:
        """Shows how full they are whenever somebody asks; of several with one name the last."""
        self._ceilings |= {ceiling.what: ceiling for ceiling in ceilings}

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        used = GaugeMetricFamily("slipstream_ceiling_used", "Held now of what is limited", labels=["ceiling"])
        limit = GaugeMetricFamily("slipstream_ceiling_limit", "Most that may be held", labels=["ceiling"])
        for what, ceiling in self._ceilings.items():
            used.add_metric([what], ceiling.used)
            limit.add_metric([what], ceiling.limit)
        yield from (used, limit)


PROCESS = ProcessMetrics(REGISTRY)
"""Of this process, as it has one server."""


class Occupancy(Protocol):
    """How full a model service is; its admission says so."""

    budget_bytes: int
    used_bytes: int
    num_admitted: int
    on_admitted: Callable[[float], None]

    @property
    def num_queued(self) -> int: ...


class ModelMetrics:
    """A model service's passes, and how full it is."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self._pass_seconds = Histogram(
            "slipstream_pass_seconds", "Decoding passes", buckets=_PASS_SECONDS, registry=self._registry
        )
        self._pass_sessions = Histogram(
            "slipstream_pass_sessions", "Sessions in one decoding pass", buckets=_SESSIONS, registry=self._registry
        )

    def passed(self, num_sessions: int, seconds: float) -> None:
        """A pass was run. From any thread."""
        self._pass_seconds.observe(seconds)
        self._pass_sessions.observe(num_sessions)

    def watch(self, occupancy: Occupancy) -> None:
        """Shows how full the service is whenever somebody asks, and how long each session waited for its place."""
        waits = Histogram(
            "slipstream_session_wait_seconds", "Of a session for its place", buckets=_SECONDS, registry=self._registry
        )
        occupancy.on_admitted = waits.observe
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "slipstream_sessions": ("Sessions that are served", lambda: occupancy.num_admitted),
            "slipstream_sessions_queued": ("Sessions that wait for a place", lambda: occupancy.num_queued),
            "slipstream_kv_bytes": ("Keys and values promised to sessions", lambda: occupancy.used_bytes),
            "slipstream_kv_budget_bytes": ("Keys and values of all sessions, at most", lambda: occupancy.budget_bytes),
        }
        for name, (what, value) in gauges.items():
            Gauge(name, what, registry=self._registry).set_function(value)


def watch_frames(frames: Occupancy, registry: CollectorRegistry = REGISTRY) -> None:
    """Shows what a service's frames take, whenever somebody asks."""
    gauges: dict[str, tuple[str, Callable[[], float]]] = {
        "slipstream_frames_bytes": ("Memory promised to frames of captions", lambda: frames.used_bytes),
        "slipstream_frames_budget_bytes": ("Memory of all frames, at most", lambda: frames.budget_bytes),
        "slipstream_frames_queued": ("Captions that wait for room for their frames", lambda: frames.num_queued),
    }
    for name, (what, value) in gauges.items():
        Gauge(name, what, registry=registry).set_function(value)


@contextlib.contextmanager
def shown_at(address: str) -> Iterator[str]:
    """Serves the process's metrics over HTTP; yields the address. '' serves none. A port alone is on loopback.

    Raises `InvalidConfig` when it cannot listen there.
    """
    if not address:
        yield ""
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise InvalidConfig(f"--metrics: {address!r} is neither PORT nor HOST:PORT")
    host = host.strip("[]") or LOOPBACK
    try:
        server, thread = start_http_server(int(port), host, REGISTRY)
    except (OSError, UnicodeError) as error:  # nor can every text be a host's name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfig(f"--metrics: cannot listen on {address}: {reason}") from None
    try:
        shown = f"{host}:{server.server_port}"
        get_logger().info("metrics.ready", address=shown)
        yield shown
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
