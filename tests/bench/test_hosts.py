"""Hosts that are network namespaces: cut off, they hear nothing and are told nothing; and nothing of them is left."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime

import pytest

from bench.common import ROOT
from bench.host_check import plan_hosts
from tests.support.network import inside
from tests.support.redis_group import DOWN_AFTER_MS, HEARD_S, failovers

STEPS = """
import socket, subprocess, sys
from tests.support.network import address, cut, make_network, mend, plug_in, pull_out

make_network()
plug_in(0), plug_in(1)
ECHO = "import socket, sys; s = socket.create_server((sys.argv[1], 7)); print(flush=True); c = s.accept()[0]\\n"
ECHO += "while d := c.recv(9): c.sendall(d)"
words = ["nsenter", "--net=/run/netns/host-1", sys.executable, "-c", ECHO, address(1)]
server = subprocess.Popen(words, stdout=subprocess.PIPE)
server.stdout.readline()
client = socket.create_connection((address(1), 7), 30)

def heard(word, seconds):
    client.settimeout(seconds)
    client.sendall(word)
    try:
        return client.recv(9)
    except TimeoutError:
        return None

print(heard(b"well", 30))
cut(1)
print(heard(b"cut", 0.5))
mend(1)
client.settimeout(30)
print(client.recv(9))
server.kill(), server.wait()
pull_out(1)
plug_in(1)
print("again")
"""


@pytest.fixture
async def output() -> AsyncIterator[list[str]]:
    """What the steps say, of hosts that are gone with them."""
    try:
        words = inside([sys.executable, "-c", STEPS])
    except OSError as error:
        pytest.skip(str(error))
    before = os.listdir("/sys/class/net")
    process = await asyncio.create_subprocess_exec(
        *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    yield said.decode().splitlines()
    assert os.listdir("/sys/class/net") == before


async def test_who_is_cut_off_hears_nothing_until_it_is_mended(output: list[str]) -> None:
    assert output == ["b'well'", "None", "b'cut'", "again"]


def test_what_hosts_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "nsenter" else f"/usr/bin/{name}")
    with pytest.raises(OSError, match=r"util-linux.*: nsenter"):
        inside(["true"])
    monkeypatch.undo()
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: subprocess.CompletedProcess(args, 1))
    with pytest.raises(OSError, match="run it as root"):
        inside(["true"])


@pytest.mark.parametrize("seed", range(20))
def test_plans_are_those_of_their_seed_and_strike_two_hosts(seed: int) -> None:
    plan = plan_hosts(seed)
    assert plan == plan_hosts(seed)
    assert sorted(strike.kind for strike in plan) == ["cut off", "fail over", "switch off"]
    assert len({strike.victim for strike in plan}) == 3


def test_when_another_leader_was_chosen_is_read_from_what_sentinels_say() -> None:
    """Two of them say so of one failover, some seconds apart."""
    one = "7:X 27 Nov 2026 14:57:20.054 # +switch-master queue 10.77.0.1 6379 10.77.0.2 6379\n"
    other = "9:X 27 Nov 2026 14:57:23.554 # +switch-master queue 10.77.0.1 6379 10.77.0.2 6379\n"
    later = "7:X 27 Nov 2026 14:58:23.554 # +switch-master queue 10.77.0.2 6379 10.77.0.1 6379\n"
    other += "9:X 27 Nov 2026 14:58:00.000 # +sdown master queue 10.77.0.2 6379\n"
    (first, second) = failovers([one + later, other])
    at = datetime(2026, 11, 27, 14, 57, 20, 54_000).timestamp()
    assert first == (at - DOWN_AFTER_MS / 1000, pytest.approx(at + 3.5 + HEARD_S))
    assert second[0] == pytest.approx(at + 63.5 - DOWN_AFTER_MS / 1000)
