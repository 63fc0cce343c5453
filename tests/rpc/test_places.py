"""Who has how many of a server's places: a share for each caller, told apart by owner and address."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from slipstream.errors import Overloaded
from slipstream.rpc import callers
from slipstream.rpc.callers import Caller, Places, name_owner, read_peer


@pytest.fixture
def caller() -> Iterator[Any]:
    """Makes somebody the caller."""

    def become(owner: str = "", peer: str = "ipv4:10.0.0.1:1") -> None:
        callers.begin_call(peer)
        name_owner(owner)

    with structlog.contextvars.bound_contextvars(owner=""):
        yield become
    become("", "unix:")


def test_one_caller_has_a_share(caller: Any) -> None:
    places = Places("captions", 8, 0.25, are="are in work")
    with contextlib.ExitStack() as held:
        for owner in ("alice", "bob", "carol"):
            caller(owner)
            for _ in range(2):
                held.enter_context(places.held())
            with pytest.raises(Overloaded, match="2 captions of yours are in work, and one caller may have 2 of 8"):
                held.enter_context(places.held())
        caller("", "ipv4:10.0.0.2:77")
        held.enter_context(places.held())
        caller("", "ipv4:10.0.0.2:78")
        held.enter_context(places.held())
        assert places.used == 8
        caller("", "unix:")
        with pytest.raises(Overloaded, match="8 captions are in work, as many as this service takes"):
            places.check()
    assert places.used == 0
    caller("", "ipv4:127.0.0.1:9")
    with contextlib.ExitStack() as held:
        for _ in range(8):
            held.enter_context(places.held())


def test_an_owner_may_have_a_limit_of_its_own(caller: Any) -> None:
    own_limits = [3]
    places = Places("captions", 8, 0.25, own_limit=lambda: own_limits[-1])
    caller("alice")
    with places.held(3), pytest.raises(Overloaded, match="may have 3 of 8"):
        places.check()
    own_limits.append(0)
    with pytest.raises(Overloaded, match="may have 0 of 8"):
        places.check()


def test_more_may_be_taken_while_some_are_held(caller: Any) -> None:
    places = Places("upload_bytes", 100, 0.25, least=60)
    caller("alice")
    with places.held(0) as take:
        take(60)
        with pytest.raises(Overloaded, match="60 of 100"):
            take(1)
        caller("bob")
        with pytest.raises(Overloaded, match="60 upload_bytes are open"), places.held(41):
            pass
    assert places.used == 0


async def test_who_waits_for_a_place_has_one_when_it_is_given_back(caller: Any) -> None:
    """However many wait, each has one in turn, and one that leaves holds up nobody."""
    places, most = Places("uploads", 2), 0

    async def upload() -> None:
        nonlocal most
        await places.wait(60.0)
        with places.held():
            most = max(most, places.used)
            await asyncio.sleep(0)

    with places.held(2):
        uploads = [asyncio.create_task(upload()) for _ in range(9)]
        await asyncio.sleep(0)
        assert places.used == 2 and not any(one.done() for one in uploads)
        uploads[0].cancel()
    assert (await asyncio.wait(uploads))[0] == {*uploads}
    assert uploads[0].cancelled() and not any(one.exception() for one in uploads[1:])
    assert (most, places.used) == (2, 0)


async def test_nobody_waits_longer_for_a_place_than_was_said() -> None:
    places = Places("uploads", 1)
    with places.held():
        await places.wait(0.01)
        with pytest.raises(Overloaded), places.held():
            pass
        one = asyncio.create_task(places.wait(0.01))
        await one
    await places.wait(0.0)
    assert not places._waiting


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("unix:", Caller(host="unix")),
        ("unix:/run/s.sock", Caller(host="unix")),
        ("ipv4:127.0.0.1:4", Caller(host="127.0.0.1")),
        ("ipv4:10.1.2.3:4", Caller(host="10.1.2.3", is_local=False)),
        ("ipv6:[::1]:4", Caller(host="::1")),
        ("ipv6:%5B::ffff:10.1.2.3%5D:4", Caller(host="10.1.2.3", is_local=False)),
        ("ipv6:%5B2001:db8:1:2:3::4%5D:5", Caller(host="2001:db8:1:2::/64", is_local=False)),
        ("ipv6:[fe80::1%25eth0]:5", Caller(host="fe80::/64", is_local=False)),
        ("", Caller(host="unknown", is_local=False)),
    ],
)
def test_who_is_at_the_other_end(peer: str, caller: Caller) -> None:
    assert read_peer(peer) == caller._replace(owner="")
