"""Whatever a stranger sends, its parser gives a value or one of our errors: it never crashes, hangs or says more.

Few examples here; `make fuzz` goes on for an hour. Damaged calls to whole services are in `test_mutated_requests.py`,
damaged videos in `tests/video/test_mutated_files.py`.
"""

import asyncio
import csv
import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import strategies as st

from slipstream.archive import records
from slipstream.archive.intake import check_batch, read_item
from slipstream.archive.queue import JobState, Priority
from slipstream.archive.redis_rows import job_from
from slipstream.archive.subtitles import safe_name
from slipstream.captioning.config import GatewayConfig
from slipstream.captioning.fetch import Fetcher, Url, parse_url
from slipstream.captioning.plan import make_plan
from slipstream.cli.archive.batch_view import describe, overall
from slipstream.cli.archive.job_lines import COLUMNS, job_record, job_row
from slipstream.cli.archive.manifests import read_manifest
from slipstream.cli.archive.output import FORMULA_STARTS, plain_cell
from slipstream.cli.views import caption_dict, closing_line
from slipstream.errors import MAX_MESSAGE_CHARS, SlipstreamError
from slipstream.messages import Caption
from slipstream.rpc import archive_codec, codec, session_codec
from slipstream.rpc.security import TokenFile
from slipstream.rpc.v1 import archive_pb2, common_pb2, draft_pb2, gateway_pb2, target_pb2
from slipstream.video.files import VideoBuffer
from slipstream.video.messages import BadAnswer, DecodeLimits, DecodeRequest, parse_answer
from tests.support.damage import HOSTILE_TEXT, NUMBERS, REALS, any_messages
from tests.support.fuzzing import SECONDS_VARIABLE, fuzz, report_findings

pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

CONFIG = GatewayConfig(listen="127.0.0.1:0", target="127.0.0.1:1")
BATCH = records.BatchPayload("key", {})
REQUEST = DecodeRequest(4, DecodeLimits())
URL = Url("host.example", 443, "/clip.mp4")
MAX_FETCHED = 4096
USUAL_EXAMPLES = 60


@dataclass(frozen=True)
class Parser:
    """`takes` is what may come, `read` what is done with it."""

    takes: st.SearchStrategy[Any]
    read: Callable[[Any], object]


# -- what may come ----------------------------------------------------------------------------------------------------

ODD = st.sampled_from([*HOSTILE_TEXT, *map(str, NUMBERS), "\ud800", "1" * 5000, "=1+1", "\x1b[2J", "[bold]"])
SCALARS = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(REALS) | st.text(max_size=20) | ODD
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
DEEP = st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b'{"source":"a","stop":' + b"[" * 50_000])


def _json_of(*names: str) -> st.SearchStrategy[bytes]:
    """Objects with these keys and any values, and what is none."""
    objects = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), VALUES, max_size=6)
    texts = objects.map(lambda content: json.dumps(content).encode()) | VALUES.map(
        lambda any_: json.dumps(any_).encode()
    )
    return texts | st.binary(max_size=60) | DEEP


URL_PARTS = st.sampled_from(
    ("https://", "http:", "//", "a", "é", "host.example", "127.1", "[::1]", "0x7f", "@", ":", "443", "99999", "\\", "/")
) | st.sampled_from(
    (
        "?",
        "#",
        "%00",
        "%",
        "..",
        "\n",
        "\0",
        " ",
        "x" * 3000,
        "\N{ONE DOT LEADER}",
        "\N{FULLWIDTH FULL STOP}",
        "xn--a",
        "-",
    )
)
URLS = st.lists(URL_PARTS, max_size=8).map("".join) | st.text(max_size=40)

STATUS_LINES = st.sampled_from(
    (
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 302 Found",
        b"HTTP/1.0 200",
        b"HTTP/1.1 100 Go on\r\n",
        b"HTTP/1.1 999 ",
        b"HTTP/2.0 200",
    )
)
HEADERS = st.sampled_from(
    (b"content-length: ", b"location: ", b"content-encoding: gzip", b"transfer-encoding: chunked", b"a: b", b" b", b"")
)
HTTP_VALUES = st.sampled_from(
    (b"5", b"-1", b"9" * 20, b"\xb2", b"hello", b"0", b"f" * 16, b"A" * 40_000, b"\0", b"\xff", b"\n")
) | st.sampled_from((b"https://host.example/b", b"https://127.0.0.1/", b"//evil.example", b"/b", b"https://[", b"?"))
HTTP_PARTS = st.tuples(STATUS_LINES | HEADERS, HTTP_VALUES | st.just(b"")).map(lambda parts: b"".join(parts) + b"\r\n")
ANSWERS = st.lists(HTTP_PARTS | st.binary(max_size=10), max_size=10).map(b"".join)

CELLS = st.binary(max_size=30) | ODD.map(lambda text: text.encode(errors="surrogatepass")) | _json_of("v", "source")
COUNTS = st.integers(0, 2**53).map(lambda number: str(number).encode())
STATES = st.sampled_from(JobState).map(lambda state: state.value.encode())
JOB_ROWS = st.tuples(CELLS, STATES, *[CELLS] * 7, *[COUNTS] * 3, CELLS, *[COUNTS] * 3)
"""As `page.lua` gives them: the store's own words are states and counts, all else came from somebody."""

TOKEN_LINES = st.sampled_from(["alice", " ", "0" * 64, "#", "\n", "\t", "F" * 64, "x" * 200, "é", "\0", "a/b", "\x85"])
TOKEN_FILES = st.lists(TOKEN_LINES, max_size=12).map(lambda parts: "".join(parts).encode()) | st.binary(max_size=80)


# -- what is done with it ---------------------------------------------------------------------------------------------


def read_url(text: str) -> None:
    url = parse_url(text)
    assert parse_url(str(url)) == url and url.host.isascii() and not set(str(url)) & set("\\ \r\n#")
    assert "@" not in urlsplit(str(url)).netloc


class Transport:
    """Where a request goes; it counts for nothing."""

    def __init__(self) -> None:
        self.transport = self

    def write(self, data: bytes) -> None:
        assert data.count(b"\r\n\r\n") <= 1, "one request"

    async def drain(self) -> None:
        pass

    def abort(self) -> None:
        pass


class OneHost(Fetcher):
    """Each request gets the same answer."""

    def __init__(self, answer: bytes) -> None:
        super().__init__({(URL.host, URL.port)}, MAX_FETCHED, 60.0)
        self._answer = answer

    async def _addresses(self, url: Url) -> list[str]:
        return ["192.0.2.1"]

    async def _connect(self, url: Url, addresses: list[str]) -> Any:
        assert url.host == URL.host, "no redirect leads elsewhere"
        reader = asyncio.StreamReader()
        reader.feed_data(self._answer)
        reader.feed_eof()
        return reader, Transport()


async def fetch(answer: bytes) -> None:
    with VideoBuffer(MAX_FETCHED) as download:
        await OneHost(answer).fetch(str(URL), download)


def read_tokens(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        assert TokenFile(file.name).owner("nobody's token") is None


def read_records(text: bytes) -> None:
    decoded = text.decode(errors="replace")
    for read in (records.read_job, records.read_batch, records.read_result):
        try:
            read(decoded)
        except SlipstreamError:
            continue


def read_row(row: tuple[bytes, ...]) -> None:
    json.dumps(job_record(records.job_of(job_from("batch", row))))


def read_answer(text: bytes) -> None:
    try:
        parse_answer(text, REQUEST)
    except BadAnswer:
        return


def show_jobs(message: archive_pb2.ListJobsResponse) -> None:
    table = csv.DictWriter(io.StringIO(), COLUMNS, extrasaction="ignore")
    for job in archive_codec.read_job_page(message).jobs:
        json.dumps(job_record(job))
        row = {name: plain_cell(cell) for name, cell in job_row(job).items()}
        table.writerow(row)
        assert not any(isinstance(cell, str) and cell.startswith(FORMULA_STARTS) for cell in row.values())
        path = Path("/folder") / safe_name(job.custom_id, ".vtt")
        assert ".." not in path.parts and "\0" not in str(path)


def show_event(message: gateway_pb2.CaptionEvent) -> None:
    event = codec.read_caption_event(message)
    if isinstance(event, Caption):
        json.dumps(caption_dict(event))
        assert "\x1b" not in closing_line(event)


def show_batch(message: archive_pb2.Batch) -> None:
    batch = archive_codec.read_batch(message)
    describe(batch, overall(batch))


PARSERS = {
    "urls": Parser(URLS, read_url),
    "hosts": Parser(ANSWERS, lambda answer: asyncio.run(fetch(answer))),
    "manifests": Parser(
        _json_of("source", "path", "url", "custom_id", "sha256", "seed", "stop", "prompt", "temperature", "num_frames"),
        lambda line: list(read_manifest(io.BytesIO(line), "list.jsonl", Path("/videos"))),
    ),
    "tokens": Parser(TOKEN_FILES, read_tokens),
    "records": Parser(_json_of("v", "key", "caption", "source", "sha256", "summary", "receipt"), read_records),
    "versioned": Parser(
        st.builds(
            lambda caption: json.dumps({"v": 1, "caption": caption}).encode(),
            st.dictionaries(st.sampled_from(("seed", "stop", "prompt", "num_frames")), VALUES),
        ),
        read_records,
    ),
    "rows": Parser(JOB_ROWS, read_row),
    "decoders": Parser(_json_of("Sampled", "Refused", "Progress", "Ready", "Started"), read_answer),
    "target": Parser(any_messages(target_pb2.TargetEvent), session_codec.read_target_event),
    "draft": Parser(any_messages(draft_pb2.DraftEvent), session_codec.read_draft_event),
    "models": Parser(any_messages(common_pb2.ModelInfo), codec.read_model_info),
    "target_starts": Parser(any_messages(target_pb2.TargetStart), session_codec.read_target_start),
    "draft_starts": Parser(any_messages(draft_pb2.DraftStart), session_codec.read_draft_start),
    "judges": Parser(any_messages(target_pb2.Judge), session_codec.read_judge),
    "lines": Parser(any_messages(draft_pb2.DraftRequest), session_codec.read_line),
    "options": Parser(
        any_messages(gateway_pb2.CaptionOptions), lambda message: make_plan(codec.read_options(message), CONFIG)
    ),
    "batches": Parser(
        any_messages(archive_pb2.BatchOptions),
        lambda message: check_batch(archive_codec.read_batch_options(message), CONFIG),
    ),
    "items": Parser(
        any_messages(archive_pb2.BatchItem),
        lambda message: read_item(archive_codec.read_batch_item(message), 1, BATCH, Priority.NORMAL, CONFIG),
    ),
    "captions": Parser(any_messages(gateway_pb2.CaptionEvent), show_event),
    "shown_batches": Parser(any_messages(archive_pb2.Batch), show_batch),
    "shown_jobs": Parser(any_messages(archive_pb2.ListJobsResponse), show_jobs),
    "gateways": Parser(any_messages(gateway_pb2.GatewayInfo), codec.read_gateway_info),
    "submits": Parser(any_messages(archive_pb2.SubmitBatchResponse), archive_codec.read_submitted),
}
_tried: dict[str, int] = {}


@pytest.fixture(autouse=True)
def _share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is for all parsers."""
    if asked := os.environ.get(SECONDS_VARIABLE):
        monkeypatch.setenv(SECONDS_VARIABLE, str(float(asked) / len(PARSERS)))


@pytest.mark.parametrize("name", PARSERS)
def test_a_value_or_our_error(name: str) -> None:
    parser = PARSERS[name]

    said: list[str] = []

    def attack(example: Any) -> None:
        said.clear()
        try:
            parser.read(example)
        except SlipstreamError as error:
            said.append(str(error))
        assert all(message and len(message) <= MAX_MESSAGE_CHARS for message in said)

    _tried[name] = fuzz(parser.takes, attack, USUAL_EXAMPLES)
    report_findings("fuzz", {"examples": sum(_tried.values()), "by_parser": _tried})
