"""Where a draft pulls guidance from: allowed addresses only, and no connection for every address it was ever told."""

import asyncio
import socket

import pytest

from slipstream.errors import InvalidRequest, ServiceUnavailable
from slipstream.services.draft import servicer
from slipstream.services.draft.__main__ import DraftConfig
from slipstream.services.draft.servicer import MAX_IDLE_CHANNELS, Targets
from slipstream.session_messages import DraftStart
from slipstream.speculation.methods import GuidanceKind


def asked(address: str) -> DraftStart:
    return DraftStart("s", "?", "uv", 0.5, "original", GuidanceKind.SCORES, address, 0)


async def test_only_allowed_addresses_are_called() -> None:
    config = DraftConfig(listen="", model="", guidance_targets="far:7001, unix:/nowhere/target.sock,")
    pulling = Targets(config.allowed_targets)
    for address in ("169.254.169.254:80", "unix:/nowhere/target.sock2", "", "x" * 10_000):
        with pytest.raises(InvalidRequest, match="--guidance-targets"):
            await pulling.pull(asked(address))
    with pytest.raises(ServiceUnavailable, match="no guidance"):
        await pulling.pull(asked("unix:/nowhere/target.sock"))
    await pulling.close()


@pytest.mark.parametrize("allowed", ["localhost:7001", "127.0.0.1:7001", "[::1]:7001"])
async def test_another_name_of_an_allowed_machine_is_allowed(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom names lead to is said here: a machine's own resolver may know more or fewer."""
    names = {"localhost": ["127.0.0.1", "::1"], "target-7": ["127.0.0.1"], "six": ["::1"], "far": ["192.0.2.7"]}
    names |= {"both": ["127.0.0.1", "192.0.2.7"]}

    async def look_up(host: str, port: int, **hints: object) -> list[tuple[object, ...]]:
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(0, 0, 0, "", (place, port)) for place in names.get(host, [host])]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    pulling = Targets(frozenset({allowed}))
    await pulling.check("six:7001" if "[" in allowed else "target-7:7001")
    for address in ("far:7001", "both:7001", "nowhere:7001", "target-7:7002", "target-7", ":7001", "dns:///far:7001"):
        with pytest.raises(InvalidRequest, match="--guidance-targets"):
            await pulling.check(address)


async def test_addresses_that_are_no_longer_used_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real_open = servicer.open_channel

    def counting_open(address: str, security: object) -> object:
        opened.append(address)
        return real_open(address)

    monkeypatch.setattr(servicer, "open_channel", counting_open)
    pulling = Targets()
    addresses = [f"unix:/nowhere/{number}.sock" for number in range(MAX_IDLE_CHANNELS + 5)]
    for address in [*addresses, addresses[-1], addresses[0]]:
        with pytest.raises(ServiceUnavailable):
            await pulling.pull(asked(address))
    await pulling.close()
    assert opened == [*addresses, addresses[0]], "the latest is kept, the oldest was closed and is opened again"
