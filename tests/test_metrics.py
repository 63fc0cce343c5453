"""Metrics: what is counted, that they are shown on their own port only, and on loopback unless told otherwise."""

import asyncio
import socket
import tempfile
import urllib.request

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest

from slipstream.archive.queue import QueueDepth, QueueUnavailable
from slipstream.archive.service import watch_depth
from slipstream.budget import Admission
from slipstream.errors import InvalidConfig, Overloaded, SlipstreamError
from slipstream.messages import CaptionEvent, CommittedText, CommittedToken, StageChange
from slipstream.metrics import REGISTRY, GatewayMetrics, ModelMetrics, shown_at
from slipstream.rpc.v1 import gateway_pb2
from slipstream.speculation.caption_book import CaptionBook, Kind
from slipstream.speculation.pacing import CostModel
from slipstream.video.messages import DecodeLimits
from slipstream.video.pool import DecodePool
from tests.support.memory_queue import MemoryQueue

CAUSES = ("lost", "stopped", "worn")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def finish_caption(metrics: GatewayMetrics, method: str, summary: gateway_pb2.Summary | None) -> None:
    with metrics.captioning(method):
        if summary is None:
            raise Overloaded("full")
        metrics.captioned(summary)


def test_captions_are_counted_by_method_and_outcome() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    summary = gateway_pb2.Summary(num_tokens=10)
    summary.speculation.accepted, summary.speculation.judged, summary.speculation.tau = 6, 8, 0.75
    summary.timings.total_s = 2.0
    finish_caption(metrics, "slipstream", summary)
    finish_caption(metrics, "a method of tomorrow", gateway_pb2.Summary(num_tokens=3))
    for _ in range(2):
        with pytest.raises(Overloaded):
            finish_caption(metrics, "slipstream", None)
    with metrics.captioning("autoregressive"):
        assert value(registry, "slipstream_captions_in_work", door="interactive") == 1
    counted = {
        (sample.labels["method"], sample.labels["outcome"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "slipstream_captions_total"
    }
    assert counted == {
        ("slipstream", "OK"): 1,
        ("slipstream", "RESOURCE_EXHAUSTED"): 2,
        ("other", "OK"): 1,
        ("autoregressive", "OK"): 1,
    }
    assert value(registry, "slipstream_captions_in_work", door="interactive") == 0
    assert value(registry, "slipstream_tokens_total", origin="draft") == 6
    assert value(registry, "slipstream_tokens_total", origin="target") == 7
    assert value(registry, "slipstream_tau_count") == 1
    assert value(registry, "slipstream_caption_seconds_sum", stage="total") == 2.0
    refused = value(registry, "slipstream_caption_ended_seconds_count", outcome="RESOURCE_EXHAUSTED")
    assert refused == 2, "a caption without a result took its time too"


def test_what_the_gate_decided_is_counted_and_what_it_knows_is_shown() -> None:
    registry, book = CollectorRegistry(), CaptionBook()
    metrics = GatewayMetrics(registry)
    metrics.watch_gate(book)
    for start in ("rest", "rest", "trial", "", "a start of tomorrow"):
        summary = gateway_pb2.Summary()
        summary.speculation.gate_start = start
        finish_caption(metrics, "slipstream", summary)
    assert value(registry, "slipstream_gate_captions_total", start="rest") == 2
    assert value(registry, "slipstream_gate_captions_total", start="trial") == 1
    assert value(registry, "slipstream_gate_captions_total", start="a start of tomorrow") is None
    assert value(registry, "slipstream_gate_kinds") == 0
    kind = Kind(size=0, settings=0, load=1, prompt="")
    opening = book.begin(kind, CostModel(), gated=True, max_window=4)
    assert opening.record is not None
    opening.record.resting = True
    assert value(registry, "slipstream_gate_kinds") == value(registry, "slipstream_gate_kinds_resting") == 1


def test_the_time_between_texts_is_shared_out_among_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, now = CollectorRegistry(), 0.0
    monkeypatch.setattr("slipstream.metrics.time.monotonic", lambda: now)
    told: list[CaptionEvent] = []
    emit = GatewayMetrics(registry).timing(told.append)
    token = CommittedToken(5, "a", from_draft=True)
    texts = [CommittedText((token,)), StageChange("queued"), CommittedText(()), CommittedText((token,) * 4)]
    for now, event in zip((1.0, 1.5, 2.0, 3.0), texts, strict=True):  # noqa: B007 (the patched clock reads it)
        emit(event)
    assert told == texts
    assert value(registry, "slipstream_inter_token_seconds_count") == 4
    assert value(registry, "slipstream_inter_token_seconds_sum") == 2.0


def test_a_failed_decode_is_counted_by_its_kind_alone() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    with pytest.raises(OSError, match="secret"), metrics.decoding(5):
        raise OSError("/secret/path")
    assert value(registry, "slipstream_decode_failures_total", kind="OSError") == 1
    assert value(registry, "slipstream_video_bytes_total") == 5
    assert b"secret" not in generate_latest(registry)


async def test_decoders_that_are_replaced_are_counted_by_cause() -> None:
    pool = DecodePool(1, DecodeLimits(timeout_s=20.0), module="tests.support.bad_decoder", max_jobs=2)
    before = {cause: value(REGISTRY, "slipstream_decoder_restarts_total", cause=cause) or 0 for cause in CAUSES}
    waited = value(REGISTRY, "slipstream_wait_seconds_count", place="decoder") or 0
    orders = (b"crash SIGSEGV", b"answer not json", b"refuse", b"refuse")
    for order in orders:
        with tempfile.TemporaryFile() as file:
            file.write(order)
            file.flush()
            with pytest.raises(SlipstreamError):
                await pool.sample(file.fileno(), 4)
    pool.close()
    counted = {cause: value(REGISTRY, "slipstream_decoder_restarts_total", cause=cause) for cause in CAUSES}
    assert counted == {cause: number + 1 for cause, number in before.items()}
    assert value(REGISTRY, "slipstream_wait_seconds_count", place="decoder") == waited + len(orders)


async def test_a_model_service_shows_how_full_it_is() -> None:
    registry = CollectorRegistry()
    metrics = ModelMetrics(registry)
    admission = Admission(budget_bytes=100, max_sessions=1, max_queued=4, queue_timeout_s=1, what="target")
    metrics.watch(admission)
    metrics.passed(3, 0.02)
    admission.reserve(60)
    admission.reserve(60)
    shown = {name: value(registry, f"slipstream_{name}") for name in ("sessions", "sessions_queued", "kv_bytes")}
    assert shown == {"sessions": 1, "sessions_queued": 1, "kv_bytes": 60}
    assert value(registry, "slipstream_kv_budget_bytes") == 100
    assert value(registry, "slipstream_pass_sessions_sum") == 3
    assert value(registry, "slipstream_session_wait_seconds_count") == 1, "the other one still waits"


def test_runs_of_jobs_are_counted_by_how_they_ended() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for outcome, was_held in (("done", True), ("done", False), ("retried", True), ("retried", False)):
        metrics.run_ended(outcome, was_held)
    counted = {kind: value(registry, "slipstream_jobs_total", outcome=kind) for kind in ("done", "lost", "retried")}
    assert counted == {"done": 1, "lost": 2, "retried": 1}
    assert value(registry, "slipstream_stale_commits_total") == 1


class FakeQueue(MemoryQueue):
    async def depth(self) -> QueueDepth:
        return QueueDepth(queued=7, delayed=1, suspects=0, running=2, dead=3, oldest_s=60.0)


async def test_the_queue_is_watched() -> None:
    registry = CollectorRegistry()
    watching = asyncio.create_task(watch_depth(FakeQueue(), GatewayMetrics(registry)))
    while value(registry, "slipstream_queue_jobs", state="queued") is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    watching.cancel()
    assert value(registry, "slipstream_queue_jobs", state="dead") == 3
    assert value(registry, "slipstream_queue_jobs", state="oldest_s") is None
    assert value(registry, "slipstream_queue_oldest_job_age_seconds") == 60


@pytest.mark.parametrize("takes_writes", [True, False])
async def test_the_store_is_asked_to_take_a_write(takes_writes: bool) -> None:
    class Store(FakeQueue):
        async def ping(self) -> None:
            if not takes_writes:
                raise QueueUnavailable("READONLY")

    registry = CollectorRegistry()
    assert value(registry, "slipstream_queue_writable", store="redis") is None, "a gateway without a queue says nothing"
    watching = asyncio.create_task(watch_depth(Store(), GatewayMetrics(registry)))
    while value(registry, "slipstream_queue_writable", store="redis") is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    watching.cancel()
    assert value(registry, "slipstream_queue_writable", store="redis") == takes_writes


def test_they_are_shown_on_loopback_unless_told_otherwise() -> None:
    structlog.reset_defaults()
    with shown_at("0") as address:
        assert address.startswith("127.0.0.1:")
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        assert "process_resident_memory_bytes" in text
        with pytest.raises(InvalidConfig, match="--metrics"), shown_at(address):
            pass
    with socket.socket() as probe:
        host, _, port = address.rpartition(":")
        assert probe.connect_ex((host, int(port))) != 0, "nothing listens any more"
    with shown_at("") as nowhere:
        assert nowhere == ""
    for wrong in ("here", "host:port", "127.0.0.1:70000", "no such host:1"):
        with pytest.raises(InvalidConfig, match="--metrics"), shown_at(wrong):
            pass


def test_the_process_registry_has_its_own_collectors() -> None:
    assert REGISTRY.get_sample_value("process_open_fds") is not None
