"""What a model service takes of the memory that is left: keys and values, a cache, and room for the largest prefill."""

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.budget import MIB
from slipstream.engine import startup
from slipstream.engine.startup import ModelServiceConfig
from slipstream.errors import ModelNotUsable
from tests.engine.conftest import Pair

AVAILABLE = 60 * 1024 * MIB


def model(prefill: float) -> Any:
    """One whose prefills need so many bytes to one of keys and values."""
    return SimpleNamespace(
        info=SimpleNamespace(device="cpu", model_id="m"),
        kv_bytes=lambda num_tokens: num_tokens * MIB,
        prefill_bytes=lambda kv_bytes: int(prefill * kv_bytes) + MIB,
        room=lambda free_bytes: free_bytes,
    )


def config(**options: Any) -> ModelServiceConfig:
    return ModelServiceConfig(model="any", listen="127.0.0.1:0", **options)


@pytest.fixture(autouse=True)
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "available_bytes", lambda: AVAILABLE)


def test_a_share_of_what_is_left() -> None:
    assert config().budgets(model(0.6), 0.5, -1, 0.5) == (AVAILABLE // 6 * 2, AVAILABLE // 6)
    assert config().budgets(model(0.6), 0.5, 1024, 0.5) == ((AVAILABLE - 1024 * MIB) // 2, 1024 * MIB)
    assert config().budgets(model(0.6), 0.5, 0, 0.5) == (AVAILABLE // 2, 0)


@pytest.mark.parametrize("prefill", [1.5, 2.0])
def test_room_for_the_pass_that_fills_the_budget(prefill: float) -> None:
    kv_bytes, cache_bytes = config().budgets(model(prefill), 0.5, -1, 0.5)
    assert 0 < kv_bytes < AVAILABLE // 3
    assert kv_bytes + cache_bytes + model(prefill).prefill_bytes(kv_bytes) <= AVAILABLE


def test_a_small_model_on_a_large_machine_takes_its_share(pair: Pair) -> None:
    """All of its keys and values are no single prompt: none is longer than the model's context."""
    assert config().budgets(pair.ours, 0.5, 0, 0.5) == (AVAILABLE // 2, 0)
    assert pair.ours.prefill_bytes(AVAILABLE) == pair.ours.prefill_bytes(AVAILABLE // 2) < AVAILABLE // 100


def test_where_there_is_no_room_for_a_caption_the_start_says_what_helps() -> None:
    """Such as at the second of two models on one GPU."""
    for options in ({}, {"kv_budget_mb": 1}):
        assert config(**options).budgets(model(0.6), 0.5, -1, 0.5)[0] >= MIB
    with pytest.raises(ModelNotUsable, match=r"^m: the weights leave 64\.4 GB on cpu, too little .*--draft-device"):
        config().budgets(model(10.0), 0.5, -1, 0.5)


def test_what_somebody_said_is_taken() -> None:
    assert config(kv_budget_mb=7).budgets(model(99.0), 0.5, -1, 0.5) == (7 * MIB, 3.5 * MIB)
