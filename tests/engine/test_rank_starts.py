"""How the ranks of a model come up: one of them late, and on CPUs of a machine that has GPUs as well."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.distributed import HashStore

from slipstream.engine import load_model, loading
from slipstream.engine.checkpoint import Checkpoint
from slipstream.engine.parallel import member, ranks
from slipstream.engine.parallel.links import Link, LinkLost, connect
from slipstream.engine.parallel.ranks import Group, Leader
from slipstream.engine.parallel.shard_loading import shards_on
from slipstream.errors import InvalidConfig
from slipstream.services.target import __main__ as target
from tests.engine.test_ranks import greedy, prefilled, start
from tests.support.processes import free_ports
from tests.support.tiny_checkpoint import write_tiny_llava

LIMIT_S, LATE_S = 4.0, 6.0
FOLLOWER = """
import sys
from slipstream.engine.parallel import follower
from tests.engine import test_rank_starts
test_rank_starts.{change}
sys.argv[1:] = sys.argv[3:]  # without -m and the module
follower.main()
"""


def limit_collectives() -> None:
    ranks.COLLECTIVE_S["gloo"] = LIMIT_S


def load_late() -> None:
    """As from a disk that is slower than another machine's."""
    read = loading.AutoModelForImageTextToText.from_pretrained

    def read_late(*given: Any, **options: Any) -> Any:
        loaded = read(*given, **options)
        time.sleep(LATE_S)
        return loaded

    loading.AutoModelForImageTextToText = SimpleNamespace(from_pretrained=read_late)  # type: ignore[misc]


def be_late() -> None:
    limit_collectives()
    load_late()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_llava(tmp_path / "model", seed=1)


@pytest.fixture
def changed_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has followers call a function of this module before anything else."""

    def change(name: str) -> None:
        python, script, program = sys.executable, tmp_path / "follower.py", tmp_path / "python"
        script.write_text(FOLLOWER.format(change=f"{name}()"))
        program.write_text(f'#!/bin/sh\nPYTHONPATH="$PWD:$PYTHONPATH" exec "{python}" "{script}" "$@"\n')
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return change


def check_decoding(checkpoint: Path) -> None:
    spread = start(checkpoint, 2)
    try:
        expected, found = (greedy(model, *prefilled(model), 4) for model in spread.both())
        assert found == expected and not spread.losses
    finally:
        spread.leader.close()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.long
def test_a_rank_that_loads_late_is_waited_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, changed_followers: Callable[[str], None], late: int
) -> None:
    """Longer than a collective may take: by rank 0 and by the other one."""
    monkeypatch.setitem(ranks.COLLECTIVE_S, "gloo", LIMIT_S)
    monkeypatch.setattr(loading, "AutoModelForImageTextToText", loading.AutoModelForImageTextToText)
    changed_followers("be_late" if late else "limit_collectives")
    if not late:
        load_late()
    check_decoding(checkpoint)


def build_for_gpus() -> None:
    """As a torch for CUDA says, also where there is no GPU."""
    torch._C._get_accelerator = lambda *_: torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.long
def test_ranks_on_cpus_by_a_torch_for_gpus(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, changed_followers: Callable[[str], None]
) -> None:
    monkeypatch.setattr(torch._C, "_get_accelerator", torch._C._get_accelerator)
    changed_followers("build_for_gpus")
    build_for_gpus()
    check_decoding(checkpoint)
    assert torch._C._get_accelerator().type == "cuda", "as it was"


def test_ranks_on_gpus_shard_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_get_accelerator", torch._C._get_accelerator)
    build_for_gpus()
    for name in ("cpu", "cuda"):
        with shards_on(torch.device(name), "llava_onevision"):
            assert torch._C._get_accelerator().type == name


@pytest.mark.parametrize("reached_at", ["127.0.0.1", "::1"])
def test_a_machine_is_found_by_a_name_that_leads_elsewhere_from_itself(reached_at: str) -> None:
    """To loopback, on Debian; behind a translated address, to none of its own."""
    if reached_at == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    store = HashStore()
    leader = Leader(2, store, lambda error: None)
    meeting = threading.Thread(target=leader.meet, args=("node0.invalid",))
    meeting.start()
    host, port, token = json.loads(store.get("leader"))
    other = connect((reached_at, port), {"rank": 1, "token": token}, 10)
    meeting.join()
    assert host == "node0.invalid" and list(leader._links) == [1]
    other.close(), leader.close()


def test_a_rank_that_finds_an_earlier_start_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun` starts its processes anew beside the store that it has, and rank 0 may be the last of them."""
    store = HashStore()
    store.set("leader", json.dumps(["127.0.0.1", *free_ports(1), "earlier"]))
    leader = Leader(2, store, lambda error: None)
    meeting = threading.Thread(target=leader.meet, args=("127.0.0.1",))

    def try_once(*given: Any) -> Link:
        try:
            return connect(*given)
        except LinkLost:
            if meeting.ident is None:
                meeting.start()
            raise

    monkeypatch.setattr(member, "connect", try_once)
    monkeypatch.setattr(member, "read_all", lambda *_: None)
    monkeypatch.setattr(member, "LOOK_AGAIN_S", 0.1)
    found = member.Member(1, 2, store)
    meeting.join()
    assert found.token == leader.token and found.met_at == leader.met_at
    leader.close()


def test_ranks_of_one_machine_meet_on_loopback() -> None:
    told = {"MASTER_ADDR": "node0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert ranks._host_for_others(told) == "node0"
    assert ranks._host_for_others(told | {"LOCAL_WORLD_SIZE": "8"}) == "127.0.0.1"


@pytest.mark.parametrize(
    ("told", "words", "error"),
    [
        ({}, (), "RANK is set, as torchrun sets it, and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, ("--device", "cuda"), "RANK is set, as torchrun sets it, and LOCAL_RANK is not"),
        ({"WORLD_SIZE": "2"}, ("--gpus", "0,1"), "torchrun says which ranks there are; leave out --gpus"),
        ({"WORLD_SIZE": "2"}, ("--gpu", "0"), "unrecognized arguments"),
    ],
)
def test_a_rank_that_cannot_be_configured_says_so(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], words: Sequence[str], error: str
) -> None:
    """In a sentence, as rank 0 does."""
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (told | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["target", "--model", "m", "--listen", "unix:/x", *words])
    monkeypatch.setattr(target, "log_all_output", lambda: None)
    monkeypatch.setattr(target, "configure_logs", lambda name: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with capture_logs() as logs, pytest.raises(SystemExit) as ended:
        target.main()
    assert ended.value.code == InvalidConfig.exit_code
    assert logs[0]["event"] == "rank.failed" and logs[0]["error"].startswith(error)


class Alone(Group):
    """One that no other rank belongs to."""

    def connect(self, device: torch.device) -> None:
        pass

    def compare(self, facts: Mapping[str, str]) -> None:
        pass

    def _tell(self, failure: str) -> None:
        pass

    def _give_up(self, why: str) -> None:
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_follower_reads_no_more_than_its_share(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The digest of all weights is rank 0's to tell."""
    load_weights, digests = loading._load_weights, list[Checkpoint]()

    def digest(checkpoint: Checkpoint, _: object) -> str:
        digests.append(checkpoint)
        return "d"

    monkeypatch.setattr(loading, "_load_weights", lambda *given: load_weights(*given[:3], None))
    monkeypatch.setattr(Checkpoint, "revision", digest)
    model = load_model(str(checkpoint), group=Alone(rank, 1, HashStore()))
    assert (model.info.revision, len(digests)) == (("", 0) if rank else ("d", 1))
