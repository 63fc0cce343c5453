"""The medium of a request as the gateway's client takes it: a part of the spool, a path, or a file that was fetched."""

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from slipstream.archive.messages import DOCUMENT_EXTENSIONS
from slipstream.client.caption_client import RemotePath, Video
from slipstream.client.document_client import check_reads_documents
from slipstream.errors import InvalidConfig, LimitExceeded
from slipstream.rpc.callers import Places
from slipstream.service_info import GatewayInfo
from slipstream.services.front.api_errors import ApiError, about, as_api_error, no_room
from slipstream.services.front.chat_messages import Medium, MediumKind, RemoteFile, StoredFile
from slipstream.services.front.completions import MediaFacts
from slipstream.services.front.frames import frame_windows, write_avi
from slipstream.services.front.json_body import IN_MEMORY_BYTES, JsonBody, Media, Window

PICTURES = re.compile(rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|RIFF.{4}WEBP", re.DOTALL)
"""How those begin that can be frames of a video."""
DOCUMENTS = re.compile(rb"\A(?:II[*+]\0|MM\0[*+])|%PDF-")
"""How a TIFF begins, and what a PDF has somewhere in its beginning: other bytes may stand before it."""
BEGINNING_BYTES = 1024
"""Of a medium, by which its kind is told; a reader looks as far for a PDF's mark."""
DOCUMENT_ENDINGS = tuple(map(str.encode, DOCUMENT_EXTENSIONS))


class Fetch(Protocol):
    """How media are fetched: `Fetcher.fetch`."""

    async def __call__(self, source: str, sink: Any, /) -> None:
        """Raises what is wrong with the address, or with who answers there."""


class Store(Protocol):
    """Where files of /v1/files are found."""

    def open(self, owner: str, file_id: str) -> IO[bytes]:
        """Raises `ApiError` where the owner has none of that name."""


@dataclass(frozen=True)
class Opened:
    """A medium that can be sent."""

    source: Window | RemotePath
    is_document: bool
    facts: MediaFacts = field(default_factory=MediaFacts)

    def video(self) -> Video:
        """For one reader, beside others."""
        return self.source.again() if isinstance(self.source, Window) else self.source


@dataclass(frozen=True)
class Sources:
    """Opens media for one owner's requests."""

    fetch: Fetch
    store: Store | None
    """None: no files are kept here."""
    max_bytes: int
    """Of what is fetched for one request."""
    spooled: Places
    """Room on disk for that, beside what requests bring themselves."""

    @contextlib.asynccontextmanager
    async def opened(self, medium: Medium, body: JsonBody, info: GatewayInfo, owner: str) -> AsyncIterator[Opened]:
        """The medium, for the time of a request. Raises `ApiError`, and what fetching raises."""
        async with contextlib.AsyncExitStack() as exits:
            yield await self._open(medium, body, info, owner, exits)

    async def _open(
        self, medium: Medium, body: JsonBody, info: GatewayInfo, owner: str, exits: contextlib.AsyncExitStack
    ) -> Opened:
        source = medium.source
        if isinstance(source, RemoteFile):
            return Opened(RemotePath(source.path), is_document(medium, source.path.lower().encode(), info))
        if medium.kind is MediumKind.FRAMES and isinstance(source, Media):
            return await self._frames(medium, frame_windows(body.spool, medium.frames or (source,)), exits)
        if isinstance(source, Media):
            window, facts = body.window(source.start, source.end), MediaFacts(source.sha256, source.num_bytes)
        else:
            file, facts = await self._file(medium, owner, exits), MediaFacts()
            window = await asyncio.to_thread(Window.whole, file)
        beginning = await asyncio.to_thread(window.again().read, BEGINNING_BYTES)
        is_paper = is_document(medium, beginning, info)
        if is_picture(medium, beginning) and not is_paper:
            return await self._frames(medium, [window], exits)
        return Opened(window, is_paper, facts)

    async def _file(self, medium: Medium, owner: str, exits: contextlib.AsyncExitStack) -> IO[bytes]:
        source = medium.source
        if isinstance(source, StoredFile):
            if self.store is None:
                raise ApiError("this server keeps no files", param=medium.param, code="not_served")
            with about(medium.param):
                file = await asyncio.to_thread(self.store.open, owner, source.file_id)
            exits.callback(file.close)
            return file
        assert isinstance(source, str)
        fetched, take = self._spool(exits)
        await self.fetch(source, _Sink(fetched, self.max_bytes, take))
        return fetched

    async def _frames(self, medium: Medium, frames: Sequence[Window], exits: contextlib.AsyncExitStack) -> Opened:
        """Pictures as a video, which is on disk beside them."""
        output, take = self._spool(exits)
        take(sum(frame.num_bytes for frame in frames))
        await asyncio.to_thread(write_avi, frames, medium.frames_per_second, output, medium.param)
        return Opened(await asyncio.to_thread(Window.whole, output), is_document=False)

    def _spool(self, exits: contextlib.AsyncExitStack) -> tuple[IO[bytes], Callable[[int], None]]:
        """A file for the time of a request, and what counts its bytes among those of all."""
        return exits.enter_context(_temporary()), exits.enter_context(self.spooled.held(0))


def _temporary() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)


class _Sink:
    """Writes to a file, off the event loop. `take` counts the bytes of all, and raises where there are too many."""

    def __init__(self, file: IO[bytes], max_bytes: int, take: Callable[[int], None]) -> None:
        self._file, self._take = file, take
        self._max_bytes = self._left = max_bytes

    async def write(self, data: bytes) -> object:
        """Raises `LimitExceeded`, what `take` raises, and `ApiError` where the disk is full."""
        self._left -= len(data)
        if self._left < 0:
            raise LimitExceeded(f"the video has more than {self._max_bytes} bytes, which is this server's limit")
        self._take(len(data))
        try:
            return await asyncio.to_thread(self._file.write, data)
        except OSError as error:
            raise no_room("what was fetched", error) from None


def is_document(medium: Medium, beginning: bytes, info: GatewayInfo) -> bool:
    """Whether a reader is to read it, as `beginning`, its first bytes or its path, says. A picture alone is read where
    there is a reader, and is else a video of one frame. Raises `ApiError` for a document where there is none."""
    if medium.kind in (MediumKind.VIDEO, MediumKind.FRAMES):
        return False
    if is_picture(medium, beginning):
        return info.reads_documents
    is_paper = bool(DOCUMENTS.search(beginning)) or beginning.endswith(DOCUMENT_ENDINGS)
    if is_paper and not info.reads_documents:
        raise _no_reader(medium)
    return is_paper


def is_picture(medium: Medium, beginning: bytes) -> bool:
    """Whether it becomes a video of one frame where it is no document: what was called a picture, and a file that
    begins as one."""
    return medium.kind is MediumKind.IMAGE or (medium.kind is MediumKind.FILE and bool(PICTURES.match(beginning)))


def _no_reader(medium: Medium) -> ApiError:
    try:
        check_reads_documents(GatewayInfo())
    except InvalidConfig as error:
        answer = as_api_error(error)
        answer.param = medium.param
        return answer
    raise AssertionError("a gateway without a reader reads no documents")
