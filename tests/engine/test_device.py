"""Whatever the services time has been done by the device when it returns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engine import forward, video_lm
from slipstream.engine.kv_cache import KVCache, Layout
from slipstream.engine.thread import finish_work
from tests.engine.conftest import Pair, random_frames


def test_only_a_device_that_works_behind_the_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    finish_work(torch.device("cpu"))
    assert waited == []
    finish_work(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]


def test_every_block_of_work_ends_with_a_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(video_lm, "finish_work", lambda device: waits.append("model"))
    monkeypatch.setattr(forward, "finish_work", lambda device: waits.append("prefill"))
    model = pair.ours
    embeddings = model.encode_frames(random_frames(2, 0))
    assert waits == ["model"]
    prefill = model.start_prefill(model.plan_prompt("What happens?", 2), embeddings)
    prefill.run_layers(1)
    assert waits == ["model", "prefill"]
    state, _ = prefill.finish()
    model.step([(state, [1])])
    assert waits == ["model", "prefill", "prefill", "model"]


def test_kept_rows_of_a_cache_on_another_device_are_moved_there() -> None:
    """The meta device stands in for a GPU: a tensor of indices that stayed on the CPU would be refused there."""
    cache = KVCache(2, capacity=8, key_layout=Layout.HEAD_TOKEN_DIM, value_layout=Layout.HEAD_TOKEN_DIM)
    for layer in range(2):
        rows = torch.empty(1, 6, 4, device="meta")
        cache.write(layer, rows, rows)
    cache.advance(6)
    cache.keep(2, [0, 3])
    assert cache.length == 4
