"""Memory of models at their full size, on a device that stores nothing: weights, keys and values, a prefill's peak."""

from types import SimpleNamespace

import pytest
import torch

from bench.gpu.random_model import GEOMETRIES, Geometry, plan_of
from bench.model_memory import GB, memory_of, prefill_bytes, runner_of
from slipstream.engine.row_chunks import whole_rows
from tests.support.variants import one_in

GLM = Geometry(
    "GLM-4.1V-9B",
    "glm4v",
    text={
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
    },
    vision={"depth": 1},
    published_parameters=0,
    source="zai-org/GLM-4.1V-9B-Thinking",
)
"""Its MLPs make two matrices by one product."""
BUDGETED = GEOMETRIES | {GLM.name: GLM}
MOST_GB = {"Qwen2.5-VL-72B": 2.5, "Qwen2.5-VL-32B": 2.0, "Qwen2.5-VL-7B": 1.6}


@pytest.mark.parametrize(("name", "most_gb"), MOST_GB.items())
def test_a_prefill_needs_no_more_than_that(name: str, most_gb: float) -> None:
    assert prefill_bytes(GEOMETRIES[name]) <= most_gb * GB


@pytest.mark.parametrize("num_tokens", [1000, 10_000, 100_000])
@pytest.mark.parametrize("name", BUDGETED)
@one_in(3, "name", "num_tokens")
def test_budgets_count_on_a_little_more(name: str, num_tokens: int) -> None:
    measured, runner = prefill_bytes(BUDGETED[name], num_tokens), runner_of(BUDGETED[name], 1)
    assert measured <= runner.prefill_bytes(plan_of(num_tokens).num_tokens) <= 4 / 3 * measured


def test_no_matrix_of_tokens_by_tokens_is_made() -> None:
    geometry = GEOMETRIES["llava-onevision-qwen2-0.5b"]
    short, long = (prefill_bytes(geometry, num_tokens) for num_tokens in (10_000, 40_000))
    assert long <= 4.5 * short, "twice as many tokens need twice as much"


def test_what_is_computed_is_what_is_published() -> None:
    memory = memory_of(GEOMETRIES["Qwen2.5-VL-72B"])
    assert memory.weights_gb == pytest.approx(146.8, abs=0.5)
    assert memory.kv_gb == pytest.approx(8.24, abs=0.05)  # 80 layers x 8 heads x 128 x 2 x 2 bytes x 25,152 tokens
    assert memory.fits == "several GPUs"
    assert memory_of(GEOMETRIES["llava-onevision-qwen2-0.5b"]).fits == "24 GB"


def test_pocket_models_are_never_cut() -> None:
    config = SimpleNamespace(intermediate_size=2048, hidden_size=512)
    assert whole_rows(config, torch.float32.itemsize) > 32_000
