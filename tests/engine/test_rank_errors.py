"""What cannot be spread over processes, or does not come together, is refused in words that say what to do."""

import contextlib
import json
import os
import queue
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import HashStore, TCPStore
from transformers import Glm4vTextConfig

from slipstream.engine import load_model, startup
from slipstream.engine.parallel import follower, links, patience, ranks
from slipstream.engine.parallel.follower import Follower
from slipstream.engine.parallel.links import Link, LinkLost, connect
from slipstream.engine.parallel.member import join
from slipstream.engine.parallel.patience import Patience
from slipstream.engine.parallel.ranks import Leader, RankOrder
from slipstream.engine.parallel.shards import check_split
from slipstream.engine.startup import ModelServiceConfig, load_together, rank_order
from slipstream.errors import DeviceLost, InvalidConfig, ModelNotUsable
from tests.support.processes import free_ports
from tests.support.tiny_checkpoint import write_tiny_llava


def config(**options: Any) -> ModelServiceConfig:
    return ModelServiceConfig(model="m", listen="unix:/x", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "0,x"}, "numbers of different GPUs"),
        ({"gpus": "0,0"}, "numbers of different GPUs"),
        ({"gpus": "-1"}, "numbers of different GPUs"),
        ({"gpus": "0,1", "ranks": 3}, "leave out --device and --ranks"),
        ({"gpus": "0,1", "device": "cuda:1"}, "leave out --device and --ranks"),
        ({"ranks": 2, "device": "cuda:0"}, "name the GPUs instead"),
    ],
)
def test_devices_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        assert config(**options).devices


def test_devices() -> None:
    assert config().devices == ("cpu",)
    assert config(ranks=2).devices == ("cpu", "cpu")
    assert config(gpus="2, 0").devices == ("cuda:2", "cuda:0")


def test_a_strict_width_whose_sums_have_no_order() -> None:
    assert rank_order(config(ranks=2), 128).strict_width == 128
    assert rank_order(config(ranks=4), 64).strict_width == 64
    with pytest.raises(InvalidConfig, match="--strict-width is at most 64 where more than two processes"):
        rank_order(config(ranks=4), 65)


def test_torchrun_says_which_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert config(device="cuda").devices == ("cuda:1",) * 8
    assert config().devices == ("cpu",) * 8
    with pytest.raises(InvalidConfig, match="leave out --gpus and --ranks"):
        assert config(gpus="0,1").devices


async def test_torchrun_spreads_targets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(InvalidConfig, match="start this service by itself"):
        await startup.start_model(config(), lambda error: None)


async def test_without_docstrings_no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.sys, "flags", SimpleNamespace(optimize=2))
    with pytest.raises(InvalidConfig, match="transformers reads: start it without -OO"):
        await startup.start_model(config(), lambda error: None)


def text_model(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18_944} | changes
    )


def test_sizes_that_do_not_divide_the_heads() -> None:
    for size in (2, 4):
        check_split("m", text_model(), size)
    with pytest.raises(ModelNotUsable, match=r"3 ranks cannot share its 28 heads, on 4 of .*; take 2 or 4"):
        check_split("m", text_model(), 3)
    with pytest.raises(ModelNotUsable, match="one device only"):
        check_split("m", text_model(num_attention_heads=1, num_key_value_heads=1), 2)
    for size in (2, 4, 8):
        check_split("m", text_model(num_attention_heads=64, moe_intermediate_size=1536), size)
    with pytest.raises(ModelNotUsable, match="take 2 or 3 or 6 or 12"):
        check_split("m", text_model(num_attention_heads=36, num_key_value_heads=6, intermediate_size=36), 4)
    check_split("m", Glm4vTextConfig(), 2)
    with pytest.raises(ModelNotUsable, match="take 2"):
        check_split("m", text_model(moe_intermediate_size=1534), 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llava(tmp_path_factory.mktemp("rank_errors") / "model", seed=1)


def start(checkpoint: Path, *devices: str) -> None:
    losses: list[Any] = []
    load_together(RankOrder(str(checkpoint), devices, "float32", "auto", 0, 1), losses.append)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("cpu", "cuda:7"), "rank 1 of 2 cannot take its share: device 'cuda:7' is not usable here"),
        (("cpu", "cpu", "cpu"), "3 ranks cannot share its 4 heads, on 2 of keys and values, evenly; take 2 or 4"),
    ],
)
def test_a_share_that_cannot_be_taken(checkpoint: Path, devices: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelNotUsable, match=message):
        start(checkpoint, *devices)


def test_ranks_of_torchrun_meet_before_one_looks_at_the_checkpoint(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may have to be downloaded first, and for that the others have more patience."""

    def met(order: RankOrder, on_lost: Any) -> Leader:
        raise ModelNotUsable("they have met")

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(startup, "lead", met)
    with pytest.raises(ModelNotUsable, match="they have met"):
        start(Path("/nowhere"), "cpu", "cpu", "cpu")
    group: Any = SimpleNamespace(size=3, rank=0, checked=contextlib.nullcontext)
    with pytest.raises(ModelNotUsable, match="3 ranks cannot share"):
        load_model(str(checkpoint), group=group)


def facts_of(checkpoint: Path, **options: Any) -> dict[str, str]:
    """What a rank tells of itself before anything is loaded."""
    told: list[dict[str, str]] = []

    def connect(device: torch.device) -> None:
        raise ModelNotUsable("that is all")

    group: Any = SimpleNamespace(size=2, rank=1, checked=contextlib.nullcontext, compare=told.append, connect=connect)
    with pytest.raises(ModelNotUsable, match="that is all"):
        load_model(str(checkpoint), group=group, **options)
    return told[0]


def compare(own: dict[str, str], theirs: dict[str, str]) -> None:
    """At rank 0, beside a rank 1."""
    leader = Leader(2, HashStore(), lambda error: None)
    leader._answers.put((1, {"said": theirs}))
    try:
        leader.compare(own)
    finally:
        leader.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, r"another dtype than rank 0 \(bfloat16, not float32\)"),
        ({"strict_width": 8}, r"another strict width than rank 0 \(8, not 0\)"),
    ],
)
def test_ranks_that_were_started_otherwise(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelNotUsable, match=f"rank 1 of 2 has {message}; start all ranks with the same options"):
        compare(facts_of(checkpoint), facts_of(checkpoint, **options))


def test_a_rank_of_another_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """Of the same sizes, one weight of which was trained further: without a word all texts would be nonsense."""
    same, other = (shutil.copytree(checkpoint, tmp_path / name) for name in ("same", "other"))
    weights = load_file(checkpoint / "model.safetensors")
    (same / "model.safetensors").unlink()
    for number, name in enumerate(weights):
        save_file({name: weights[name]}, same / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate(weights)}}
    (same / "model.safetensors.index.json").write_text(json.dumps(index))
    compare(facts_of(checkpoint), facts_of(same))
    changed = next(name for name in weights if name.endswith("layers.1.self_attn.q_proj.weight"))
    save_file(weights | {changed: weights[changed] * 1.01}, other / "model.safetensors")
    with pytest.raises(ModelNotUsable, match=r"rank 1 of 2 has another checkpoint than rank 0 \(\w{12}, not \w{12}\)"):
        compare(facts_of(checkpoint), facts_of(other))


def test_a_rank_that_dies_while_it_starts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelNotUsable, match="rank 1 of 2 ended with status 1 while it was starting"):
        start(checkpoint, "cpu", "cpu")


@pytest.mark.long
def test_a_rank_that_dies_while_it_loads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_first(*args: Any, group: Leader, **options: Any) -> Any:
        group._processes[1].kill()
        with group.checked():
            pass

    monkeypatch.setattr(startup, "load_model", kill_first)
    with pytest.raises(ModelNotUsable, match="rank 1 of 2"):
        start(checkpoint, "cpu", "cpu")


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "JOIN_S", 0.3)
    with pytest.raises(ModelNotUsable, match=r"2 of 3 ranks did not come within 0\.3 s, first of them rank 1"):
        Leader(3, HashStore(), lambda error: None).meet("127.0.0.1")


def test_a_frozen_side_is_lost_and_a_dead_one_at_once() -> None:
    mine, theirs = socket.socketpair()
    link = Link(mine)
    link.expect_signs(0.2)
    with pytest.raises(LinkLost, match=r"silent for 0\.2 s"):
        link.receive()
    theirs.close()
    with pytest.raises(LinkLost, match=r"has ended|connection is broken"):
        link.receive()
    with pytest.raises(LinkLost, match="connection is broken"):
        link.send({})
    link.close()


def test_records_and_signs_share_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SIGN_S", 0.01)
    mine, theirs = (Link(end) for end in socket.socketpair())
    theirs.expect_signs(0.5)
    heard: list[dict[str, Any]] = []
    sending = threading.Thread(target=lambda: [mine.send({"n": n, "x": "y" * 5000}) for n in range(200)])
    sending.start()
    while len(heard) < 200:
        heard.append(theirs.receive())
    sending.join()
    assert [record["n"] for record in heard] == list(range(200))
    mine.close(), theirs.close()


def test_strangers_are_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What connects has to know the token, and says so at once or is dropped."""
    monkeypatch.setattr(links, "GREETING_S", 0.2)
    store = HashStore()
    leader = Leader(2, store, lambda error: None)
    meeting = threading.Thread(target=leader.meet, args=("127.0.0.1",))
    meeting.start()
    host, port, token = json.loads(store.get("leader"))
    silent = socket.create_connection((host, port))
    for said in (b"\xff" * 8, b"\0\0\0\2[]", b"\0\0\0\3{}}", b"\0\0\0\2{}"):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(said)
            assert stranger.recv(64).strip(b"\0") == b"", "nothing but signs of life, and the end"
    for greeting in ({"rank": 1, "token": "guessed"}, {"rank": 2, "token": token}, {"rank": "1", "token": token}):
        refused = connect((host, port), greeting, 10)
        with pytest.raises(LinkLost):
            refused.receive()
        refused.close()
    assert meeting.is_alive()
    member = connect((host, port), {"rank": 1, "token": token}, 10)
    meeting.join(60)
    assert list(leader._links) == [1]
    leader.publish("noted", what="x")
    assert member.receive() == {"op": "noted", "what": "x"}
    silent.close(), member.close(), leader.close()


def tell_rank(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    """What `torchrun` tells its processes, of a store at this port."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}
    for name, value in (told | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))


def join_two(*_: Any) -> None:
    join(RankOrder("m", ("cpu", "cpu"), "float32", "auto", 0, 1))


@pytest.mark.parametrize(("rank", "come"), [(0, lambda path: start(path, "cpu", "cpu")), (1, join_two)])
def test_a_meeting_point_that_nobody_reaches(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int, come: Callable[[Path], None]
) -> None:
    """`torchrun`'s own store: every rank says where it looked, and what to set."""
    (port,) = free_ports(1)
    tell_rank(monkeypatch, rank, port)
    monkeypatch.setattr(ranks, "JOIN_S", 0.3)
    reason = rf"rank {rank} does not meet the others at 127\.0\.0\.1:{port} within 0\.3 s; .*GLOO_SOCKET_IFNAME"
    with pytest.raises(ModelNotUsable, match=reason):
        come(checkpoint)


def test_a_rank_0_that_never_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "JOIN_S", 0.3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tell_rank(monkeypatch, 1, store.port)
    with pytest.raises(ModelNotUsable, match=rf"rank 1 does not meet the others at 127\.0\.0\.1:{store.port} "):
        join_two()


def test_an_incomplete_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ModelNotUsable, match=r"\(MASTER_ADDR is not set\):\(MASTER_PORT is not set\)"):
        join_two()


def test_ranks_that_reach_rank_0_but_not_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ranks.COLLECTIVE_S, "gloo", 0.3)
    leader = Leader(2, HashStore(), lambda error: None)
    leader.met_at = ("127.0.0.1", 7)
    with pytest.raises(ModelNotUsable, match=r"at 127\.0\.0\.1:7, but rank 0 of 2 .* GLOO_SOCKET_IFNAME"):
        leader.connect(torch.device("cpu"))
    leader.loss = DeviceLost("a rank of the model was lost, and with it the model: rank 1 of 2: it has ended")
    with pytest.raises(ModelNotUsable, match="rank 1 of 2: it has ended; all ranks reached"):
        leader.connect(torch.device("cpu"))
    leader.close()


def test_ranks_that_look_for_each_other_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL does, which has no limit of its own."""
    monkeypatch.setattr(patience, "CHECK_S", 0.02)
    monkeypatch.setattr(ranks, "JOIN_S", 0.1)
    lost: queue.SimpleQueue[DeviceLost] = queue.SimpleQueue()

    def look(*_: Any, **__: Any) -> None:
        raise RuntimeError(str(lost.get(timeout=60)))

    monkeypatch.setattr(ranks.dist, "init_process_group", look)
    leader = Leader(2, HashStore(), lost.put)
    with pytest.raises(ModelNotUsable, match=r"a rank of the model was lost.* does not reach the others over gloo"):
        leader.connect(torch.device("cpu"))
    leader.close()


def no_nccl(*_: Any, **__: Any) -> None:
    raise RuntimeError("no NCCL here")


def test_nccl_ends_the_process_and_not_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun` asks for the other."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    for name in ranks._ON_NCCL:
        monkeypatch.setenv(name, "as it was")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ranks.dist, "init_process_group", no_nccl)
    leader = Leader(2, HashStore(), lambda error: None)
    with pytest.raises(ModelNotUsable, match="NCCL_SOCKET_IFNAME"):
        leader.connect(torch.device("cuda"))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert {name: os.environ[name] for name in ranks._ON_NCCL} == ranks._ON_NCCL
    leader.close()


@pytest.mark.parametrize("op", ["run_step", "write_ahead"])
def test_a_follower_does_not_wait_for_a_recorded_step_for_ever(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "CHECK_S", 0.02)
    monkeypatch.setattr(follower, "finish_work", lambda device: None)
    given_up, hangs = queue.SimpleQueue[str](), SimpleNamespace()
    hangs.run = hangs.write_ahead = lambda *_: given_up.get(timeout=60)
    member = SimpleNamespace(rank=1, size=2, computing=lambda: Patience(given_up.put).within(0.05, "a step"))
    rank = Follower(cast(Any, SimpleNamespace(pool=None)), torch.device("cuda"), cast(Any, member))
    monkeypatch.setattr(rank, "_step", lambda record: hangs)
    rank.do({"op": op, "entries": (), "num_tokens": 2})


@pytest.mark.long
def test_a_network_that_is_not_there(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(ModelNotUsable, match=r"of 2 does not reach the others over gloo; .* GLOO_SOCKET_IFNAME"):
        start(checkpoint, "cpu", "cpu")
