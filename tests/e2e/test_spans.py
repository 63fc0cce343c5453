"""OpenTelemetry's traces over the real services: one trace a caption, from the HTTP front to both models."""

import asyncio
import contextlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slipstream.archive.messages import BatchItem, BatchOptions
from slipstream.client.archive_client import ArchiveClient
from slipstream.client.connection import GatewayAddress
from slipstream.config import parse_config
from slipstream.errors import InvalidConfig, InvalidRequest, Overloaded, ServiceUnavailable
from slipstream.rpc import tracing
from slipstream.rpc.tracing import Tracing, traced
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.config import FrontConfig
from slipstream.stack.local import Stack, StackOptions
from tests.support.clips import make_colour_clip
from tests.support.front import PROMPT, asked, client_of, data_url
from tests.support.processes import eventually

# Redis's client, at the gateway, loads it by itself where it is installed.
LOADED = """
import sys
import slipstream.rpc.server, slipstream.rpc.tracing, slipstream.services.front.process
import slipstream.services.target.__main__, slipstream.services.draft.__main__
print(any(name.partition(".")[0] == "opentelemetry" for name in sys.modules))
"""


SUBMIT = "slipstream.rpc.v1.Archive/SubmitBatch"


@dataclass
class Collector:
    """What was told, by the name of the service."""

    url: str
    spans: list[tuple[str, Any]] = field(default_factory=list)

    def of(self, service: str) -> list[Any]:
        return [span for name, span in self.spans if name == f"slipstream-{service}"]

    def named(self, service: str, span_name: str) -> list[Any]:
        return [span for span in self.of(service) if span.name == span_name]


@contextmanager
def collector() -> Iterator[Collector]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raise AssertionError("nobody asked for that")
            for told in ExportTraceServiceRequest.FromString(data).resource_spans:
                facts = {pair.key: pair.value.string_value for pair in told.resource.attributes}
                found.spans += [(facts["service.name"], span) for scope in told.scope_spans for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def facts_of(span: Any) -> dict[str, Any]:
    kinds = {pair.key: pair.value.WhichOneof("value") for pair in span.attributes}
    return {pair.key: getattr(pair.value, kinds[pair.key]) for pair in span.attributes}


async def test_a_caption_is_one_trace_over_all_services() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with collector() as told:
        services = ("target", "draft", "gateway", "front")
        flags = {name: ("--otlp", told.url) for name in services}
        parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
        async with (
            Stack(StackOptions(threads=1, http=0, extra_flags=flags)) as stack,
            client_of(stack.http_address) as client,
        ):
            answer = await client.chat.completions.create(
                model="pocket/target",
                messages=asked(data_url(make_colour_clip(1, size=(96, 96)))),
                max_completion_tokens=24,
                extra_body={"slipstream": {"num_frames": 6, "gate": False}},
                extra_headers={"traceparent": parent, "x-request-id": "traced-one"},
            )
            await client.models.list()
        await eventually(lambda: all(told.of(name) for name in services))
    text = answer.choices[0].message.content
    (front,) = [span for span in told.of("front") if span.name == "POST /v1/chat/completions"]
    (gateway,) = [span for span in told.of("gateway") if span.name == "slipstream.rpc.v1.Gateway/Caption"]
    (target,) = [span for span in told.of("target") if span.name == "slipstream.rpc.v1.Target/Session"]
    (pulled,) = [span for span in told.of("target") if span.name == "slipstream.rpc.v1.Target/PullGuidance"]
    (draft,) = told.of("draft")
    assert {span.trace_id.hex() for span in (front, gateway, target, draft, pulled)} == {"ab" * 16}
    assert front.parent_span_id.hex() == "cd" * 8 and gateway.parent_span_id == front.span_id
    assert target.parent_span_id == draft.parent_span_id == gateway.span_id
    assert pulled.parent_span_id == draft.span_id
    assert facts_of(front)["slipstream.predicted_n"] == 24
    assert {facts_of(span)["slipstream.request_id"] for span in (front, gateway, target, draft)} == {"traced-one"}
    assert not any(span.status.code for span in (front, gateway, target, draft, pulled)), "nothing of it failed"
    assert front.start_time_unix_nano <= gateway.start_time_unix_nano <= target.start_time_unix_nano
    everything = "".join(str(span) for _, span in told.spans)
    assert PROMPT not in everything and text[:20] not in everything and "127.0.0.1" not in everything


async def test_a_job_is_one_trace_from_its_hand_in_over_all_that_ran_it(tmp_path: Path) -> None:
    """Each of two jobs of one call, one of which fails; handing them in again begins no trace."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(make_colour_clip(1, size=(96, 96)))
    caption = {"num_frames": 6, "max_new_tokens": 24, "gate": False}
    items = [BatchItem("good", str(clip)), BatchItem("bad", str(tmp_path / "none.mp4"))]
    with collector() as told:
        services = ("target", "draft", "gateway")
        flags = {name: ("--otlp", told.url) for name in services}
        options = StackOptions(threads=1, archive=True, video_roots=(tmp_path,), extra_flags=flags)
        async with Stack(options) as stack, GatewayAddress(stack.gateway_address).open() as connection:
            archive = ArchiveClient(connection)
            for _ in range(2):
                batch = await archive.submit(BatchOptions("traced", caption), items)
            async for state in archive.watch(batch.batch_id):
                counts = state.counts
            jobs = [job async for job in archive.jobs(batch.batch_id)]
            await eventually(lambda: len(told.named("gateway", "archive.run")) == 2)
            await eventually(lambda: told.of("target") and told.of("draft"))
    assert (counts.done, counts.failed) == (1, 1)
    handed_in, runs, submits = (told.named("gateway", name) for name in ("archive.hand_in", "archive.run", SUBMIT))
    assert len(handed_in) == len(runs) == len(submits) == 2
    assert len({span.trace_id for span in handed_in}) == 2 and not any(span.parent_span_id for span in handed_in)
    assert {link.span_id for span in handed_in for link in span.links} <= {span.span_id for span in submits}
    parents = {span.trace_id: span.span_id for span in handed_in}
    assert {run.trace_id: run.parent_span_id for run in runs} == parents
    (good,) = [job for job in jobs if job.caption is not None]
    (run,) = [run for run in runs if facts_of(run)["slipstream.request_id"].startswith(good.job_id)]
    (target,), (draft,) = told.named("target", "slipstream.rpc.v1.Target/Session"), told.of("draft")
    assert {target.trace_id, draft.trace_id} == {run.trace_id}
    assert target.parent_span_id == draft.parent_span_id == run.span_id
    (failed,) = [run.status.message for run in runs if run.status.message]
    assert failed == "NOT_FOUND"
    everything = "".join(str(span) for _, span in told.spans)
    assert str(tmp_path) not in everything and good.caption is not None and good.caption.text[:20] not in everything


def test_only_what_a_server_fails_in_is_an_error_of_its() -> None:
    """By OpenTelemetry's conventions; a job that is refused has failed all the same."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    raised: dict[str, BaseException] = {
        "ended": asyncio.CancelledError(),
        "broken": ValueError(),
        "refused": InvalidRequest("no"),
        "full": Overloaded("no"),
        "gone": ServiceUnavailable("no"),
        "bad": ApiError("no"),
        "late": ApiError("no", status=504),
    }
    with collector() as told:
        with traced("draft", told.url) as tracing:
            assert tracing is not None
            for name, error in raised.items():
                for is_call in (True, False):
                    with contextlib.suppress(type(error)), tracing.span(name, "", {"call": is_call}, is_call=is_call):
                        raise error
        spans = {(span.name, facts_of(span)["call"]): span for span in told.of("draft")}
    failed = {name for (name, is_call), span in spans.items() if is_call and span.status.code == 2}
    assert failed == {"broken", "gone", "late"}
    assert {name for (name, is_call), span in spans.items() if span.status.code == 2} == {*raised} - {"ended"}
    types = {name: facts_of(spans[name, True]).get("error.type") for name in raised}
    refused = {"refused": "INVALID_ARGUMENT", "full": "RESOURCE_EXHAUSTED", "bad": "400"}
    assert types == refused | {"ended": None, "broken": "ValueError", "gone": "UNAVAILABLE", "late": "504"}
    assert spans["gone", True].status.message == "UNAVAILABLE" and not spans["refused", True].status.message
    assert facts_of(spans["ended", True])["slipstream.cancelled"] is True


def test_without_a_collector_nothing_of_it_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_without_the_packages_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InvalidConfig, match=r"slipstream\[otel\]"):
        Tracing("front", "http://127.0.0.1:4318")


@pytest.mark.parametrize(
    ("address", "is_good"), [("", True), ("http://collector:4318", True), ("collector:4318", False)]
)
def test_an_address_that_is_none_is_an_error_at_start(address: str, is_good: bool) -> None:
    flags = ["--listen", "127.0.0.1:0", "--gateway", "127.0.0.1:1", "--otlp", address]
    if is_good:
        assert parse_config(FrontConfig, "front", flags, {}).otlp == address
    else:
        with pytest.raises(InvalidConfig, match="--otlp"):
            parse_config(FrontConfig, "front", flags, {})


async def test_a_collector_that_is_away_delays_nobody() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    flags = {"gateway": ("--otlp", "http://127.0.0.1:9")}
    async with (
        Stack(StackOptions(threads=1, http=0, extra_flags=flags)) as stack,
        client_of(stack.http_address) as client,
    ):
        assert (await client.models.list()).data


async def test_an_end_waits_for_no_collector_that_keeps_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    has_ended, told = threading.Event(), []
    monkeypatch.setattr(tracing, "EXPORT_S", 0.01)
    monkeypatch.setattr(OTLPSpanExporter, "export", lambda exporter, spans: told.append(has_ended.wait(20)))
    with traced("gateway", "http://127.0.0.1:1") as tracer:
        assert tracer is not None
        with tracer.span("a call", "", {}):
            pass
    has_ended.set()
    await eventually(lambda: told == [True])
