"""Several services behind one option, without a wire: who is asked, who is left out, and what a name leads to."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from slipstream.errors import ModelNotUsable, ServiceUnavailable, SlipstreamError, VersionMismatch
from slipstream.rpc import pools
from slipstream.rpc.peers import Peers, RemoteTarget
from slipstream.rpc.pools import Pool, addresses_behind, is_name, one_or_pool, sketch_of, split_addresses
from slipstream.service_info import ModelInfo, ServiceLoad
from slipstream.speculation.placement import choose_target
from tests.support.processes import eventually

MODEL = ModelInfo(model_id="m", revision="r", dtype="float32")
IDLE = ServiceLoad(max_sessions=4, kv_budget_bytes=4000)


@dataclass
class Fake:
    """A service, in this process."""

    address: str
    name: str = ""
    model: ModelInfo = MODEL
    load: ServiceLoad = IDLE
    is_there: bool = True
    refused: SlipstreamError | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0
    on_answer: Callable[[], None] = lambda: None
    closed_after_s: float | None = None

    async def ask(self) -> ModelInfo:
        self.asked += 1
        await self.answers.wait()
        if self.refused is not None:
            raise self.refused
        if not self.is_there:
            raise ServiceUnavailable(f"{self.address} is away")
        self.on_answer()
        return self.model

    async def close(self, grace_s: float = 0.0) -> None:
        self.closed_after_s = grace_s


@dataclass
class Frames:
    frames: Any


def video(seed: int) -> Frames:
    return Frames(np.random.default_rng(seed).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8))


@asynccontextmanager
async def pool_of(*told: str) -> AsyncIterator[tuple[Pool[Fake], dict[str, Fake]]]:
    fakes: dict[str, Fake] = {}

    def connect(address: str, name: str) -> Fake:
        fakes[address] = Fake(address, name)
        fakes[address].answers.set()
        return fakes[address]

    pool = Pool("target", told, connect, choose_target, Random(3))
    try:
        yield pool, fakes
    finally:
        await pool.close()


async def placed(pool: Pool[Fake], times: int) -> set[str]:
    return {(await pool.choose()).address for _ in range(times)}


async def test_captions_go_where_there_is_room_and_nowhere_else() -> None:
    async with pool_of("unix:a", "unix:b", "unix:c") as (pool, fakes):
        fakes["unix:a"].load = replace(IDLE, sessions=1, kv_bytes=3900)
        fakes["unix:b"].load = replace(IDLE, sessions=4, kv_bytes=400)
        assert await placed(pool, 3) == {"unix:c"}
        assert [info.placed for info in pool.infos()] == [0, 0, 3]


async def test_one_that_is_away_is_left_out_until_it_answers_again() -> None:
    async with pool_of("unix:a", "unix:b") as (pool, fakes):
        fakes["unix:a"].is_there = False
        assert await pool.ask() == MODEL
        assert await placed(pool, 3) == {"unix:b"}
        assert [bool(info.left_out) for info in pool.infos()] == [True, False]
        fakes["unix:b"].is_there = False
        with pytest.raises(ServiceUnavailable, match="is away"):
            await pool.choose()
        with pytest.raises(ServiceUnavailable, match="is away"):
            await pool.ask()
        assert pool.model == MODEL, "and what was served last is still known"
        fakes["unix:a"].is_there = True
        assert await placed(pool, 3) == {"unix:a"}


async def test_what_is_told_of_drafts_holds_also_while_no_caption_wants_one() -> None:
    peers = Peers("unix:t", "unix:d")
    async with pool_of("unix:a", "unix:b") as (pool, fakes):
        monitored: Any = pool
        peers.draft = monitored
        fakes["unix:b"].is_there = False
        watching = asyncio.create_task(peers.watch_draft(0.001))
        await eventually(lambda: [bool(info.left_out) for info in pool.infos()] == [False, True])
        fakes["unix:a"].load, fakes["unix:b"].is_there = replace(IDLE, sessions=1), True
        await eventually(lambda: [info.left_out for info in pool.infos()] == ["", ""])
        assert pool.infos()[0].load.sessions == 1
        fakes["unix:a"].is_there = fakes["unix:b"].is_there = False
        await eventually(lambda: peers.draft is not None and peers.draft.model is None)
        watching.cancel()
    await peers.target.close()


async def test_one_that_is_frozen_delays_a_choice_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "PROBE_S", 0.01)
    async with pool_of("unix:a", "unix:b") as (pool, fakes):
        fakes["unix:a"].answers.clear()
        assert await pool.ask() == MODEL
        assert await placed(pool, 4) == {"unix:b"}
        assert fakes["unix:a"].asked == 1, "who is being asked is not asked again"


async def test_an_answer_counts_for_all_who_wait_for_it_whoever_asks_again() -> None:
    """Where many captions begin at once, the next question is open before those who waited for an answer go on."""
    async with pool_of("unix:a") as (pool, fakes):
        fake, later = fakes["unix:a"], []

        def ask_again() -> None:
            fake.answers.clear()
            later.append(asyncio.create_task(pool.ask()))

        fake.on_answer = ask_again
        assert await pool.ask() == MODEL
        fake.answers.set()
        assert await pool.choose() is fake
        assert await later[0] == MODEL


async def test_who_waits_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway whose --target leads nowhere stood silent until its time was over, and then did not say why."""
    monkeypatch.setattr(pools, "TELL_S", 0.0)
    target = RemoteTarget(f"unix:{tmp_path}/none.sock")
    with capture_logs() as logs:
        waiting = asyncio.create_task(target.wait(600))
        await eventually(lambda: logs)
        waiting.cancel()
    with pytest.raises(ServiceUnavailable, match=r"^no answer of the target at .* within 0 s: .*/none\.sock"):
        await target.wait(0)
    await target.close()
    (said,) = logs
    assert (said["event"], said["log_level"]) == ("target.awaited", "warning")
    assert f"{tmp_path}/none.sock" in said["reason"]


@pytest.mark.parametrize("older", ["unix:a", "unix:b"])
async def test_one_of_another_release_is_no_reason_not_to_wait_for_the_other(older: str) -> None:
    """Whichever is named first, as in an upgrade of one after the other."""
    newer = {"unix:a": "unix:b", "unix:b": "unix:a"}[older]
    async with pool_of("unix:a", "unix:b") as (pool, fakes):
        fakes[older].refused = VersionMismatch("it speaks another version")
        fakes[newer].is_there = False
        with pytest.raises(ServiceUnavailable, match=f"{newer} is away"):
            await pool.ask()
        waiting = asyncio.create_task(pool.wait(60))
        asked = fakes[newer].asked
        await eventually(lambda: fakes[newer].asked > asked)
        fakes[newer].is_there = True
        await waiting
        assert await placed(pool, 2) == {newer}


async def test_another_model_is_refused_and_never_taken() -> None:
    async with pool_of("unix:a", "unix:b") as (pool, fakes):
        await pool.ask()
        fakes["unix:b"].model = replace(MODEL, model_id="other", revision="x")
        with pytest.raises(ModelNotUsable, match=r"target 2 serves 'other' .* another model than target 1, 'm'"):
            await pool.check()
        assert await placed(pool, 4) == {"unix:a"}
        fakes["unix:b"].model = replace(MODEL, dtype="bfloat16")
        with pytest.raises(ModelNotUsable, match="bfloat16"):
            await pool.check()
        fakes["unix:a"].is_there = False
        await pool.wait(5)
        assert await placed(pool, 2) == {"unix:b"}, "a new model takes over when nobody has the old one"
        assert pool.model is not None and pool.model.dtype == "bfloat16"


async def test_a_video_goes_where_it_was_captioned_before_while_there_is_room() -> None:
    async with pool_of("unix:a", "unix:b", "unix:c") as (pool, fakes):
        first = await pool.choose(video(1))
        assert {(await pool.choose(video(1))).address for _ in range(2)} == {first.address}
        fakes[first.address].load = replace(IDLE, sessions=4)
        assert (await pool.choose(video(1))).address != first.address
    assert sketch_of(Frames(np.empty((0, 1, 1, 3)))) is None
    assert sketch_of(video(1)) != sketch_of(video(2))


async def test_many_at_once_are_spread_before_any_figure_shows_them() -> None:
    async with pool_of("unix:a", "unix:b") as (pool, _):
        chosen = await asyncio.gather(*(pool.choose() for _ in range(6)))
        addresses = [each.address for each in chosen]
        assert addresses.count("unix:a") == addresses.count("unix:b") == 3


def test_addresses() -> None:
    assert split_addresses("a:1, b:2") == ("a:1", "b:2")
    assert split_addresses("ipv4:10.0.0.1:5,10.0.0.2:5") == ("10.0.0.1:5", "10.0.0.2:5")
    assert split_addresses("unix:/x") == ("unix:/x",)
    assert [is_name(each) for each in ("target:1", "10.0.0.1:1", "[::1]:1", "unix:/x", "dns:///t:1")] == [
        True, False, False, False, False,
    ]  # fmt: skip
    assert isinstance(one_or_pool("target", "10.0.0.1:1", Fake, choose_target), Fake)
    assert isinstance(one_or_pool("target", "somewhere:1", Fake, choose_target), Pool)


class Names:
    """Stands in for the resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
        self.hosts = hosts
        self.failures: dict[str, Exception] = {}
        self.asked = asyncio.Event()
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.look_up)

    async def look_up(self, host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        self.asked.set()
        if host in self.failures:
            raise self.failures[host]
        if not self.hosts:
            raise socket.gaierror("no such name")
        kinds = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in self.hosts]
        return [(kind, 1, 6, "", (each, port)) for kind, each in zip(kinds, self.hosts, strict=True)]


async def test_what_a_name_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(monkeypatch, "10.0.0.2", "10.0.0.1", "10.0.0.1", "fe::1")
    assert await addresses_behind("t:5") == ("10.0.0.1:5", "10.0.0.2:5")
    names.hosts = ("10.0.0.1", "fe::1")
    assert await addresses_behind("t:5") == ("t:5",), "one machine of two families"
    names.hosts = ("fe::1", "fe::2")
    assert await addresses_behind("t:5") == ("[fe::1]:5", "[fe::2]:5")


async def test_a_name_that_leads_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "LOOKUP_S", 0.0)
    names = Names(monkeypatch, "10.0.0.1", "10.0.0.2")
    async with pool_of("t:5") as (pool, fakes):

        async def members_are(*expected: str) -> None:
            while [member.address for member in pool.members] != list(expected):
                await pool.ask()

        await asyncio.wait_for(members_are("10.0.0.1:5", "10.0.0.2:5"), 30)
        assert fakes["10.0.0.1:5"].name == "t", "whose certificate says so"
        assert fakes["t:5"].closed_after_s == pools.LEAVE_S, "sessions end where they are"
        names.hosts = ()
        names.asked.clear()
        await pool.ask()
        await names.asked.wait()
        assert await placed(pool, 2) <= {"10.0.0.1:5", "10.0.0.2:5"}
        names.hosts = ("10.0.0.2", "10.0.0.3")
        await asyncio.wait_for(members_are("10.0.0.2:5", "10.0.0.3:5"), 30)
        assert [info.number for info in pool.infos()] == [3, 4]


async def test_a_name_that_leads_nowhere_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a set of pods that is scaled to none; nor does one that cannot be a name."""
    monkeypatch.setattr(pools, "LOOKUP_S", 0.0)
    names = Names(monkeypatch)
    names.failures = {"gone": socket.gaierror("no such name"), "a..b": UnicodeError("label empty or too long")}
    async with pool_of("gone:5", "a..b:5", "t:5") as (pool, _), asyncio.timeout(30):
        for hosts in (("10.0.0.1", "10.0.0.2"), ("10.0.0.3", "10.0.0.4")):
            names.hosts = hosts
            expected = ["gone:5", "a..b:5", *(f"{host}:5" for host in hosts)]
            while [member.address for member in pool.members] != expected:
                await pool.ask()
