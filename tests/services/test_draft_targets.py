"""Where a draft pulls guidance from: allowed addresses only, and no connection for every address it was ever told."""

import pytest

from slipstream.errors import InvalidRequest, ServiceUnavailable
from slipstream.messages import DraftStart
from slipstream.services.draft import servicer
from slipstream.services.draft.servicer import MAX_IDLE_CHANNELS, Targets
from slipstream.speculation.methods import GuidanceKind


def asked(address: str) -> DraftStart:
    return DraftStart("s", "?", "uv", 0.5, "original", GuidanceKind.SCORES, address, 0)


async def test_only_allowed_addresses_are_called() -> None:
    pulling = Targets(frozenset({"unix:/nowhere/target.sock"}))
    for address in ("169.254.169.254:80", "unix:/nowhere/target.sock2", "", "x" * 10_000):
        with pytest.raises(InvalidRequest, match="--guidance-targets"):
            await pulling.pull(asked(address))
    with pytest.raises(ServiceUnavailable, match="no guidance"):
        await pulling.pull(asked("unix:/nowhere/target.sock"))
    await pulling.close()


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
