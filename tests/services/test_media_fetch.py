"""Addresses of videos: the allowed host is fetched from, and nothing else that an address can be bent to mean.

A real TLS server listens on two loopback addresses: 127.0.0.2 plays a public one, 127.0.0.1 an inner one.
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import pytest
import pytest_asyncio
import trustme

from slipstream.captioning.fetch import Address, Fetcher, Url, is_public, parse_url
from slipstream.errors import InvalidRequest, LimitExceeded, ServiceUnavailable, SlipstreamError, VideoNotFound
from slipstream.video.files import VideoBuffer

NAME = "videos.example"
VIDEO = bytes(range(256)) * 4000
PUBLIC, INNER = "127.0.0.2", "127.0.0.1"


class Received:
    """What a fetcher wrote."""

    def __init__(self) -> None:
        self.data = bytearray()

    async def write(self, data: bytes) -> None:
        self.data += data


@dataclass
class Site:
    """A web server, and who connected to which of its addresses."""

    authority: trustme.CA
    port: int = 0
    hits: list[str] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    answers: dict[bytes, bytes] = field(default_factory=dict)
    lookups: list[str] = field(default_factory=list)
    addresses: list[list[str]] = field(default_factory=list)
    """What the name resolves to, lookup for lookup; the last one stays."""

    def url(self, path: str = "/clip.mp4") -> str:
        return f"https://{NAME}:{self.port}{path}"

    async def resolve(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        return self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]

    def fetcher(self, hosts: Iterable[str] = (NAME,), *, max_bytes: int = 10**7, timeout_s: float = 5.0) -> Fetcher:
        trust = ssl.create_default_context()
        self.authority.configure_trust(trust)
        pairs = [(host, self.port) for host in hosts]
        allowed = self.is_allowed
        return Fetcher(pairs, max_bytes, timeout_s, tls=trust, resolve=self.resolve, is_allowed=allowed)

    @staticmethod
    def is_allowed(address: Address) -> bool:
        return address == ip_address(PUBLIC) or is_public(address)

    async def fetch(self, url: str, **options: float) -> bytes:
        sink = Received()
        await self.fetcher(**options).fetch(url, sink)  # type: ignore[arg-type]
        return bytes(sink.data)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.hits.append(writer.get_extra_info("sockname")[0])
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            answer = self.answers.get(request.split()[1], b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            if b"hang" in request:
                await reader.read()
        finally:
            writer.transport.abort()


def ok(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", *headers, b"Content-Length: %d" % len(body), b"", body])


def redirect(location: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


def same_port_sockets() -> list[socket.socket]:
    """Sockets at both addresses, with a port that is free at both."""
    for _ in range(100):
        with contextlib.ExitStack() as opened:
            public = opened.enter_context(socket.create_server((PUBLIC, 0)))
            with contextlib.suppress(OSError):
                inner = opened.enter_context(socket.create_server((INNER, public.getsockname()[1])))
                opened.pop_all()
                return [public, inner]
    raise AssertionError("no port is free at both addresses")


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    site = Site(trustme.CA(), addresses=[[PUBLIC]])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    site.authority.issue_cert(NAME, "other.example").configure_cert(context)
    site.answers[b"/clip.mp4"] = ok(VIDEO)
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(listening) for listening in same_port_sockets()]
        site.port = sockets[0].getsockname()[1]
        servers = [await asyncio.start_server(site.serve, sock=listening, ssl=context) for listening in sockets]
        yield site
        for server in servers:
            server.close()
        await asyncio.sleep(0.02)


async def test_an_allowed_address_is_fetched_by_name_from_the_address_looked_up(site: Site) -> None:
    with VideoBuffer(10**7) as buffer:
        await site.fetcher().fetch(site.url(), buffer)
        assert (await buffer.finished()).file.read() == VIDEO
    assert (site.hits, site.lookups) == ([PUBLIC], [NAME])
    (request,) = site.requests
    assert f"host: {NAME}:{site.port}".encode() in request.lower()
    assert b"accept-encoding: identity" in request.lower()


async def test_without_allowed_hosts_nothing_is_fetched(site: Site) -> None:
    with pytest.raises(InvalidRequest, match="fetches nothing from the network"):
        await site.fetch(site.url(), hosts=())  # type: ignore[arg-type]
    assert site.lookups == []


FORBIDDEN = [
    "http://{name}:{port}/clip.mp4",
    "HTTPS://127.0.0.1:{port}/",
    "https://127.0.0.1:{port}/",
    "https://2130706433:{port}/",
    "https://0x7f000001:{port}/",
    "https://0x7f.0.0.0x1:{port}/",
    "https://0177.0.0.1:{port}/",
    "https://127.1:{port}/",
    "https://[::1]:{port}/",
    "https://[::ffff:127.0.0.1]:{port}/",
    "https://localhost:{port}/",
    "https://user@{name}:{port}/",
    "https://{name}:{port}@127.0.0.1:{port}/",
    "https://{name}:{port}\\@127.0.0.1/",
    "https://{name}.:{port}/",
    "https://{name}:1/",
    "https://{name}/",
    "https://sub.{name}:{port}/",
    "https://{name}:{port}/#fragment",
    "https://{name}:{port}/a b",
    "https://{name}:{port}/\r\nHost: inner",
    "https://{name}\u3002:{port}/",
    "https://ⓥideos.example:{port}/",
    "https:/{name}:{port}/",
    "https:///clip.mp4",
    "//{name}:{port}/clip.mp4",
    "file:///etc/passwd",
    "ftp://{name}:{port}/clip.mp4",
    "https://{name}:{port}/" + "x" * 3000,
]


@pytest.mark.parametrize("form", FORBIDDEN)
async def test_forbidden_forms_reach_nobody(site: Site, form: str) -> None:
    with pytest.raises(InvalidRequest):
        await site.fetch(form.format(name=NAME, port=site.port))
    assert (site.hits, site.lookups) == ([], [])


RELATIVE = ("//", "https:/{name}", "https:///")
"""In a redirect these stay at the same host."""


@pytest.mark.parametrize(
    "form", [form for form in FORBIDDEN if not form.startswith(RELATIVE) and form.isascii() and "\r" not in form]
)
async def test_no_redirect_leads_to_a_forbidden_form(site: Site, form: str) -> None:
    site.answers[b"/clip.mp4"] = redirect(form.format(name=NAME, port=site.port))
    with pytest.raises((InvalidRequest, ServiceUnavailable)):
        await site.fetch(site.url())
    assert site.hits == [PUBLIC]


@pytest.mark.parametrize(
    "addresses", [[INNER], [PUBLIC, INNER], ["::1"], ["::ffff:127.0.0.1"], ["169.254.169.254"], ["10.0.0.1"], []]
)
async def test_a_name_with_an_inner_address_is_refused(site: Site, addresses: list[str]) -> None:
    site.addresses = [addresses]
    with pytest.raises(InvalidRequest, match="not public"):
        await site.fetch(site.url())
    assert site.hits == []


async def test_a_name_that_changes_its_address_gets_nobody_inside(site: Site) -> None:
    site.addresses = [[PUBLIC], [INNER]]
    assert await site.fetch(site.url()) == VIDEO
    assert (site.hits, site.lookups) == ([PUBLIC], [NAME])
    site.addresses, site.answers[b"/clip.mp4"] = [[PUBLIC], [INNER]], redirect("/again")
    with pytest.raises(InvalidRequest, match="not public"):
        await site.fetch(site.url())
    assert INNER not in site.hits


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
async def test_the_next_address_is_tried_when_one_does_not_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    connect = asyncio.open_connection

    async def connected(host: str, port: int, **options: Any) -> Any:
        if host != PUBLIC:
            raise OSError(number, os.strerror(number))
        return await connect(host, port, **options)

    monkeypatch.setattr(asyncio, "open_connection", connected)
    site.addresses = [["127.0.0.3", PUBLIC]]
    fetcher = Fetcher([(NAME, site.port)], 10**7, 5.0, tls=site.fetcher()._tls, resolve=site.resolve, is_allowed=bool)
    sink = Received()
    await fetcher.fetch(site.url(), sink)
    assert (bytes(sink.data), site.hits) == (VIDEO, [PUBLIC])


async def test_redirects_are_followed_a_few_times(site: Site) -> None:
    for hop in range(5):
        site.answers[b"/%d" % hop] = redirect(f"/{hop + 1}")
    site.answers[b"/5"] = ok(VIDEO)
    assert await site.fetch(site.url("/2")) == VIDEO
    with pytest.raises(InvalidRequest, match="more than 3 times"):
        await site.fetch(site.url("/1"))


async def test_the_certificate_must_be_of_the_name(site: Site) -> None:
    with pytest.raises(ServiceUnavailable, match="no certificate that is valid for its name"):
        await site.fetch(f"https://wrong.example:{site.port}/clip.mp4", hosts=("wrong.example",))  # type: ignore[arg-type]
    assert site.requests == []


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", VideoNotFound, "status 404"),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", VideoNotFound, "status 403"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", ServiceUnavailable, "status 500"),
        (b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n", ServiceUnavailable, "status 429"),
        (b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n", VideoNotFound, "status 302"),
        (ok(VIDEO, b"Content-Encoding: gzip"), InvalidRequest, "compressed"),
        (ok(VIDEO)[:-100], ServiceUnavailable, "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", LimitExceeded, "99999999999 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", ServiceUnavailable, "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, ServiceUnavailable, "RemoteProtocolError"),
        (b"not HTTP at all\r\n\r\n", ServiceUnavailable, "RemoteProtocolError"),
        (b"", ServiceUnavailable, "RemoteProtocolError"),
    ],
)
async def test_bad_answers_are_named(site: Site, answer: bytes, error: type[SlipstreamError], message: str) -> None:
    site.answers[b"/clip.mp4"] = answer
    with pytest.raises(error, match=message):
        await site.fetch(site.url())


async def test_an_endless_body_is_cut_off(site: Site) -> None:
    chunk = b"186a0\r\n" + bytes(100_000) + b"\r\n"
    site.answers[b"/clip.mp4"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 50
    with VideoBuffer(300_000) as buffer, pytest.raises(LimitExceeded, match="300000"):
        await site.fetcher().fetch(site.url(), buffer)


async def test_a_slow_host_is_given_up(site: Site) -> None:
    site.answers[b"/hang"] = ok(VIDEO)[:-1]
    with pytest.raises(ServiceUnavailable, match=r"limit of 0\.2 s"):
        await site.fetch(site.url("/hang"), timeout_s=0.2)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        *[(text, True) for text in ("93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946")],
        *[(text, False) for text in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "0.0.0.0")],
        *[(text, False) for text in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192")],
        *[(text, False) for text in ("224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1")],
        *[(text, False) for text in ("::1", "::", "fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "ff02::1")],
        *[(text, False) for text in ("fec0::1", "feff::1", "3fff::1", "3fff:fff::1", "5f00::1")],
        *[(text, False) for text in ("::ffff:8.8.8.8", "::7f00:1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001::1")],
    ],
)
def test_only_addresses_of_the_internet_at_large_are_public(address: str, expected: bool) -> None:
    assert is_public(ip_address(address)) == expected


def test_an_address_falls_into_its_pieces() -> None:
    assert parse_url("HTTPS://Videos.Example/a/b.mp4?c=%20d") == Url("videos.example", 443, "/a/b.mp4?c=%20d")
    assert parse_url("https://videos.example:8443?x") == Url("videos.example", 8443, "/?x")
