"""A caption's search for a draft goes on, whatever comes of it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from slipstream.captioning import draft_link
from slipstream.captioning.draft_link import DraftLink, DraftListener
from slipstream.errors import ServiceUnavailable
from slipstream.rpc.peers import Peers
from slipstream.video.messages import SampledVideo


class Listener:
    def __init__(self) -> None:
        self.missing: list[str] = []

    def draft_missing(self, reason: str) -> None:
        self.missing.append(reason)


class Choosing:
    """Peers of whose drafts none can be had."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked = 0
        self.thrice = asyncio.Event()

    async def choose_draft(self) -> Any:
        self.asked += 1
        if self.asked == 3:
            self.thrice.set()
        raise self.error


def link_of(peers: Any, make_start: Any, listener: Listener) -> DraftLink:
    video, hears = cast(SampledVideo, None), cast(DraftListener, listener)
    return DraftLink(cast(Peers, peers), make_start, video, hears, silence_s=1.0, timeout_s=1.0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ServiceUnavailable("no draft\x00 is up"), "no draft? is up"),
        (KeyError("not ours to tell"), "internal error; the gateway's log has the details"),
    ],
)
async def test_without_a_draft_it_is_said_once_and_asked_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    monkeypatch.setattr(draft_link, "FIRST_BACK_OFF_S", 0.001)
    peers, listener = Choosing(error), Listener()
    running = asyncio.create_task(link_of(peers, None, listener).run())
    await peers.thrice.wait()
    assert listener.missing == [told] and not running.done()
    running.cancel()


@pytest.mark.parametrize(("steady_s", "expected"), [(0.0, [0.1] * 4), (60.0, [0.1, 0.2, 0.4, 0.8])])
async def test_who_wrote_for_long_is_asked_again_at_once(
    monkeypatch: pytest.MonkeyPatch, steady_s: float, expected: list[float]
) -> None:
    """A draft that is lost as soon as it is asked is left alone for longer and longer."""
    monkeypatch.setattr(draft_link, "STEADY_S", steady_s)
    waits = list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == len(expected):
            raise asyncio.CancelledError

    async def choose() -> Any:
        return Leaving()

    async def make_start() -> Any: ...

    asleep = SimpleNamespace(sleep=sleep, get_running_loop=asyncio.get_running_loop)
    monkeypatch.setattr(draft_link, "asyncio", asleep)
    with pytest.raises(asyncio.CancelledError):
        await link_of(SimpleNamespace(choose_draft=choose), make_start, Joining()).run()
    assert waits == expected


class Leaving:
    """A draft that was chosen, and whose connection is closed before it is asked anything."""

    def open(self, *_: Any, **__: Any) -> Any:
        raise grpc.aio.UsageError("Channel is closed.")


class Joining(Listener):
    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.twice = asyncio.Event()

    def draft_joining(self) -> Any:
        return None

    def draft_lost(self, reason: str) -> None:
        self.lost.append(reason)
        if len(self.lost) == 2:
            self.twice.set()


@pytest.mark.parametrize("starts", [True, False])
async def test_a_draft_that_leaves_as_it_is_asked_is_one_that_was_lost(
    monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    monkeypatch.setattr(draft_link, "FIRST_BACK_OFF_S", 0.001)

    async def choose() -> Any:
        return Leaving()

    async def make_start() -> Any:
        if not starts:
            raise ServiceUnavailable("the target has gone")

    listener = Joining()
    running = asyncio.create_task(link_of(SimpleNamespace(choose_draft=choose), make_start, listener).run())
    await listener.twice.wait()
    assert set(listener.lost) == {draft_link._INTERNAL if starts else "the target has gone"} and not running.done()
    running.cancel()
