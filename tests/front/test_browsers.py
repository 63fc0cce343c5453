"""Pages of other sites cannot use a visitor's front, whatever their browser is made to send."""

import asyncio

import pytest

from slipstream.services.front.api_errors import ApiError
from slipstream.services.front.browsers import Browsers
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
