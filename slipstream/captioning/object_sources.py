"""Videos and documents in a store of objects: which ones a gateway opens, and how.

A film with an index is read by the ranges that its frames need. All else is fetched whole, as from https, since it must
be read through to know its frames. Credentials and endpoints are those of the gateway's environment.
"""

import hashlib
from collections.abc import Sequence

from slipstream.captioning.config import MediaOptions
from slipstream.captioning.fetch import Sink
from slipstream.errors import InvalidConfig, InvalidRequest, LimitExceeded, ObjectUnavailable, PermissionDenied
from slipstream.objects.cached_reader import BlockCache, CachedReader, in_time
from slipstream.objects.store import IDENTITY, ObjectFacts, ObjectStores, ObjectUrl
from slipstream.time_limits import within
from slipstream.video.paths import OWNER
from slipstream.video.ranged_film import RangedFilm, media_of

WHOLE_BYTES = 1024 * 1024
"""Objects up to this size are fetched whole, which takes one request."""
PIECE_BYTES = 8 * 1024**2
"""Of an object that is fetched whole, at once; each has a limit of time."""


class ObjectSources:
    """The objects below a gateway's roots, and one cache of their blocks for all captions."""

    def __init__(self, options: MediaOptions) -> None:
        """Raises `InvalidConfig` for a root that this environment makes no store of."""
        self._options = options
        self._roots = parse_roots(options.object_roots)
        self._stores = ObjectStores()
        self._cache = BlockCache(options.object_cache_mb * 1024**2)
        for root in self._roots:
            self._stores.of(root)

    async def open(self, source: str, owner: str, sink: Sink, *, whole: bool, most_bytes: int) -> RangedFilm | None:
        """The object as a film that need not be fetched; None once it was written to `sink` as a whole, of at most so
        many bytes.

        Raises:
            InvalidConfig: this gateway opens no objects.
            InvalidRequest: it is no address of an object.
            PermissionDenied: it is below none of the owner's roots, or the store does not let this gateway read it.
            LimitExceeded: it is larger than what is read by ranges may be, or has to be fetched whole and is larger.
            ObjectNotFound, ObjectChanged, ObjectUnavailable: what the store says, also of one that is too slow.
        """
        reader = await self._find(source, owner)
        film = None if whole else await self._by_ranges(reader)
        if film is None:
            if reader.facts.num_bytes > most_bytes:
                raise _too_large(reader.facts, most_bytes, "an object that has to be fetched whole")
            await self._fetch(reader, sink)
        return film

    async def _find(self, source: str, owner: str) -> CachedReader:
        if not self._roots:
            raise InvalidConfig(
                "this gateway opens no objects; start it with --object-roots, or upload the file or give a path"
            )
        url = ObjectUrl.parse(source)
        if not any(is_below(url, root, owner) for root in self._roots):
            raise PermissionDenied("that object is below none of the places that this gateway's --object-roots name")
        store = self._stores.of(url)
        facts = await in_time(store.facts(url), url, self._options.object_timeout_s)
        return CachedReader(store, facts, self._cache, self._options.object_timeout_s)

    async def _by_ranges(self, reader: CachedReader) -> RangedFilm | None:
        """None for what must be fetched as a whole."""
        facts = reader.facts
        if facts.num_bytes <= WHOLE_BYTES or not facts.etag:  # without one a change would go unseen
            return None
        media = await media_of(facts.num_bytes, reader.read)
        if not media:
            return None
        if facts.num_bytes > self._options.max_ranged_bytes:
            raise _too_large(facts, self._options.max_ranged_bytes, "an object that is read by ranges")
        return RangedFilm(facts.num_bytes, reader.read, media, identity_of(facts))

    async def _fetch(self, reader: CachedReader, sink: Sink) -> None:
        """All of it takes no longer than what is fetched over https."""
        limit_s = self._options.url_timeout_s
        late = f"{reader.facts.url} was not delivered within this server's limit of {limit_s:g} s"
        async with within(limit_s, lambda: ObjectUnavailable(late)):
            for start in range(0, reader.facts.num_bytes, PIECE_BYTES):
                await sink.write(await reader.read_whole(start, start + PIECE_BYTES))


def _too_large(facts: ObjectFacts, limit: int, what: str) -> LimitExceeded:
    return LimitExceeded(
        f"{facts.url} has {facts.num_bytes} bytes, more than this server's limit of {limit} for {what}"
    )


def identity_of(facts: ObjectFacts) -> str:
    """Stands for the content where it was not read as a whole: the same for an object in another bucket of the same
    key, entity tag and size. No digest of a file can be the same."""
    named = "\0".join((facts.url.key, facts.etag, str(facts.num_bytes)))
    return f"{IDENTITY}{hashlib.sha256(named.encode()).hexdigest()}"


def is_below(url: ObjectUrl, root: ObjectUrl, owner: str) -> bool:
    """Whether an owner's object lies below a root; a step `{owner}` of that is the owner's name."""
    steps = [step for step in root.key.split("/") if step]
    if OWNER in steps and (not owner.isprintable() or "/" in owner or owner in ("", ".", "..")):
        return False
    folder = "".join(f"{owner if step == OWNER else step}/" for step in steps)
    return url.root == root.root and url.key.startswith(folder) and url.key != folder


def parse_roots(text: str) -> Sequence[ObjectUrl]:
    """Addresses of buckets or folders in them, separated by commas. Raises `InvalidConfig`."""
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        try:
            root = ObjectUrl.parse(word)
        except InvalidRequest as error:
            raise InvalidConfig(f"--object-roots: {error}") from None
        if root.root == "file://":
            raise InvalidConfig(f"--object-roots: {word!r} is a folder of this machine; name it by --video-roots")
        found.append(root)
    return found
