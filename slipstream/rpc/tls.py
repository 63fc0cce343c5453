"""TLS: its options of every service, certificates that may be replaced, and when they expire."""

import math
import os
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import grpc

from slipstream.config import option
from slipstream.errors import InvalidConfig
from slipstream.logs import get_logger
from slipstream.rpc.callers import is_local

CertificateConfig = grpc.ServerCertificateConfiguration
T = TypeVar("T")


class PeerSecurity(NamedTuple):
    """How a connection to a peer is secured."""

    credentials: grpc.ChannelCredentials
    server_name: str = ""
    """Expected in the peer's certificate instead of the host of its address."""


@dataclass(frozen=True, kw_only=True)
class WireOptions:
    """How a service's wire is secured, and its own calls to others."""

    tls_cert: str = option("PEM file of this server's certificate chain; without it the wire is plaintext", default="")
    tls_key: str = option("PEM file of the certificate's private key", default="")
    tls_client_ca: str = option(
        "PEM file of the authority whose certificates clients must have (mTLS); empty asks for none", default=""
    )
    tls_client_names: str = option(
        "names that may call, separated by ',': the client's certificate must have one, as common name or DNS name;"
        " empty for whomever --tls-client-ca vouches for",
        default="",
    )
    peer_ca: str = option("PEM file of the authority of the services that this one calls, by TLS", default="")
    peer_cert: str = option("PEM file of the certificate that this service shows to those", default="")
    peer_key: str = option("PEM file of that certificate's private key", default="")
    peer_name: str = option("name in the certificates of those, where it is not the host of their address", default="")

    @property
    def client_names(self) -> frozenset[str]:
        """Those that may call; none: whoever the authority vouches for."""
        return frozenset(filter(None, (name.strip() for name in self.tls_client_names.split(","))))

    @property
    def expiries(self) -> dict[str, Callable[[], float]]:
        """See `expiries`."""
        return expiries(self.tls_cert, self.peer_cert)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS. The files are read again when they change. Raises `InvalidConfig` naming the option."""
        if not self.tls_cert:
            for name in ("tls_key", "tls_client_ca", "tls_client_names"):
                _complain_if(getattr(self, name), name, "needs --tls-cert as well")
            return None
        _complain_if(not self.tls_key, "tls_cert", "needs --tls-key as well")
        _complain_if(self.client_names and not self.tls_client_ca, "tls_client_names", "needs --tls-client-ca as well")
        pair, authority = _server_pair(self.tls_cert, self.tls_key), _Named("--tls-client-ca", self.tls_client_ca)

        def load() -> CertificateConfig:
            root = _read_authority(authority) if authority.path else None
            chain, key = _read_pair(*pair)
            return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=root)

        files = _Rotated(load, *pair, authority)
        return grpc.dynamic_ssl_server_credentials(
            load(), cast(Any, files.reload), require_client_authentication=bool(authority.path)
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


def https_context(certificate: str, key: str) -> ssl.SSLContext:
    """Of an HTTP server with these files, which are read again when they change. Raises `InvalidConfig` naming the
    option."""
    pair = _server_pair(certificate, key)

    def load() -> ssl.SSLContext:
        _read_pair(*pair)
        return _holding(*pair)

    files = _Rotated(load, *pair)
    first = newest = load()

    def take_newest(connection: ssl.SSLObject, *_: object) -> None:
        nonlocal newest
        newest = files.reload() or newest
        connection.context = newest

    first.sni_callback = take_newest  # for each handshake, also where no name is asked for
    return first


def _server_pair(certificate: str, key: str) -> tuple[_Named, _Named]:
    return _Named("--tls-cert", certificate), _Named("--tls-key", key)


class _Rotated(Generic[T]):
    """What is made of a server's certificate files, which may be replaced while it runs."""

    def __init__(self, load: Callable[[], T], *files: _Named) -> None:
        self._load = load
        self._files = files
        self._seen = self._stamp()

    def reload(self) -> T | None:
        """For each handshake, perhaps on a thread of gRPC's: None while nothing has changed, or what has cannot be
        used."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        try:
            made = self._load()
        except InvalidConfig as error:  # perhaps half of a rotation: the next handshake looks again
            get_logger().warning("certificates.unusable", reason=str(error))
            return None
        self._seen = stamp
        get_logger().info("certificates.reloaded")
        return made

    def _stamp(self) -> list[tuple[int, int, int] | None]:
        return [file_stamp(named.path) for named in self._files]


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
    _holding(certificate, key)
    return chain, secret


def _holding(certificate: _Named, key: _Named) -> ssl.SSLContext:
    return _check(key, lambda context: context.load_cert_chain(certificate.path, key.path, password=lambda: ""))


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


def _check(named: _Named, load: Callable[[ssl.SSLContext], None]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        load(context)
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidConfig(
            f"{named.option}: {named.path!r} is damaged, encrypted or does not belong to the others ({reason})"
        ) from None
    return context


_VALIDITY = re.compile(rb"\x30[\x1e-\x22](?:\x17\x0d|\x18\x0f)\d{12,14}Z(?:\x17\x0d|\x18\x0f)(\d{12,14})Z")
"""Two times in a row, the second of which ends the validity. Python's `ssl` tells it of a peer's certificate only."""


def expiries(server: str, client: str) -> dict[str, Callable[[], float]]:
    """For each certificate of a service, `server` and `client`, how many seconds it has left. '' is no file. A client's
    is the one that is there now: another one in its place is not taken before the next start."""
    left: dict[str, Callable[[], float]] = {}
    if server:
        left["server"] = partial(seconds_left, Path(server))
    if client:
        end = _end_of(Path(client))
        left["client"] = lambda: end - time.time()
    return left


def seconds_left(path: Path) -> float:
    """Until the first certificate of the PEM file expires; NaN where that cannot be read."""
    return _end_of(path) - time.time()


def _end_of(path: Path) -> float:
    """When the first certificate of the PEM file expires; NaN where that cannot be read."""
    try:
        pem = path.read_text("ascii", errors="replace")
        first = pem[pem.index(ssl.PEM_HEADER) : pem.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
        found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(first))
    except (OSError, ValueError):
        found = None
    if found is None:
        return math.nan
    end = found[1].decode()
    form = "%Y%m%d%H%M%S" if len(end) == 14 else "%y%m%d%H%M%S"
    return datetime.strptime(end, form).replace(tzinfo=UTC).timestamp()


def _complain_if(wrong: object, name: str, complaint: str) -> None:
    if wrong:
        raise InvalidConfig(f"--{name.replace('_', '-')} {complaint}")
