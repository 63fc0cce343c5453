"""What lets a caller in: bearer tokens and what their owners may, names in clients' certificates."""

import asyncio
import contextlib
import contextvars
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from slipstream import metrics
from slipstream.config import option
from slipstream.errors import InvalidConfig, PermissionDenied, Unauthenticated
from slipstream.logs import get_logger
from slipstream.rpc.callers import current_caller, is_local, name_owner
from slipstream.rpc.tls import file_stamp

# -- tokens -----------------------------------------------------------------------------------------------------------

# Who calls: bearer tokens, or the name in a client's certificate.
#
# A tokens file has one line a token: `owner sha256-of-the-token`, in hexadecimal; `#` begins a comment. An owner may
# have several, so that one can be replaced without a gap. Behind the digest a line may say what the owner may, where
# that is not what all may: `max-waiting=N`, `max-captions=N`, `high=yes` or `high=no`.

AUTHORIZATION_KEY = "authorization"
TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
"""Where the command line finds the token that it sends."""
SCHEME = "Bearer "
RELOAD_S = 1.0
MAX_TOKEN_CHARS = 512
MAX_FILE_BYTES = 4 * 1024 * 1024
_OWNER = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RIGHT = re.compile(r"(?P<limit>max-waiting|max-captions)=(?P<number>[0-9]{1,9})|high=(?P<is_high>yes|no)")


@dataclass(frozen=True, kw_only=True)
class TokenOptions:
    """Options of a service that asks its callers who they are."""

    tokens: str = option("file of accepted tokens, `owner sha256` a line; empty asks for none", default="")


class OwnerRights(NamedTuple):
    """What the tokens file says of an owner: jobs that may wait in the archive, interactive captions in work at once,
    whether its batches may have the priority high. None: what is so for all."""

    max_waiting: int | None = None
    max_captions: int | None = None
    may_use_high: bool | None = None


_rights: contextvars.ContextVar[OwnerRights] = contextvars.ContextVar("rights", default=OwnerRights())  # noqa: B039


def current_rights() -> OwnerRights:
    return _rights.get()


def current_owner() -> str:
    """Who makes the call that is being served: the owner of its token; without tokens, the common name of its client
    certificate; without either, ''."""
    return current_caller().owner


def new_token(owner: str) -> tuple[str, str]:
    """A fresh token, and the line that makes a server accept it. Raises `InvalidConfig` for an impossible owner."""
    if not _OWNER.fullmatch(owner):
        raise InvalidConfig(f"{owner!r} is no owner: 1 to 128 letters, digits or any of . _ @ + -")
    token = secrets.token_urlsafe(32)
    return token, f"{owner} {_digest(token)}"


class TokenFile:
    """The accepted tokens. The file is read again when it changed; while it cannot be read, what it said last holds,
    and the metric `slipstream_tokens_unreadable` is 1."""

    def __init__(self, path: str) -> None:
        """Raises `InvalidConfig` when the file cannot be read or has a wrong line."""
        self._path = path
        self._stamp = file_stamp(path)
        self._entries, self._rights = _read_tokens(path)
        self._looked = time.monotonic()
        self._complaint = ""
        metrics.TOKENS_UNREADABLE.set_function(self._is_unreadable)

    def owner(self, token: str) -> str | None:
        """Whose token it is; None: nobody's. Takes the same time wherever it stands in the file."""
        self._refresh()
        digest, found = _digest(token), None
        for owner, known in self._entries:
            if hmac.compare_digest(digest, known):
                found = owner
        return found

    def rights(self, owner: str) -> OwnerRights:
        return self._rights.get(owner, OwnerRights())

    def _refresh(self) -> None:
        if time.monotonic() - self._looked < RELOAD_S:
            return
        self._looked = time.monotonic()
        stamp = file_stamp(self._path)
        if stamp == self._stamp and not self._complaint:
            return
        self._stamp = stamp
        before, self._complaint = self._complaint, ""
        try:
            self._entries, self._rights = _read_tokens(self._path)
        except InvalidConfig as error:
            self._complaint = str(error)
            if self._complaint != before:
                get_logger().error("tokens.unreadable", reason=self._complaint)
        else:
            get_logger().info("tokens.reloaded", num_tokens=len(self._entries))

    def _is_unreadable(self) -> bool:
        self._refresh()
        return bool(self._complaint)


LOOK_S = 5.0
"""An open stream ends within this time after what let it in is no longer so."""


class WhileAllowed:
    """Ends open streams when what let them in is no longer so. It looks only while there are any."""

    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self._is_allowed = is_allowed
        self._open: dict[asyncio.Timeout, str] = {}
        self._next_look: asyncio.TimerHandle | None = None

    @contextlib.asynccontextmanager
    async def around(self, proof: str) -> AsyncIterator[None]:
        """Surrounds a stream that `proof` let in. Raises `Unauthenticated` when it does so no more."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._open[limit] = proof
                self._look_later()
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unauthenticated("the token of this call is no longer accepted") from None
        finally:
            self._open.pop(limit, None)

    def _look_later(self) -> None:
        if self._open and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._next_look = None
        for limit, proof in self._open.items():
            if not (limit.expired() or self._is_allowed(proof)):
                limit.reschedule(asyncio.get_running_loop().time())
        self._look_later()


class Identify:
    """Finds out who calls. Where tokens are asked for, a caller without one is refused by every service but health, and
    a stream ends soon after its token left the file."""

    def __init__(self, tokens: TokenFile | None = None) -> None:
        self._tokens = tokens
        self._streams = WhileAllowed(lambda token: tokens is None or tokens.owner(token) is not None)

    @contextlib.asynccontextmanager
    async def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        token = _only_token([value for key, value in details.invocation_metadata or () if key == AUTHORIZATION_KEY])
        name_owner(self._owner_of(context, token))
        _rights.set(self._tokens.rights(current_owner()) if self._tokens else OwnerRights())
        async with self._streams.around(token) if is_stream and self._tokens else contextlib.nullcontext():
            yield

    def _owner_of(self, context: grpc.aio.ServicerContext, token: str) -> str:
        if self._tokens is None:
            return _certificate_owner(context)
        owner = self._tokens.owner(token) if token else None
        if owner is None:
            raise Unauthenticated("this gateway needs a token that it knows; send `authorization: Bearer TOKEN`")
        return owner


class RequireNames:
    """Lets in who shows a certificate with one of these names: its common name, or a DNS name."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    @contextlib.asynccontextmanager
    async def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        facts = context.auth_context() or {}
        shown = (*facts.get("x509_common_name", ()), *facts.get("x509_subject_alternative_name", ()))
        if self._names.isdisjoint(name.decode(errors="replace") for name in shown):
            raise PermissionDenied(
                "this service is called by other services only, and no name in your certificate is one of theirs;"
                " see its --tls-client-names, or call the gateway"
            )
        yield


def make_identify(tokens: str, listen: str, *, has_tls: bool) -> Identify:
    """Raises `InvalidConfig` when the tokens could be read by others on the way, or their file cannot be used."""
    if not tokens:
        return Identify()
    if not has_tls and not is_local(listen):
        raise InvalidConfig(
            f"--tokens on {listen} needs --tls-cert: on a plaintext wire anyone on the way could read the tokens"
        )
    return Identify(TokenFile(tokens))


def bearer_token(given: str) -> str:
    """The token of an `authorization`, or ''. The scheme may be written in any case."""
    scheme, token = given[: len(SCHEME)], given[len(SCHEME) :]
    return token if scheme.casefold() == SCHEME.casefold() and len(token) <= MAX_TOKEN_CHARS else ""


def _only_token(given: Sequence[str | bytes]) -> str:
    """The one token of the metadata, or ''."""
    return bearer_token(given[0]) if len(given) == 1 and isinstance(given[0], str) else ""


def _certificate_owner(context: grpc.aio.ServicerContext) -> str:
    """The common name of the certificate that the client proved to have; one without is known by its digest."""
    facts = context.auth_context() or {}
    certificate = next(iter(facts.get("x509_pem_cert", ())), b"")
    if not certificate:
        return ""
    name = next(iter(facts.get("x509_common_name", ())), b"").decode(errors="replace")
    return name or "sha256:" + hashlib.sha256(certificate).hexdigest()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _read_tokens(path: str) -> tuple[list[tuple[str, str]], dict[str, OwnerRights]]:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        lines = content.decode().splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidConfig(f"--tokens: cannot read {path!r}: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise InvalidConfig(f"--tokens: {path!r} has more than {MAX_FILE_BYTES} bytes")
    entries: list[tuple[str, str]] = []
    rights: dict[str, OwnerRights] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) < 2 or not _OWNER.fullmatch(words[0]) or not _DIGEST.fullmatch(words[1]):
            raise InvalidConfig(f"--tokens: line {number} of {path!r} must be `owner sha256`; see `slipstream token`")
        entries.append((words[0], words[1]))
        try:
            rights[words[0]] = _read_rights(words[2:], rights.get(words[0], OwnerRights()))
        except ValueError as error:
            raise InvalidConfig(f"--tokens: line {number} of {path!r}: {error}") from None
    return entries, rights


def _read_rights(words: Sequence[str], known: OwnerRights) -> OwnerRights:
    """With what the words add. Raises `ValueError`."""
    for word in words:
        if not (match := _RIGHT.fullmatch(word)):
            raise ValueError(f"{word!r} is none of max-waiting=N, max-captions=N, high=yes, high=no")
        field, value = (match["limit"] or "may_use_high").replace("-", "_"), match["number"]
        read: Any = int(value) if value else match["is_high"] == "yes"
        if getattr(known, field) not in (None, read):
            raise ValueError(f"{word} contradicts what was said of the same owner before")
        known = known._replace(**{field: read})
    return known
