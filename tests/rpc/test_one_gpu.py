"""Whether target and draft take turns on one GPU, and that it is told."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from slipstream.engine import startup
from slipstream.engine.startup import MPS_VARIABLE, gpu_uuids, uses_mps
from slipstream.rpc.codec import read_model_info, to_message
from slipstream.rpc.peers import Peers
from slipstream.rpc.v1 import common_pb2
from slipstream.service_info import ModelInfo, take_turns

ALONE = ModelInfo(model_id="m", tokenizer_digest="t", gpu_uuids=("GPU-a",))
SERVED = replace(ALONE, uses_mps=True)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (ALONE, ALONE, True),
        (replace(ALONE, gpu_uuids=("GPU-a", "GPU-b")), replace(ALONE, gpu_uuids=("GPU-b",)), True),
        (ALONE, replace(ALONE, gpu_uuids=("GPU-b",)), False),
        (ModelInfo(), ModelInfo(), False),
        (SERVED, SERVED, False),
        (SERVED, ALONE, True),
    ],
    ids=["one GPU", "one of several", "a GPU each", "no GPU", "MPS", "MPS for one of them"],
)
async def test_who_takes_turns(target: ModelInfo, draft: ModelInfo, expected: bool) -> None:
    assert take_turns(target, draft) is expected
    peers = Peers("127.0.0.1:1", "127.0.0.1:2")
    peers.target.model = target
    with capture_logs() as logs:
        for _ in range(3):
            peers.check_draft(draft)
    await peers.close()
    assert [log["event"] for log in logs] == ["peers.one_gpu"] * expected, "once, however often it is asked"


def test_it_crosses_the_wire_and_an_old_release_says_nothing() -> None:
    assert read_model_info(to_message(SERVED, common_pb2.ModelInfo)) == SERVED
    assert read_model_info(common_pb2.ModelInfo()).gpu_uuids == ()


def test_gpus_are_known_by_the_driver_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(device: str) -> SimpleNamespace:
        return SimpleNamespace(uuid={"cuda": "a", "cuda:0": "a", "cuda:1": "b"}[device])

    monkeypatch.setattr(torch.cuda, "get_device_properties", facts)
    assert gpu_uuids(["cuda:1", "cuda", "cuda:0"]) == ("a", "b")
    assert gpu_uuids(["cpu"]) == ()


@pytest.mark.parametrize("place", [lambda patch, folder: patch.setenv(MPS_VARIABLE, folder), lambda *_: None])
def test_a_daemon_is_known_by_its_pipes(
    place: Callable[[pytest.MonkeyPatch, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MPS_VARIABLE, raising=False)
    monkeypatch.setattr(startup, "MPS_FOLDER", str(tmp_path))
    place(monkeypatch, str(tmp_path))
    assert not uses_mps()
    (tmp_path / "control").touch()
    assert uses_mps()
