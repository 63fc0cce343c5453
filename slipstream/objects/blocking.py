"""Objects for a command, which has no event loop to keep free: read as files, written whole, listed.

Credentials and endpoints are those of the command's own environment.
"""

import errno
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from slipstream.errors import InvalidConfig, InvalidRequest, ObjectNotFound
from slipstream.objects.store import (
    ObjectFacts,
    ObjectStore,
    ObjectUrl,
    changed,
    is_remote_object,
    path_at,
    store_errors_translated,
)

READ_BYTES = 4 * 1024**2
"""Of one request."""


class BlockingStore(ObjectStore):
    """Calls raise what those of `ObjectStore` do."""

    whose = "this command"

    def open(self, url: ObjectUrl) -> BinaryIO:
        """The object as a binary file: read by ranges, and may be gone through again."""
        return io.BufferedReader(_ObjectFile(self, self.facts_now(url)), READ_BYTES)

    def facts_now(self, url: ObjectUrl) -> ObjectFacts:
        """See `ObjectStore.facts`."""
        with store_errors_translated(url, self.whose):
            found = self._calls.head(self._store, url.key)
        return ObjectFacts(url, found["size"], found.get("e_tag") or "")

    def read_now(self, facts: ObjectFacts, start: int, end: int) -> bytes:
        """See `ObjectStore.read`."""
        asked = {"range": (start, end)} | ({"if_match": facts.etag} if facts.etag else {})
        with store_errors_translated(facts.url, self.whose):
            answer = self._calls.get(self._store, facts.url.key, options=asked)
            data = bytes(answer.bytes())
        if len(data) != end - start or (answer.meta.get("e_tag") or "") != facts.etag:  # of a store that checks nothing
            raise changed(facts.url)
        return data

    def put(self, url: ObjectUrl, content: IO[bytes]) -> None:
        """Writes the object, over one that is there: whoever reads it has either, never a part."""
        with store_errors_translated(url, self.whose):
            self._calls.put(self._store, url.key, content)

    def remove(self, url: ObjectUrl) -> None:
        """An object that is not there is as good as removed."""
        with suppress(ObjectNotFound), store_errors_translated(url, self.whose):
            self._calls.delete(self._store, url.key)

    def facts_below(self, prefix: ObjectUrl) -> Iterator[ObjectFacts]:
        """Of the objects in a folder, in the store's order, page by page; none of them is asked for itself."""
        with store_errors_translated(prefix, self.whose):
            for some in self._calls.list(self._store, prefix=prefix.key or None):
                for found in some:
                    yield ObjectFacts(ObjectUrl(self.root, found["path"]), found["size"], found.get("e_tag") or "")


class _ObjectFile(io.RawIOBase):
    def __init__(self, store: BlockingStore, facts: ObjectFacts) -> None:
        self._store, self._facts, self._position = store, facts, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = (0, self._position, self._facts.num_bytes)[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._position + len(buffer), self._facts.num_bytes)
        if end <= self._position:
            return 0
        data = self._store.read_now(self._facts, self._position, end)
        buffer[: len(data)] = data
        self._position = end
        return len(data)


@cache
def blocking_store(root: str) -> BlockingStore:
    """Each root is opened once. Raises `InvalidConfig`."""
    return BlockingStore(root)


def open_object(text: str) -> BinaryIO:
    """The object of an address, as a binary file. Raises `InvalidRequest`, `InvalidConfig` and what a store says."""
    url = ObjectUrl.parse(text)
    return blocking_store(url.root).open(url)


def open_file(text: str) -> BinaryIO:
    """A file of this machine, by its path or as file:///PATH, or the object of an address. Raises `InvalidRequest` for
    a file that cannot be read, and what `open_object` does."""
    if is_remote_object(text):
        return open_object(text)
    try:
        return open(local_path(text), "rb")
    except OSError as error:
        raise InvalidRequest(f"cannot read {text!r}: {error.strerror}") from None


def local_path(text: str) -> Path:
    """Of a path, or of file:///PATH."""
    return Path(path_at(text))


def place_of(text: str) -> str:
    """The one name of a file or an object, whatever path, link or address it is named by. Raises `InvalidRequest`."""
    return str(ObjectUrl.parse(text)) if is_remote_object(text) else os.path.realpath(local_path(text))


def real_path(path: Path) -> Path:
    """Absolute and without links, also of what is not there yet. Raises `InvalidConfig` for links in a circle."""
    try:
        os.path.realpath(path, strict=True)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InvalidConfig(f"{path}: its links lead in a circle") from None
    return Path(os.path.realpath(path))


def objects_below(text: str) -> Iterator[ObjectFacts]:
    """Those of a folder's address. Raises the same."""
    prefix = ObjectUrl.parse(text)
    return blocking_store(prefix.root).facts_below(prefix)


@contextmanager
def writing_bytes(url: ObjectUrl, keep_empty: bool = True) -> Iterator[IO[bytes]]:
    """A file that becomes the object when the context is left without an error. Not `keep_empty`: one without content
    becomes none, and an older one goes. Raises what a store says, and `InvalidConfig` where there is no room for it
    beforehand."""
    with _kept_for(url) as content:
        yield content
        content.flush()
        if content.tell() or keep_empty:
            content.seek(0)
            blocking_store(url.root).put(url, content)
        else:
            blocking_store(url.root).remove(url)


@contextmanager
def _kept_for(url: ObjectUrl) -> Iterator[IO[bytes]]:
    try:
        with tempfile.TemporaryFile() as content:
            yield content
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{url} is kept in {tempfile.gettempdir()} until it is whole: {error.strerror}"
        raise InvalidConfig(f"{reason}; set TMPDIR to a folder with room") from None


@contextmanager
def writing(url: ObjectUrl, keep_empty: bool = True) -> Iterator[TextIO]:
    """The same of text."""
    with writing_bytes(url, keep_empty) as content:
        text = io.TextIOWrapper(content, encoding="utf-8", errors="backslashreplace", newline="")
        yield text
        text.detach()
