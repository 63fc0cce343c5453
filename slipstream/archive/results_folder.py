"""The folder of objects that results leave for: `s3://bucket/prefix`, `file:///folder` and their like. What is written
there is written once and never changed or removed by us: it is its owner's."""

from collections.abc import AsyncIterator

from slipstream.errors import (
    InvalidConfig,
    InvalidRequest,
    ObjectChanged,
    ObjectNotFound,
    ObjectUnavailable,
    PermissionDenied,
    SlipstreamError,
)
from slipstream.logs import get_logger
from slipstream.objects.store import ObjectFacts, ObjectStores, ObjectUrl

MARKER, MARKER_CONTENT = "slipstream-results.json", b'{"format":1}\n'
KNOWN_OBJECTS = 10_000


class ResultDiffers(SlipstreamError):
    """An object that was to be written is there already, with other content."""

    status = "DATA_LOSS"


class ResultsFolder:
    """One folder of objects."""

    def __init__(self, url: str, option: str = "--results-to") -> None:
        """`option` is what its user calls it. Raises `InvalidConfig` for what is no address of a folder, or without the
        extra `objects`."""
        try:
            self._url = ObjectUrl.parse(url)
        except InvalidRequest as error:
            raise InvalidConfig(f"{option}: {error}") from None
        self._option = option
        self._store = ObjectStores().of(self._url)
        self._facts: dict[str, ObjectFacts] = {}
        """Of objects that were read, as they were then."""
        self._is_marked = False
        """It has a marker, or is to have one."""

    async def check(self, is_used: bool = False) -> None:
        """Writes a small marker: who may not write results should not begin. Raises `InvalidConfig` where that is
        refused. A store that does not answer may do so later, and so may a folder of this machine that `is_used` and
        has no marker: its disk is yet to be mounted."""
        self._is_marked = is_used
        try:
            there = await self.put(MARKER, MARKER_CONTENT)
        except PermissionDenied as error:
            raise InvalidConfig(f"{self._option}: {error}") from None
        except SlipstreamError as error:
            get_logger().warning("results.away", error=str(error))
            return
        if there is not None:
            raise InvalidConfig(
                f"{self._option}: {self.address(MARKER)} is of another program or release; give another folder"
            )
        self._is_marked = True

    def address(self, name: str) -> str:
        """Of an object, for messages."""
        return str(self._url.below(name))

    async def names(self) -> AsyncIterator[str]:
        """Of all objects in the folder."""
        async for facts in self._store.listed(self._url):
            yield facts.url.key.removeprefix(self._url.key).lstrip("/")

    async def put(self, name: str, data: bytes) -> bytes | None:
        """Writes an object, whole, if there is none of this name (a conditional PUT). Answers what is there already, if
        that has other bytes. Raises `PermissionDenied` or `ServiceUnavailable`."""
        await self._check_is_there()
        url = self._url.below(name)
        if await self._store.put_new(url, data):
            return None
        there = await self._store.read(await self._store.facts(url))
        return None if there == data else there

    async def _check_is_there(self) -> None:
        """A folder of this machine may vanish under us, and the library would make it anew: where a disk is not mounted
        any more, on another one, which nobody sees once it is mounted again. Raises `ObjectUnavailable`."""
        if not self._is_marked or self._url.root != "file://":
            return
        marker = self._url.below(MARKER)
        try:
            await self._store.facts(marker)
        except ObjectNotFound:
            raise ObjectUnavailable(
                f"{marker} is gone, so this is not the folder that it was: mount it again, or put the file back"
            ) from None

    async def read(self, name: str) -> bytes:
        """All of an object. Raises `ObjectNotFound`."""
        return await self._store.read(await self._store.facts(self._url.below(name)))

    async def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes from `start` to before `end`. Raises `ObjectNotFound`."""
        try:
            return await self._store.read(await self._facts_of(name), start, end)
        except ObjectChanged:  # its owner has put it there again, as from a backup
            self._facts.pop(name, None)
        return await self._store.read(await self._facts_of(name), start, end)

    async def _facts_of(self, name: str) -> ObjectFacts:
        if name not in self._facts:
            while len(self._facts) >= KNOWN_OBJECTS:
                del self._facts[next(iter(self._facts))]
            self._facts[name] = await self._store.facts(self._url.below(name))
        return self._facts[name]
