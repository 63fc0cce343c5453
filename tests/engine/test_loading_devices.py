"""Loading onto a device: its room, the numbers that it takes, and what torch is told of it."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from slipstream.engine import load_model, loading
from slipstream.engine.checkpoint import Checkpoint
from slipstream.errors import ModelNotUsable
from tests.engine.conftest import Pair


@pytest.mark.parametrize(("stored", "taken"), [("float16", torch.float16), ("bfloat16", torch.float32)])
def test_a_gpu_without_bfloat16_takes_no_weights_that_overflow(
    monkeypatch: pytest.MonkeyPatch, stored: str, taken: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **told: False)
    assert loading._dtype("auto", torch.device("cuda"), stored) is taken
    assert loading._dtype("auto", torch.device("cpu"), stored) is torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **told: True)
    assert loading._dtype("auto", torch.device("cuda"), stored) is torch.bfloat16


@pytest.mark.parametrize(("dtype", "advice"), [("float32", "--dtype bfloat16"), ("bfloat16", "smaller checkpoint")])
def test_too_little_memory_says_how_much_and_what_helps(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, dtype: str, advice: str
) -> None:
    num_weights = Checkpoint.open(str(pair.path)).num_weights()
    assert num_weights == sum(weight.numel() for weight in load_file(pair.path / "model.safetensors").values())
    monkeypatch.setattr("slipstream.engine.loading._free_bytes", lambda device: 2 * num_weights - 1)
    with pytest.raises(ModelNotUsable, match=rf"take 0\.0 GB as {dtype}, and cpu has .* missing; .*{advice}"):
        load_model(str(pair.path), dtype=dtype)
    monkeypatch.setattr("slipstream.engine.loading._free_bytes", lambda device: 4 * num_weights)
    load_model(str(pair.path), dtype=dtype)


def test_a_gpu_that_is_not_there_is_told_beside_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal\nCompile with ...")

    monkeypatch.setattr(torch, "empty", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ModelNotUsable, match=r"'cuda:7' .*; use 'cpu' or cuda:0 to cuda:3: .*invalid device ordinal$"):
        loading.open_device("cuda:7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(ModelNotUsable, match="use 'cpu' or cuda:0, numbered among those of CUDA_VISIBLE_DEVICES=5: "):
        loading.open_device("cuda:5")


def test_a_gpu_without_a_number_is_the_one_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []

    def set_device(device: torch.device) -> None:
        if device.index is None:  # as torch's own does
            raise ValueError("Expected a torch.device with a specified index")
        taken.append(device)

    first = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(loading, "_expand_segments", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda num, device: first if device.type == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    assert loading.open_device("cuda") == torch.device("cuda:0") == taken[0]


def test_room_that_another_model_took_meanwhile(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee ...")

    monkeypatch.setattr(loading, "_load_weights", fail)
    with pytest.raises(ModelNotUsable, match=r"no room any more .*--draft-device.*: CUDA out of memory.* GiB\.$"):
        load_model(str(pair.path))


def test_on_cuda_weights_are_joined_before_anybody_counts_what_is_free(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    model = load_model(str(pair.path))
    attention = cast(Any, model.runner.decoder.layers[0]).self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    for part in parts:
        part.weight = torch.nn.Parameter(part.weight.clone(), requires_grad=False)
    loading._settle_weights(model._adapter)
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1 and asked == ["empty_cache"]

    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "join_weights", fail)
    loading._settle_weights(model._adapter)
    assert asked == ["empty_cache"] * 2


@pytest.mark.parametrize("given", ["", *loading.ALLOCATOR_VARIABLES])
def test_the_allocator_expands_segments_unless_its_user_says_otherwise(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in loading.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(
        torch, "empty", lambda *_, device: (told.append(str(device)), SimpleNamespace(device=device))[1]
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(loading, "_settle_maths", lambda: told.append("maths"))
    loading.open_device("cuda:0")
    assert told == [*([] if given else ["expandable_segments:True"]), "cuda:0", "maths"]
    told.clear()
    loading.open_device("cpu")
    assert told == ["cpu"]


def test_on_cuda_fp32_is_fp32_and_no_attention_plans_for_each_length() -> None:
    """Whatever the environment of an image says, and whichever way torch takes first."""
    print_both = (
        "import torch; from slipstream.engine import loading;"
        "facts = lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled());"
        "print(facts()); loading._settle_maths(); print(facts())"
    )
    told = subprocess.run(
        [sys.executable, "-c", print_both],
        env=os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split("\n") == ["(True, True)", "(False, False)", ""]
