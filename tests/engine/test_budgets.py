"""What a model service takes of the memory that is left: keys and values, a cache, and room for the largest prefill."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.budget import MIB
from slipstream.engine import startup
from slipstream.engine.startup import ModelServiceConfig
from slipstream.engine.static import steps
from slipstream.engine.static.accord import Accord
from slipstream.engine.thread import ModelThread
from slipstream.errors import ModelNotUsable
from slipstream.services.draft.__main__ import DraftConfig
from slipstream.services.target.__main__ import TargetConfig
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
    with pytest.raises(
        ModelNotUsable, match=r"^m: the weights leave 64\.4 GB on cpu, too little .*--draft-device"
    ) as error:
        config().budgets(model(10.0), 0.5, -1, 0.5)
    # A third of 64.4 GB for keys and values takes ten times as much to fill, a sixth goes to the cache.
    assert "beside 214.7 GB that a prompt needs as it is run (161.1 GB are missing)" in str(error.value)
    assert "--target-kv-budget-mb" in str(error.value)


def test_a_budget_in_which_no_caption_fits_says_what_one_takes() -> None:
    small = model(0.6)
    small.kv_bytes = lambda num_tokens: num_tokens * 4 * MIB - 1
    with pytest.raises(ModelNotUsable, match=r"^--kv-budget-mb 3: a caption takes 4 at least$"):
        config(kv_budget_mb=3).budgets(small, 0.5, -1, 0.5)


@pytest.mark.parametrize(
    ("kind", "advice"), [(TargetConfig, "--kv-budget-mb or --prefix-cache-mb"), (DraftConfig, "--kv-budget-mb")]
)
async def test_a_pool_without_room_says_how_much_is_missing(
    kind: type[ModelServiceConfig], advice: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Accord, "pool_type", fail)
    monkeypatch.setattr(steps, "available_bytes", lambda: 3_000_000_000)
    thread, asked = ModelThread(1), kind(model="any", listen="127.0.0.1:0", static_steps="on")
    try:
        with pytest.raises(ModelNotUsable) as error:
            await asked.open_static_steps(pair.ours, thread, 4_500_000_000)
    finally:
        await asyncio.to_thread(thread.close)
    assert str(error.value) == (
        "4.5 GB for keys and values do not fit on cpu, where 3.0 GB are free (1.5 GB are missing);"
        f" set a lower {advice}, or start with --static-steps off"
    )


async def test_a_pool_that_just_fits_has_the_same_advice(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps need beside it may not."""

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory\nand a page about it")

    monkeypatch.setattr(startup, "try_static_steps", fail)
    thread, asked = ModelThread(1), DraftConfig(model="any", listen="127.0.0.1:0", static_steps="on")
    try:
        with pytest.raises(ModelNotUsable, match=r"^CUDA out of memory; set a lower --kv-budget-mb, or start"):
            await asked.open_static_steps(pair.ours, thread, 1)
    finally:
        await asyncio.to_thread(thread.close)


def test_what_somebody_said_is_taken() -> None:
    assert config(kv_budget_mb=7).budgets(model(99.0), 0.5, -1, 0.5) == (7 * MIB, 3.5 * MIB)
