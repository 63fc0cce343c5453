"""How a batch's requests are read and its answers told: as at the endpoint that it names. What an answer has of its
request is kept beside the batch, as its job has the text alone and the file of requests may be deleted."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.chat_request import ChatRequest, read_chat
from slipstream.services.front.completions import ChatForm, Completion, Form
from slipstream.services.front.file_store import sync
from slipstream.services.front.function_calls import Functions
from slipstream.services.front.json_body import Media
from slipstream.services.front.responses import REPEATED, ResponseForm
from slipstream.services.front.responses_request import read_response, sent_names

# -- endpoints --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Of one request, until its answer is written."""

    said: Mapping[str, Any] = field(default_factory=dict)
    """Its fields that the answer repeats."""
    functions: Functions | None = None
    """Of which the answer calls one."""


@dataclass(frozen=True)
class BatchEndpoint:
    """What the requests of a batch are for."""

    url: str
    read: Callable[[Any, Mapping[str, Media]], ChatRequest]
    """The request in a body. Raises `ApiError`."""
    form: Callable[[Completion, Kept, str], Form]
    """How the answer is told; the last argument names it."""
    repeated: tuple[str, ...] = ()
    """Fields of a request that its answer has."""
    sent_names: Callable[[ApiError], ApiError] = lambda error: error
    """The same about the fields that were sent, where they are not those of a chat."""

    def kept(self, body: Mapping[str, Any], asked: ChatRequest) -> Kept:
        """What is to be kept of a request."""
        return Kept({name: body[name] for name in self.repeated if body.get(name) is not None}, asked.functions)


def _response(completion: Completion, kept: Kept, name: str) -> ResponseForm:
    is_called = kept.functions is not None
    return ResponseForm(completion, kept.said, name, is_called=is_called, clock=lambda: completion.created_s)


CHAT = BatchEndpoint("/v1/chat/completions", read_chat, lambda completion, kept, name: ChatForm(completion))
RESPONSES = BatchEndpoint("/v1/responses", read_response, _response, REPEATED, sent_names)
ENDPOINTS = {endpoint.url: endpoint for endpoint in (CHAT, RESPONSES)}

# -- on disk ----------------------------------------------------------------------------------------------------------


class KeptWriter:
    """Adds to the file of what is kept, a line a request that anything is kept of; it is there before the request's job
    is. Whoever hands the same in again adds what is not there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._known: Container[str] = ()
        """Names of requests that are in the file already."""

    def add(self, custom_id: str, kept: Kept) -> None:
        """Raises what a full disk raises."""
        if kept == Kept():
            return
        if self._file is None:
            with KeptReader(self._path) as known:
                self._known = known.names
            self._file = self._path.open("ab")
        if custom_id in self._known:
            return
        called = kept.functions
        functions = None if called is None else {"names": called.names, "is_named": called.is_named}
        line = json.dumps({"custom_id": custom_id, "said": kept.said, "functions": functions}, separators=(",", ":"))
        self._file.write(b"\n" + line.encode() + b"\n")  # what was cut off before is a line of its own
        self._file.flush()

    def close(self) -> None:
        """What was added is durable. Raises what a full disk raises."""
        if self._file is None:
            return
        with self._file as file:
            sync(file)


@asynccontextmanager
async def kept_durably(path: Path) -> AsyncIterator[KeptWriter]:
    """To be written to until this is left, by which time all of it is durable."""
    writer = KeptWriter(path)
    try:
        yield writer
    finally:
        await asyncio.to_thread(writer.close)


class KeptReader:
    """What is kept of each request, by its name. Only where it stands is held in memory."""

    def __init__(self, path: Path) -> None:
        self._places: dict[str, int] = {}
        self._file: IO[bytes] | None = None
        if not path.exists():
            return
        self._file = path.open("rb")
        place = 0
        for line in self._file:
            if read := _read(line):
                self._places[read[0]] = place
            place += len(line)

    def __enter__(self) -> "KeptReader":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def names(self) -> Container[str]:
        """Of the requests that something is kept of."""
        return self._places.keys()

    def get(self, custom_id: str) -> Kept:
        """Nothing of a request that nothing was kept of."""
        place = self._places.get(custom_id)
        if self._file is None or place is None:
            return Kept()
        self._file.seek(place)
        read = _read(self._file.readline())
        return Kept() if read is None else read[1]


def _read(line: bytes) -> tuple[str, Kept] | None:
    """A line that was cut off is none."""
    try:
        said = json.loads(line)
        called = said["functions"]
        functions = None if called is None else Functions(tuple(called["names"]), called["is_named"])
        return str(said["custom_id"]), Kept(said["said"], functions)
    except (ValueError, TypeError, KeyError):
        return None
