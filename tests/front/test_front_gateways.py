"""What the front asks of its gateways, with one that is frozen: it has connections, and answers nothing."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from slipstream.client.connection import Connection
from slipstream.errors import ServiceUnavailable, SlipstreamError
from slipstream.service_info import GatewayInfo
from slipstream.services.front import gateways
from slipstream.services.front.config import FrontConfig
from slipstream.services.front.gateways import Gateways

AWAY, SOUND = "127.0.0.1:1", GatewayInfo(target_model="sound")


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Gateways]:
    """Two gateways, of which tests say what they answer."""
    asked = Gateways(FrontConfig(listen="127.0.0.1:0", gateway=f"{AWAY},{AWAY}"))
    yield asked
    await asked.close()


async def test_who_waits_for_an_answer_shares_that_there_is_none(
    pair: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for as long again, one after the other."""
    num_looks, is_over = 0, asyncio.Event()

    async def look(connection: Connection) -> GatewayInfo | SlipstreamError:
        nonlocal num_looks
        num_looks += 1
        await is_over.wait()
        return ServiceUnavailable("away")

    monkeypatch.setattr(gateways, "_info_or_error", look)
    waiting = [asyncio.create_task(pair.info("")) for _ in range(6)]
    await asyncio.sleep(0)
    is_over.set()
    said = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(error, ServiceUnavailable) for error in said) and num_looks == 2
    with pytest.raises(ServiceUnavailable):
        await pair.info("")
    assert num_looks == 4, "who comes later has it tried again"


async def test_one_that_is_frozen_is_not_waited_for_again(pair: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, answers = asyncio.Event(), {pair._channels[0]: SOUND}
    is_over.set()

    async def look(connection: Connection) -> GatewayInfo | SlipstreamError:
        if connection.channel in answers:
            return answers[connection.channel]
        await is_over.wait()
        return ServiceUnavailable("frozen")

    monkeypatch.setattr(gateways, "_info_or_error", look)
    monkeypatch.setattr(gateways, "INFO_S", -1.0)
    assert await pair.info("") == SOUND
    is_over.clear()
    async with asyncio.timeout(10):
        assert await pair.info("") == SOUND
    answers = {pair._channels[1]: SOUND}  # the frozen one is back, and the other one is gone
    is_over.set()
    assert await pair.info("") == SOUND
