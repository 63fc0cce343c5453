"""Pages of other sites cannot use a visitor's front, whatever their browser is made to send."""

import asyncio

import pytest

from slipstream.config import parse_config
from slipstream.errors import InvalidConfig
from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.browsers import Browsers, check_names, check_origins
from slipstream.services.front.config import FrontConfig
from tests.cli.fake_gateway import FakeGateway
from tests.support.front import CHAT, error_of, front_at, post, raw, status_of

OWN = Browsers(frozenset(), frozenset({"captions.example.org"}))
NAMED = Browsers(frozenset({"https://studio.example"}), None)


def refusal(browsers: Browsers, method: str = "POST", **headers: str) -> str | None:
    """The code of the refusal; None: it may ask."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        browsers.check(method, lambda name: given.get(name, ""))
    except ApiError as error:
        return error.code if error.status == 403 else f"status {error.status}"
    return None


LOCAL = """127.0.0.1:8000 [::1]:8000 [fe80::1%eth0] 10.0.0.7 localhost:8000 front:8000 Front. nas.local :8000
front.slipstream.svc.cluster.local:80 CAPTIONS.example.org captions.example.org.:8000"""
FOREIGN = """evil.example evil.example:8000 127.0.0.1.evil.example localhost.evil.example x@evil.example [evil.example
captions.example.org.evil.io evil.local.example"""


@pytest.mark.parametrize("host", ["", *LOCAL.split()])
def test_names_that_no_stranger_can_own(host: str) -> None:
    assert refusal(OWN, "GET", host=host) is None


@pytest.mark.parametrize("host", FOREIGN.split())
def test_names_that_a_stranger_can_point_here(host: str) -> None:
    assert refusal(OWN, "GET", host=host) == "unknown_host"
    assert refusal(NAMED, "GET", host=host) is None, "callers must know a token"


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_pages_of_other_sites_change_nothing(method: str) -> None:
    host = "localhost:8000"
    for headers in (
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://localhost:3000"},
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"origin": "http://[broken"},
    ):
        assert refusal(OWN, method, host=host, **headers) == "unknown_origin", headers
        assert refusal(OWN, "GET", host=host, **headers) is None, "whose answer the page cannot read"
    for headers in (
        {},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "same-origin", "origin": "https://behind.a.proxy.example"},
        {"origin": "http://LOCALHOST:8000"},
    ):
        assert refusal(OWN, method, host=host, **headers) is None, headers


def test_pages_that_were_named_may_call() -> None:
    asked = {"host": "x", "sec_fetch_site": "cross-site"}
    assert refusal(NAMED, origin="https://studio.example", **asked) is None
    assert refusal(NAMED, origin="https://studio.example.evil.io", **asked) == "unknown_origin"
    assert refusal(Browsers(frozenset("*"), None), origin="https://any.example", **asked) is None


NAMES = "captions.example.org Captions.example.org. nas host_1 10.0.0.7 ::1 xn--bcher-kva.example"
NO_NAMES = (
    "captions.example.org:8000 https://captions.example.org captions.example.org/v1 *.example.org bücher https://x"
)
ORIGINS = (
    "* null https://studio.example http://localhost:3000 https://studio.example:80 http://[::1]:5173 app://obsidian.md"
)
NO_ORIGINS = """https://studio.example/ studio.example studio.example:3000 https://Studio.example https://*.example
https://studio.example:443 http://studio.example:80 HTTPS://studio.example https://studio.example/app https://"""


def test_names_and_origins_that_nobody_would_ever_match() -> None:
    """A front that was given them said that they were not among them."""
    assert not check_names("") and not check_origins("") and not check_names(" a.example , b.example,")
    for name in NAMES.split():
        assert check_names(f"a.example,{name}") is None, name
    for name in NO_NAMES.split():
        assert repr(name) in str(check_names(f"a.example,{name}")), name
    for origin in ORIGINS.split():
        assert check_origins(f"https://a.example, {origin}") is None, origin
    for origin in NO_ORIGINS.split():
        assert repr(origin) in str(check_origins(f"https://a.example,{origin}")), origin


@pytest.mark.parametrize("flags", [["--hosts", "a.example:80"], ["--cors-origins", "https://a.example/"]])
def test_a_front_does_not_start_with_them(flags: list[str]) -> None:
    given = ["--listen", "127.0.0.1:0", "--gateway", "127.0.0.1:1", *flags]
    with pytest.raises(InvalidConfig, match=f"^{flags[0]}: "):
        parse_config(FrontConfig, "front", given, {})


async def test_a_front_refuses_them(gateway: FakeGateway) -> None:
    async def answer(address: str, line: str, *headers: str) -> bytes:
        return await raw(address, "\r\n".join([f"{line} HTTP/1.1", *headers, "Connection: close", "", ""]).encode())

    async with front_at(gateway.address, hosts="mine.example, other.example") as address:
        foreign = await raw(address, post(CHAT, b"{}", more="Sec-Fetch-Site: cross-site\r\n"))
        assert status_of(foreign) == 403 and error_of(foreign)["code"] == "unknown_origin"
        rebound = await answer(address, "GET /v1/models", "Host: evil.example")
        assert status_of(rebound) == 403 and error_of(rebound)["code"] == "unknown_host"
        found = await asyncio.gather(
            *(
                answer(address, "GET /v1/models", f"Host: {host}")
                for host in ("mine.example", "other.example", address)
            ),
            answer(address, "GET /health", "Host: evil.example"),
        )
        assert [status_of(one) for one in found] == [200] * 4
