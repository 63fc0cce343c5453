"""Who calls and who listens: TLS of the wire, bearer tokens, and names in clients' certificates."""

import contextlib
import contextvars
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import grpc

from slipstream.config import between, option
from slipstream.errors import InvalidConfig, Unauthenticated
from slipstream.logs import get_logger
from slipstream.rpc.guards import Guard

# -- security ---------------------------------------------------------------------------------------------------------

CertificateConfig = grpc.ServerCertificateConfiguration


class PeerSecurity(NamedTuple):
    """How a connection to a peer is secured."""

    credentials: grpc.ChannelCredentials
    server_name: str = ""
    """Expected in the peer's certificate instead of the host of its address."""


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """Options that every service has for its wire."""

    tls_cert: str = option("PEM file of this server's certificate chain; without it the wire is plaintext", default="")
    tls_key: str = option("PEM file of the certificate's private key", default="")
    tls_client_ca: str = option(
        "PEM file of the authority whose certificates clients must have (mTLS); empty asks for none", default=""
    )
    peer_ca: str = option("PEM file of the authority of the services that this one calls, by TLS", default="")
    peer_cert: str = option("PEM file of the certificate that this service shows to those", default="")
    peer_key: str = option("PEM file of that certificate's private key", default="")
    peer_name: str = option("name in the certificates of those, where it is not the host of their address", default="")
    reflection: bool = option("whether strangers may list the methods: true or false", default=False)
    metrics: str = option("serve metrics at HOST:PORT; a PORT alone is on loopback; empty for none", default="")
    log_text: bool = option(
        "whether events of level debug may hold prompts and captions: true or false; for finding faults only",
        default=False,
    )
    stream_timeout_s: float = option("longest time for one streaming call", default=86_400.0, check=between(1, 1e7))
    drain_s: float = option("how long open calls may go on after SIGTERM", default=5.0, check=between(0, 3600))

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS. The files are read again when they change. Raises `InvalidConfig` naming the option."""
        if not self.tls_cert:
            for name in ("tls_key", "tls_client_ca"):
                _complain_if(getattr(self, name), name, "needs --tls-cert as well")
            return None
        _complain_if(not self.tls_key, "tls_cert", "needs --tls-key as well")
        files = _ServerFiles(self.tls_cert, self.tls_key, self.tls_client_ca)
        return grpc.dynamic_ssl_server_credentials(
            files.load(), cast(Any, files.reload), require_client_authentication=bool(self.tls_client_ca)
        )

    def peer_security(self) -> PeerSecurity | None:
        """None when peers are called in plaintext. Raises `InvalidConfig` naming the option."""
        return make_peer_security(
            _Named("--peer-ca", self.peer_ca),
            _Named("--peer-cert", self.peer_cert),
            _Named("--peer-key", self.peer_key),
            self.peer_name,
        )


class _Named(NamedTuple):
    """An option as its user knows it, and the file it names."""

    option: str
    path: str


def make_peer_security(
    authority: tuple[str, str], certificate: tuple[str, str], key: tuple[str, str], server_name: str = ""
) -> PeerSecurity | None:
    """Credentials for calling others, from pairs of an option's name and the file it names, which may be ''. None when
    nothing is named. Raises `InvalidConfig` naming the option that is wrong."""
    authority, certificate, key = _Named(*authority), _Named(*certificate), _Named(*key)
    if not authority.path:
        for named in (certificate, key):
            if named.path:
                raise InvalidConfig(f"{named.option} needs {authority.option} as well")
        return None
    if bool(certificate.path) != bool(key.path):
        raise InvalidConfig(f"{certificate.option} and {key.option} must be given together")
    root = _read_authority(authority)
    pair: tuple[bytes | None, bytes | None] = (None, None)
    if certificate.path:
        pair = _read_pair(certificate, key)
    return PeerSecurity(grpc.ssl_channel_credentials(root, pair[1], pair[0]), server_name)


def is_local(address: str) -> bool:
    """Whether what is sent to or from the address stays on this machine."""
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:").lstrip("/").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def warn_of_plaintext(listen: str, has_tls: bool) -> None:
    """Says once at start what a user of the address may not expect."""
    if listen.startswith("unix:"):
        if has_tls:
            get_logger().warning("wire.plaintext", listen=listen, reason="a unix socket carries no TLS")
    elif not has_tls and not is_local(listen):
        get_logger().warning(
            "wire.plaintext",
            listen=listen,
            reason="anyone on the way can read and change what is sent; give --tls-cert and --tls-key",
        )


class _ServerFiles:
    """A server's certificate files, which may be replaced while it runs."""

    def __init__(self, certificate: str, key: str, client_authority: str) -> None:
        self._certificate = _Named("--tls-cert", certificate)
        self._key = _Named("--tls-key", key)
        self._authority = _Named("--tls-client-ca", client_authority)
        self._seen = self._stamp()

    def load(self) -> CertificateConfig:
        """Raises `InvalidConfig` naming the option."""
        root = _read_authority(self._authority) if self._authority.path else None
        chain, key = _read_pair(self._certificate, self._key)
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=root)

    def reload(self) -> CertificateConfig | None:
        """For each handshake, on a thread of gRPC's: None while nothing has changed, or what has cannot be used."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        try:
            config = self.load()
        except InvalidConfig as error:  # perhaps half of a rotation: the next handshake looks again
            get_logger().warning("certificates.unusable", reason=str(error))
            return None
        self._seen = stamp
        get_logger().info("certificates.reloaded")
        return config

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        return [file_stamp(named.path) for named in (self._certificate, self._key, self._authority)]


def file_stamp(path: str) -> tuple[int, int, int] | None:
    """Changes when the file is replaced or written to; None when it is not there."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read_pair(certificate: _Named, key: _Named) -> tuple[bytes, bytes]:
    """Certificate chain and key, which fit each other."""
    chain, secret = _read(certificate), _read(key)
    _check(certificate, lambda context: context.load_verify_locations(cadata=chain.decode("ascii", errors="replace")))
    _check(key, lambda context: context.load_cert_chain(certificate.path, key.path, password=lambda: ""))
    return chain, secret


def _read_authority(named: _Named) -> bytes:
    content = _read(named)
    _check(named, lambda context: context.load_verify_locations(cadata=content.decode("ascii", errors="replace")))
    return content


def _read(named: _Named) -> bytes:
    try:
        return Path(named.path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidConfig(f"{named.option}: cannot read {named.path!r}: {reason}") from None


def _check(named: _Named, load: Callable[[ssl.SSLContext], None]) -> None:
    try:
        load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidConfig(
            f"{named.option}: {named.path!r} is damaged, encrypted or does not belong to the others ({reason})"
        ) from None


def _complain_if(wrong: object, name: str, complaint: str) -> None:
    if wrong:
        raise InvalidConfig(f"--{name.replace('_', '-')} {complaint}")


# -- tokens -----------------------------------------------------------------------------------------------------------

# Who calls: bearer tokens, or the name in a client's certificate.
#
# A tokens file has one line a token: `owner sha256-of-the-token`, in hexadecimal; `#` begins a comment. An owner may
# have several, so that one can be replaced without a gap. Behind the digest a line may say what the owner may, where
# that is not what all may: `max-waiting=N`, `max-captions=N`, `high=yes` or `high=no`.

AUTHORIZATION_KEY = "authorization"
SCHEME = "Bearer "
RELOAD_S = 1.0
MAX_TOKEN_CHARS = 512
MAX_FILE_BYTES = 4 * 1024 * 1024
_OWNER = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RIGHT = re.compile(r"(?P<limit>max-waiting|max-captions)=(?P<number>[0-9]{1,9})|high=(?P<is_high>yes|no)")
_owner: contextvars.ContextVar[str] = contextvars.ContextVar("owner", default="")


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
    return _owner.get()


def new_token(owner: str) -> tuple[str, str]:
    """A fresh token, and the line that makes a server accept it. Raises `InvalidConfig` for an impossible owner."""
    if not _OWNER.fullmatch(owner):
        raise InvalidConfig(f"{owner!r} is no owner: 1 to 128 letters, digits or any of . _ @ + -")
    token = secrets.token_urlsafe(32)
    return token, f"{owner} {_digest(token)}"


class TokenFile:
    """The accepted tokens. The file is read again when it changed; while it cannot be read, what it said last holds."""

    def __init__(self, path: str) -> None:
        """Raises `InvalidConfig` when the file cannot be read or has a wrong line."""
        self._path = path
        self._stamp = file_stamp(path)
        self._entries, self._rights = _read_tokens(path)
        self._looked = time.monotonic()

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
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._entries, self._rights = _read_tokens(self._path)
        except InvalidConfig as error:
            get_logger().warning("tokens.unreadable", reason=str(error))
        else:
            get_logger().info("tokens.reloaded", num_tokens=len(self._entries))


class Identify(Guard):
    """Finds out who calls. Where tokens are asked for, a caller without one is refused by every service but health."""

    def __init__(self, tokens: TokenFile | None = None) -> None:
        self._tokens = tokens

    @contextlib.asynccontextmanager
    async def around(
        self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails, *, is_stream: bool
    ) -> AsyncIterator[None]:
        _owner.set(self._owner_of(context, details))
        _rights.set(self._tokens.rights(current_owner()) if self._tokens else OwnerRights())
        yield

    def _owner_of(self, context: grpc.aio.ServicerContext, details: grpc.HandlerCallDetails) -> str:
        if self._tokens is None:
            return _certificate_owner(context)
        given = [value for key, value in details.invocation_metadata or () if key == AUTHORIZATION_KEY]
        token = _bearer_token(given)
        owner = self._tokens.owner(token) if token else None
        if owner is None:
            raise Unauthenticated("this gateway needs a token that it knows; send `authorization: Bearer TOKEN`")
        return owner


def make_identify(tokens: str, listen: str, *, has_tls: bool) -> Identify:
    """Raises `InvalidConfig` when the tokens could be read by others on the way, or their file cannot be used."""
    if not tokens:
        return Identify()
    if not has_tls and not is_local(listen):
        raise InvalidConfig(
            f"--tokens on {listen} needs --tls-cert: on a plaintext wire anyone on the way could read the tokens"
        )
    return Identify(TokenFile(tokens))


def _bearer_token(given: Sequence[str | bytes]) -> str:
    """The one token of the metadata, or ''."""
    if len(given) != 1 or not isinstance(given[0], str) or not given[0].startswith(SCHEME):
        return ""
    token = given[0].removeprefix(SCHEME)
    return token if len(token) <= MAX_TOKEN_CHARS else ""


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
