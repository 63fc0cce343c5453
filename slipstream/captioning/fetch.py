"""Fetches a video over https from an allowed host, and from nothing else that a URL can be bent to mean.

The name is resolved once, every address must be public, and the connection goes to that very address while the
certificate is checked for the name. Every redirect passes the same checks.
"""

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Protocol
from urllib.parse import urljoin

import h11

from slipstream import __version__
from slipstream.config import is_port
from slipstream.errors import (
    InvalidRequest,
    LimitExceeded,
    ServiceUnavailable,
    SlipstreamError,
    VideoNotFound,
)

MAX_REDIRECTS = 3
CONNECT_S = 10.0
_CHUNK_BYTES = 256 * 1024
_MAX_HEADER_BYTES = 32 * 1024
_MAX_URL_CHARS = 2048
_URL = re.compile(
    r"https://(?P<host>[a-z0-9.-]+)(?::(?P<port>\d{1,5}))?(?P<target>[/?][!$-;=?-Z_a-z~%]*)?", re.I | re.A
)
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*", re.A)
_NUMBER = re.compile(r"(0x[0-9a-f]*|\d+)", re.A)
_REDIRECTS = {301, 302, 303, 307, 308}
_INWARD: list[IPv4Network | IPv6Network] = [
    *(IPv4Network(net) for net in ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")),
    *(IPv6Network(net) for net in ("fec0::/10", "3fff::/20", "5f00::/16")),
]
"""What some Python counts as public and is not: metadata servers of clouds, protocol assignments, relays; addresses of
a site, of documentation, and of segment routing."""
_HIDES_IPV4 = [IPv6Network(net) for net in ("::/96", "::ffff:0:0/96", "64:ff9b::/96", "2001::/32", "2002::/16")]

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]


class Sink(Protocol):
    """Takes what arrives; raises a SlipstreamError when it is too much."""

    async def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True)
class CountedSink:
    """Takes places for bytes before it passes them on."""

    sink: Sink
    take: Callable[[int], None]

    async def write(self, data: bytes, /) -> None:
        """Raises what either of them does."""
        self.take(len(data))
        await self.sink.write(data)


@dataclass(frozen=True)
class Url:
    """An https address in pieces that need no further interpretation."""

    host: str
    port: int
    target: str
    """Path and query."""

    def __str__(self) -> str:
        return f"https://{self.host}:{self.port}{self.target}"


def parse_url(text: str) -> Url:
    """The pieces of `text`. Raises InvalidRequest for whatever is not plainly https://NAME[:PORT][/PATH][?QUERY]."""
    match = _URL.fullmatch(text) if len(text) <= _MAX_URL_CHARS else None
    if match is None:
        raise InvalidRequest("the source is no plain https address of the form https://HOST/PATH")
    host = match["host"].lower()
    if not _NAME.fullmatch(host) or _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise InvalidRequest("the host of an https source must be a name, not a number")
    port = int(match["port"] or 443)
    target = match["target"] or "/"
    return Url(host, port, target if target.startswith("/") else f"/{target}")


def is_public(address: Address) -> bool:
    """Whether an address belongs to the internet at large: not to this machine, its network or its provider."""
    if isinstance(address, IPv6Address) and any(address in network for network in _HIDES_IPV4):
        return False
    if address.is_multicast or address.is_reserved or any(address in network for network in _INWARD):
        return False
    return address.is_global


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a name, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1, proto=6)
    return [str(entry[4][0]) for entry in found]


def check_hosts(value: str) -> str | None:
    """What is wrong with a list of hosts, "HOST" or "HOST:PORT" separated by ","; or None."""
    for entry in filter(None, value.split(",")):
        host, _, port = entry.partition(":")
        if not host or any(char.isspace() or char in "/@*[]?#" for char in entry):
            return f"names {entry!r}, which is no HOST or HOST:PORT"
        if port and not is_port(port):
            return f"names {entry!r}, which has an invalid port"
    return None


def parse_hosts(value: str) -> frozenset[tuple[str, int]]:
    """(host in lower case, port) of each host of a list that was checked."""
    pairs = (entry.partition(":") for entry in value.split(",") if entry)
    return frozenset((host.lower(), int(port or 443)) for host, _, port in pairs)


class Fetcher:
    """Fetches files from the hosts it was made for; from none if there are none."""

    def __init__(
        self,
        hosts: Iterable[tuple[str, int]],
        max_bytes: int,
        timeout_s: float,
        *,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve = resolve,
        is_allowed: Callable[[Address], bool] = is_public,
    ) -> None:
        """`hosts` are (name, port). The last three are for tests: trust, name service, and what counts as public."""
        self._hosts = frozenset(hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._tls = tls
        self._resolve = resolve
        self._is_allowed = is_allowed

    async def fetch(self, source: str, sink: Sink) -> None:
        """Writes the file at an https address to `sink`.

        Raises InvalidRequest for an address that is not allowed, VideoNotFound when the host does not have the file,
        LimitExceeded when it is too large, and ServiceUnavailable when the host fails or is too slow.
        """
        url = self._checked(source)
        try:
            async with asyncio.timeout(self._timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    redirect = await self._get(url, sink)
                    if redirect is None:
                        return
                    url = self._checked(urljoin(str(url), redirect))
        except TimeoutError:
            raise ServiceUnavailable(
                f"{url.host} did not deliver the video within this server's limit of {self._timeout_s:g} s"
            ) from None
        raise InvalidRequest(f"the source redirects more than {MAX_REDIRECTS} times; give its final address")

    def _checked(self, source: str) -> Url:
        if not self._hosts:
            raise InvalidRequest("this gateway fetches nothing from the network; give a path below its video roots")
        url = parse_url(source)
        if (url.host, url.port) not in self._hosts:
            raise InvalidRequest(f"this gateway does not fetch from {url.host}:{url.port}; its --url-hosts say where")
        return url

    async def _get(self, url: Url, sink: Sink) -> str | None:
        """One request; the address that it was redirected to, if it was."""
        with _failures_named(url.host):
            reader, writer = await self._connect(url, await self._addresses(url))
            try:
                return await self._exchange(_Exchange(reader, writer), url, sink)
            finally:
                writer.transport.abort()

    async def _addresses(self, url: Url) -> list[str]:
        """The addresses that may be connected to; no name is looked up again for this request."""
        addresses = await self._resolve(url.host, url.port)
        if not addresses or not all(self._is_allowed(ip_address(text)) for text in addresses):
            raise InvalidRequest(f"{url.host} has an address that is not public; nothing is fetched from there")
        return addresses

    async def _connect(self, url: Url, addresses: list[str]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first address that answers; the certificate is checked for the name."""
        for address in addresses[:-1]:
            try:
                return await self._connect(url, [address])
            except ssl.SSLError:  # it has answered
                raise
            except OSError:  # refused, unreachable, or too slow
                continue
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_connection(addresses[-1], url.port, ssl=self._context(), server_hostname=url.host)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    async def _exchange(self, exchange: "_Exchange", url: Url, sink: Sink) -> str | None:
        response = await exchange.ask(url)
        headers = {bytes(name): bytes(value).decode("latin-1") for name, value in response.headers}
        if response.status_code in _REDIRECTS and b"location" in headers:
            return headers[b"location"]
        if response.status_code != 200:
            raise _refusal(url, response.status_code)
        if headers.get(b"content-encoding", "identity").lower() != "identity":
            raise InvalidRequest(f"{url.host} sends the video compressed, which was not asked for")
        length = headers.get(b"content-length", "0")
        if int(length) > self._max_bytes:
            raise LimitExceeded(f"the video has {length} bytes, more than this server's limit of {self._max_bytes}")
        async for data in exchange.body():
            await sink.write(data)
        return None


class _Exchange:
    """One HTTP/1.1 request on a fresh connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEADER_BYTES)

    async def ask(self, url: Url) -> h11.Response:
        host = url.host if url.port == 443 else f"{url.host}:{url.port}"
        headers = {
            "Host": host,
            "User-Agent": f"slipstream/{__version__}",
            "Accept": "video/*, application/octet-stream",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        request = h11.Request(method="GET", target=url.target, headers=list(headers.items()))
        for part in (request, h11.EndOfMessage()):
            self._writer.write(self._http.send(part) or b"")
        await self._writer.drain()
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("it hung up without an answer")
        return event

    async def body(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise h11.RemoteProtocolError("it hung up in the middle")

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_CHUNK_BYTES))
        return event


@contextlib.contextmanager
def _failures_named(host: str) -> Iterator[None]:
    """Failures of the network or of the other side become ServiceUnavailable."""
    try:
        yield
    except SlipstreamError:
        raise
    except ssl.SSLCertVerificationError:
        raise ServiceUnavailable(f"{host} shows no certificate that is valid for its name") from None
    except (OSError, h11.RemoteProtocolError, UnicodeError) as failure:  # a timeout is an OSError too
        raise ServiceUnavailable(f"fetching from {host} failed: {type(failure).__name__}") from None


def _refusal(url: Url, status: int) -> SlipstreamError:
    message = f"{url.host} answered with status {status}"
    if status == 429 or status >= 500:
        return ServiceUnavailable(f"{message}; try again later")
    return VideoNotFound(f"{message}; check the address")
