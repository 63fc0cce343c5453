"""One interface to s3://, gs://, az:// and file:// through obstore, which is an optional extra.

Credentials and endpoints come from the environment of the process that reads or writes (AWS_*, GOOGLE_*, AZURE_*),
never from a request. Errors are those of `slipstream.errors`, and name the object, never a credential.
"""

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    ObjectChanged,
    ObjectNotFound,
    ObjectUnavailable,
    PermissionDenied,
    SlipstreamError,
)

SCHEMES = ("s3", "gs", "az", "file")
_ADDRESS = re.compile("([a-zA-Z][a-zA-Z0-9+.-]*)://")
CONNECT_S, REQUEST_S, RETRY_S = 10, 60, 60
MAX_URL_CHARS = 2048
ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}
"""The one variable of each that the library leaves unread where it is told limits of time."""
_STATUS = re.compile(r"status code: (401|403|404)\b")
_UNFLUSHED = (errno.EACCES, errno.EBADF, errno.EINVAL, errno.ENOTSUP)
"""Of a folder: somebody else has made it, or its file system takes no such call and writes it by itself."""
IDENTITY = "object-"
"""What stands for the content of an object that was not read as a whole begins so; no digest does."""


@dataclass(frozen=True)
class ObjectUrl:
    """The address of one object, or of all whose keys begin with `key`."""

    root: str
    """What a store is opened for: `s3://bucket`, `gs://bucket`, `az://account/container`, `file://`."""
    key: str
    """Without a leading slash; "" for the whole root."""

    def __str__(self) -> str:
        return f"{self.root}/{self.key.replace('%', '%25') if self.root == 'file://' else self.key}"

    def below(self, name: str) -> "ObjectUrl":
        """`name` in this folder."""
        return ObjectUrl(self.root, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    @classmethod
    def parse(cls, text: str) -> "ObjectUrl":
        """Raises `InvalidRequest` for what is no address of an object."""
        scheme, rest = scheme_of(text), text.partition("://")[2]
        if scheme not in SCHEMES:
            raise InvalidRequest(f"{text!r} is no address of an object: it begins with one of {_listed(SCHEMES)}")
        if scheme == "file":
            if not rest.startswith("/"):
                raise InvalidRequest(f"{text!r} names a host; a file on this machine is file:///PATH")
            rest = unquote(rest)
        if len(text) > MAX_URL_CHARS or not rest.isprintable():
            raise InvalidRequest(f"the address of an object has at most {MAX_URL_CHARS} characters, all printable")
        if any(step in (".", "..") for step in rest.split("/")):
            raise InvalidRequest(f"{text!r} has a step `.` or `..`; give the object's own key")
        if scheme == "file":
            return cls("file://", "/".join(filter(None, rest.split("/"))))
        if "//" in rest:
            raise InvalidRequest(f"{text!r} has a step without a name (`//`), with which no object can be asked for")
        parts = rest.split("/", 2 if scheme == "az" else 1)
        bucket, key = parts[: 2 if scheme == "az" else 1], parts[2 if scheme == "az" else 1 :]
        if not all(bucket) or (scheme == "az" and len(bucket) < 2):
            form = "az://ACCOUNT/CONTAINER/KEY" if scheme == "az" else f"{scheme}://BUCKET/KEY"
            raise InvalidRequest(f"{text!r} names no bucket: write {form}")
        return cls(f"{scheme}://{'/'.join(bucket)}", key[0].lstrip("/") if key else "")


def scheme_of(text: str) -> str:
    """How an address begins, in small letters: it may be written in any (RFC 3986, 3.1). "" for what is none."""
    found = _ADDRESS.match(text)
    return found[1].lower() if found else ""


def is_file_url(text: str) -> bool:
    """Whether it is a path of this machine as an address."""
    return scheme_of(text) == "file" and text.partition("://")[2].startswith("/")


def path_at(text: str) -> str:
    """Of file:///PATH the path, in which %XX stands for a byte (RFC 3986), but not for 0, which no path has. A path
    stays as it is."""
    if not is_file_url(text):
        return text
    path = text.partition("://")[2]
    return path if "%00" in path else unquote(path)


def check_scheme(source: str) -> None:
    """Raises `InvalidRequest` for what is meant as an address and cannot be fetched, such as http://HOST/PATH."""
    if scheme_of(source) not in ("", "https", *SCHEMES):
        raise InvalidRequest(f"{source}: an address begins with https://, s3://, gs:// or az://")


def is_object_url(text: str) -> bool:
    """Whether a source is meant as an object's address."""
    return scheme_of(text) in SCHEMES


def is_remote_object(text: str) -> bool:
    """The same, of one that is not on this machine."""
    return is_object_url(text) and scheme_of(text) != "file"


@dataclass(frozen=True)
class ObjectFacts:
    """What a store says of one object."""

    url: ObjectUrl
    num_bytes: int
    etag: str
    """Changes when the content does; "" where the store has none."""


class ObjectStore:
    """The objects of one root. Calls may run at once; none blocks the event loop."""

    whose = "this server"
    """Credentials, as errors name them."""

    def __init__(self, root: str) -> None:
        """Raises `InvalidConfig` without the extra `objects`, or where the environment makes no store of it."""
        try:
            import obstore
            from obstore.store import AzureStore, from_url
        except ImportError:
            raise InvalidConfig("objects need obstore: pip install 'slipstream[objects]'") from None
        self.root = root
        self._calls: Any = obstore
        scheme, _, bucket = root.partition("://")
        allow_http = os.environ.get(ALLOW_HTTP.get(scheme, ""), "").lower() == "true"
        options: dict[str, Any] = {
            "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=RETRY_S)},
            "client_options": {
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "timeout": timedelta(seconds=REQUEST_S),
                **({"allow_http": True} if allow_http else {}),
            },
        }
        try:
            if scheme == "az":  # whose first word the library would take for the container
                account, _, container = bucket.partition("/")
                self._store: Any = AzureStore(container, account_name=account, **options)
            else:
                self._store = from_url("file:///") if scheme == "file" else from_url(root, **options)
        except Exception as error:
            raise InvalidConfig(f"{root} cannot be opened with this environment: {_first_line(error)}") from None

    async def facts(self, url: ObjectUrl) -> ObjectFacts:
        """Raises `ObjectNotFound`, `PermissionDenied` or `ObjectUnavailable`, like all calls."""
        with store_errors_translated(url, self.whose):
            found = await self._calls.head_async(self._store, url.key)
        return ObjectFacts(url, found["size"], found.get("e_tag") or "")

    async def read(self, facts: ObjectFacts, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from `start` to `end`, which is behind the last one. Raises `ObjectChanged` when the object is not
        the one any more that `facts` are of."""
        end = facts.num_bytes if end is None else min(end, facts.num_bytes)
        if start >= end:
            return b""
        asked: dict[str, Any] = {"range": (start, end)} | ({"if_match": facts.etag} if facts.etag else {})
        with store_errors_translated(facts.url, self.whose):
            answer = await self._calls.get_async(self._store, facts.url.key, options=asked)
            data = bytes(await answer.bytes_async())
        if len(data) != end - start or (answer.meta.get("e_tag") or "") != facts.etag:  # of a store that checks nothing
            raise changed(facts.url)
        return data

    async def put_new(self, url: ObjectUrl, data: bytes) -> bool:
        """Writes an object that is not there yet, whole or not at all (If-None-Match: *). False: there was one, and it
        is as it was. Either outlives a loss of power: the library leaves to the kernel when files are written."""
        is_new = True
        try:
            with store_errors_translated(url, self.whose):
                await self._calls.put_async(self._store, url.key, data, mode="create")
        except _AlreadyThere:
            is_new = False
        if self.root == "file://":
            with store_errors_translated(url, self.whose):
                await asyncio.to_thread(_write_out, Path("/", url.key))
        return is_new

    async def listed(self, prefix: ObjectUrl) -> AsyncIterator[ObjectFacts]:
        """The objects below a folder, in the store's order."""
        with store_errors_translated(prefix, self.whose):
            async for some in self._calls.list(self._store, prefix=prefix.key or None):
                for found in some:
                    yield ObjectFacts(ObjectUrl(self.root, found["path"]), found["size"], found.get("e_tag") or "")

    async def delete(self, url: ObjectUrl) -> None:
        """An object that is not there is as good as deleted."""
        with contextlib.suppress(ObjectNotFound), store_errors_translated(url, self.whose):
            await self._calls.delete_async(self._store, url.key)


def _write_out(path: Path) -> None:
    """To the disk: a file, and its name in the folder that may have been made for it, and that one's."""
    _flush(path)
    for folder in path.parents[:2]:
        try:
            _flush(folder)
        except OSError as error:
            if error.errno not in _UNFLUSHED:
                raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStores:
    """Every root opened once."""

    def __init__(self) -> None:
        self._open: dict[str, ObjectStore] = {}

    def of(self, url: ObjectUrl) -> ObjectStore:
        """Raises `InvalidConfig`."""
        if url.root not in self._open:
            self._open[url.root] = ObjectStore(url.root)
        return self._open[url.root]


class _AlreadyThere(SlipstreamError):
    """`put_new` alone sees it."""


@contextlib.contextmanager
def store_errors_translated(url: ObjectUrl, whose: str) -> Iterator[None]:
    """The library's errors in our words. `whose` credentials they are."""
    from obstore import exceptions as theirs

    try:
        yield
    except (FileNotFoundError, theirs.NotFoundError):
        raise ObjectNotFound(f"there is no object {url}") from None
    except theirs.AlreadyExistsError:
        raise _AlreadyThere(str(url)) from None
    except theirs.PreconditionError:
        raise changed(url) from None
    except (theirs.PermissionDeniedError, theirs.UnauthenticatedError, PermissionError):
        raise _not_opened(url, whose) from None
    except (theirs.BaseError, OSError) as error:
        raise _by_status(error, url, whose) from None
    except ValueError as error:
        raise InvalidRequest(f"{url} is no key that can be asked for: {_first_line(error)}") from None


def _by_status(error: Exception, url: ObjectUrl, whose: str) -> SlipstreamError:
    """Of an error whose kind the library does not tell, as of a listing's."""
    found = _STATUS.search(str(error))
    if found is None:
        return ObjectUnavailable(f"{url} cannot be reached: {_first_line(error)}")
    return ObjectNotFound(f"there is no {url}") if found[1] == "404" else _not_opened(url, whose)


def _not_opened(url: ObjectUrl, whose: str) -> PermissionDenied:
    return PermissionDenied(f"the credentials of {whose} do not open {url}")


def changed(url: ObjectUrl) -> ObjectChanged:
    """What to raise for an object that is another one now."""
    return ObjectChanged(f"{url} changed while it was read; try again once it is complete")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name}://" for name in names)
