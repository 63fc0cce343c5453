"""The lines of a batch's files: requests in, answers and errors out. Pure but for the media, which become files that
gateways can open."""

import json
import os
import shutil
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from slipstream.archive.messages import BatchItem, Job, JobKind, document_values
from slipstream.archive.queue import JobState
from slipstream.documents.reading import DocumentOptions
from slipstream.errors import (
    DeadlineExceeded,
    InvalidConfig,
    InvalidRequest,
    LimitExceeded,
    ObjectChanged,
    Overloaded,
    PermissionDenied,
    ServiceUnavailable,
    SessionExists,
    SlipstreamError,
    Unauthenticated,
    VideoNotFound,
)
from slipstream.messages import Caption
from slipstream.options import TOLD_BESIDE
from slipstream.service_info import GatewayInfo
from slipstream.services.front.api_errors import ApiError, about, as_api_error
from slipstream.services.front.batch_forms import CHAT, ENDPOINTS, BatchEndpoint, Kept
from slipstream.services.front.batch_records import HttpBatch, written_whole
from slipstream.services.front.chat_messages import Medium, MediumKind, RemoteFile, StoredFile
from slipstream.services.front.chat_request import OF_SEVERAL, ChatRequest, check_kind
from slipstream.services.front.completions import PAGE_BREAK, Completion, Written
from slipstream.services.front.file_store import FileStore
from slipstream.services.front.frames import frame_windows, write_avi
from slipstream.services.front.gateways import short_name
from slipstream.services.front.json_body import JsonBody, Media, Window
from slipstream.services.front.sources import BEGINNING_BYTES, is_document, is_picture

MAX_ID_CHARS = 256
MAX_TOLD = 100
"""Wrong lines that are told of one batch."""
BLOCK_BYTES = 256 * 1024
_BY_STATUS: dict[str, type[SlipstreamError]] = {
    kind.status: kind
    for kind in (
        DeadlineExceeded,
        InvalidConfig,
        InvalidRequest,
        LimitExceeded,
        ObjectChanged,
        Overloaded,
        PermissionDenied,
        ServiceUnavailable,
        SessionExists,
        Unauthenticated,
        VideoNotFound,
    )
}
"""The widest of our errors with that gRPC status."""
_UNNAMED = dict.fromkeys(OF_SEVERAL)
"""What the archive says of these options is of one of several fields, such as `max_tokens`; which is not known."""

# -- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadLine:
    """A line that is no request."""

    number: int
    """From 1; 0: it is the file that is wrong."""
    message: str
    code: str = "invalid_line"

    def shown(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {"code": self.code, "message": self.message, "param": None, "line": self.number}


@dataclass(frozen=True)
class BatchLine:
    """One request, as it stands in the file."""

    number: int
    """From 1."""
    custom_id: str
    body: Any
    json: JsonBody
    """Holds its media."""


@contextmanager
def read_lines(
    file: IO[bytes], url: str, max_json_bytes: int, max_media_bytes: int
) -> Iterator[Iterator[BatchLine | BadLine]]:
    """The requests to `url`, each good until the next is taken or the context is left; blank lines are none. The file
    may begin with UTF-8's mark, as some editors write it."""
    with ExitStack() as held:
        yield _lines(file, url, partial(JsonBody, max_json_bytes, max_media_bytes), held)


def _lines(
    file: IO[bytes], url: str, new_body: Callable[[], JsonBody], held: ExitStack
) -> Iterator[BatchLine | BadLine]:
    """What is read of one line is `held` until the next, and not by this generator: whoever leaves it may keep it."""
    number, names, rest = 0, set[str](), file.read(len(BOM_UTF8)).removeprefix(BOM_UTF8)
    is_end = False
    while not is_end or rest:
        held.close()
        body = held.enter_context(new_body())
        number += 1
        try:
            rest, is_end, is_blank = _feed_line(file, rest, body)
            if not is_blank:
                yield _read_line(number, url, body, names)
        except ApiError as error:
            yield BadLine(number, str(error), error.code or "invalid_line")
            if error.status == 413:  # it was not read to its end
                return


def _feed_line(file: IO[bytes], rest: bytes, body: JsonBody) -> tuple[bytes, bool, bool]:
    """What was read beyond the line, whether the file has ended, and whether the line is blank."""
    is_blank = True
    while True:
        block = rest or file.read(BLOCK_BYTES)
        line, newline, rest = block.partition(b"\n")
        is_blank = is_blank and not line.strip()
        if not is_blank:
            body.feed(line)
        if newline or not block:
            return rest, not block, is_blank
        rest = b""


def _read_line(number: int, url: str, body: JsonBody, names: set[str]) -> BatchLine | BadLine:
    value = body.value()
    if not isinstance(value, dict):
        return BadLine(number, "a line must be an object")
    said = {name for name, inner in value.items() if inner is not None}
    if unknown := said - {"custom_id", "method", "url", "body"}:
        return BadLine(number, f"{min(unknown)[:64]!r} is not supported; leave it out")
    name = value.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID_CHARS or not name.isprintable():
        return BadLine(number, f"custom_id must have 1 to {MAX_ID_CHARS} printable characters")
    if name in body.media:
        return BadLine(number, "custom_id is a data: URL in base64, which media alone may be")
    if name in names:
        return BadLine(number, f"custom_id {name!r} occurs twice", "duplicate_custom_id")
    if value.get("method") != "POST" or value.get("url") != url:
        return BadLine(number, f'method must be "POST" and url "{url}"', "invalid_url")
    if not isinstance(value.get("body"), dict):
        return BadLine(number, "body must be an object")
    names.add(name)
    return BatchLine(number, name, value["body"], body)


# -- items ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ItemMaker:
    """Makes an archive's items of a batch's lines."""

    info: GatewayInfo
    model: str
    owner: str
    files: FileStore
    media_folder: Path | None
    """Where gateways can read; None: there is no such place."""
    endpoint: BatchEndpoint = CHAT
    keep: Callable[[str, Kept], None] = lambda custom_id, kept: None
    """Hears what the answer to a request is to have of it, before there is an item."""

    def item(self, line: BatchLine) -> BatchItem:
        """Raises `ApiError` for a request that cannot be served, and what a full disk raises."""
        try:
            asked = self.endpoint.read(line.body, line.json.media)
            item = self._item(line, asked)
        except ApiError as error:
            raise self.endpoint.sent_names(error) from error
        self.keep(line.custom_id, self.endpoint.kept(line.body, asked))
        return item

    def _item(self, line: BatchLine, asked: ChatRequest) -> BatchItem:
        if asked.stream:
            raise ApiError("a batch streams nothing; leave stream out", param="stream")
        if asked.num_choices > 1:
            raise ApiError("a batch has one text a request: give it as often, with seeds of their own", param="n")
        if asked.model != self.model:
            raise ApiError(
                f"there is no model {asked.model!r}; this server has {self.model!r}",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        source, kind = self._source(line, asked)
        check_kind(asked, kind is JobKind.DOCUMENT)
        _check_whole(asked)
        document = _document_values(asked.document) if kind is JobKind.DOCUMENT else {}
        return BatchItem(line.custom_id, source, asked.options.given(), kind=kind, document=document)

    def _source(self, line: BatchLine, asked: ChatRequest) -> tuple[str, JobKind]:
        medium, source = asked.medium, asked.medium.source
        if isinstance(source, RemoteFile):
            return source.path, _kind(is_document(medium, source.path.lower().encode(), self.info))
        if isinstance(source, str):
            return source, _kind(is_document(medium, source.partition("?")[0].lower().encode(), self.info))
        if self.media_folder is None:
            raise ApiError(
                "this server's batches take no media by value; give file:///PATH or https://",
                param=medium.param, code="not_served",
            )  # fmt: skip
        self.media_folder.mkdir(parents=True, exist_ok=True)
        path = self.media_folder / str(line.number)
        if isinstance(source, StoredFile):
            with about(medium.param):
                stored = self.files.path(self.owner, source.file_id)
            with stored.open("rb") as file:
                beginning = file.read(BEGINNING_BYTES)
                is_paper = is_document(medium, beginning, self.info)
                if is_picture(medium, beginning) and not is_paper:
                    _write_video([Window.whole(file)], medium, path)
                else:
                    _name_again(stored, path)
            return str(path), _kind(is_paper)
        assert isinstance(source, Media)
        window = line.json.window(source.start, source.end)
        beginning = window.read(BEGINNING_BYTES)
        is_paper = is_document(medium, beginning, self.info)
        window.seek(0)
        if medium.kind is MediumKind.FRAMES or (is_picture(medium, beginning) and not is_paper):
            _write_video(frame_windows(line.json.spool, medium.frames or (source,)), medium, path)
        else:
            with written_whole(path) as output:
                shutil.copyfileobj(window, output)
        return str(path), _kind(is_paper)


def _write_video(pictures: Sequence[Window], medium: Medium, path: Path) -> None:
    with written_whole(path) as output:
        write_avi(pictures, medium.frames_per_second, output, medium.param)


def _name_again(stored: Path, path: Path) -> None:
    """A second name of a file, however many lines are about it; a copy where it can have none, as in another file
    system."""
    try:
        with suppress(FileExistsError):  # the line was handed in before
            os.link(stored, path)
    except OSError:
        with written_whole(path) as output, stored.open("rb") as file:
            shutil.copyfileobj(file, output)


def _kind(is_paper: bool) -> JobKind:
    return JobKind.DOCUMENT if is_paper else JobKind.VIDEO


def _document_values(document: DocumentOptions) -> Mapping[str, Any]:
    """What an archive can be told of how a document is read. Raises `ApiError` for the rest."""
    if document.request.ocr_dpi:
        raise ApiError("slipstream.ocr_dpi is not supported in batches", param="slipstream.ocr_dpi")
    return document_values(document)


def _check_whole(asked: ChatRequest) -> None:
    """Raises `ApiError` for segments, of which an answer could say neither the times nor which have no text, nor are
    they had of a chat that is no batch's; and for what no job keeps: what is told of a caption beside its text."""
    if asked.options.in_segments:
        why = "an answer is about the video as a whole; `slipstream archive submit` captions segments"
        raise as_api_error(InvalidRequest(f"segments must be left out: {why}"), asked.params)
    for name in TOLD_BESIDE:
        if asked.options.get(name, False):
            param = asked.params.get(name, name)
            raise ApiError(
                f"{param} is not supported in batches; leave it out", param=param, code="unsupported_parameter"
            )


class LineFault(Exception):
    """This server failed in a line; the cause says how. `line` counts from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line}")
        self.line = line


@dataclass
class BatchItems:
    """The items of a batch, once: those of requests that can be served. The others' lines go to `refused`."""

    batch_id: str
    lines: Iterator[BatchLine | BadLine]
    maker: ItemMaker
    refused: IO[bytes]
    num_refused: int = 0

    def __iter__(self) -> Iterator[BatchItem]:
        for line in self.lines:
            assert isinstance(line, BatchLine), "the file was checked, and never changes"
            try:
                yield self.maker.item(line)
            except ApiError as error:
                self.num_refused += 1
                self.refused.write(error_line(f"{self.batch_id}-{line.number}", line.custom_id, error))
            except (SlipstreamError, OSError):
                raise
            except Exception as error:
                raise LineFault(line.number) from error


# -- answers ----------------------------------------------------------------------------------------------------------


def answer_line(batch: HttpBatch, job: Job, captions: Sequence[Caption], model: str, kept: Kept) -> bytes:
    """The line of a request that was answered; `captions`: one, or one a page; `kept`: of the request."""
    text = PAGE_BREAK.join(caption.text for caption in captions)
    name = f"{batch.batch_id}-{job.job_id}"
    draft = short_name(job.receipt.draft.model_id) if job.receipt and job.receipt.draft else ""
    completion = Completion(f"chatcmpl-{name}", model, int(job.ended_s), draft)
    form = ENDPOINTS[batch.endpoint].form(completion, kept, name)
    body = form.whole([Written(text, captions, functions=kept.functions)])
    if job.receipt is not None:
        seen = body["slipstream"]["receipt"]
        seen |= {"media_sha256": job.receipt.video_sha256, "media_bytes": job.receipt.video_bytes}
        seen |= {"runs": job.receipt.runs, "reused": job.receipt.reused, "revision": job.receipt.target.revision}
    response = {"status_code": 200, "request_id": job.job_id, "body": body}
    return _line(name, job.custom_id, response, None)


def job_error_line(batch_id: str, job: Job, why_cancelled: str) -> bytes:
    """The line of a job without a result. `why_cancelled`: the code of one that was never run to its end."""
    if job.state is JobState.CANCELLED:
        return never_run_line(f"{batch_id}-{job.job_id}", job.custom_id, why_cancelled)
    kind = _BY_STATUS.get(job.error_code, SlipstreamError)
    error = as_api_error(kind(job.error), _UNNAMED)
    return error_line(f"{batch_id}-{job.job_id}", job.custom_id, error, job.job_id)


def never_run_line(name: str, custom_id: str, code: str) -> bytes:
    """The line of a request whose batch ended first."""
    return _line(name, custom_id, None, {"code": code, "message": "the request was not run before its batch ended"})


def error_line(name: str, custom_id: str, error: ApiError, request_id: str = "") -> bytes:
    """The line of a request that was refused."""
    response = {"status_code": error.status, "request_id": request_id, "body": error.body}
    return _line(name, custom_id, response, {"code": error.code or "invalid_request", "message": str(error)})


def _line(name: str, custom_id: str, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
