"""Memory of models at their full size, on a device that stores nothing: weights, keys and values, a prefill's peak."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.random_model import GEOMETRIES, Geometry, count_parameters, plan_of
from bench.model_memory import GB, SIZES, ModelMemory, memory_of, prefill_bytes, runner_of
from slipstream.engine.row_chunks import whole_rows
from tests.support.variants import one_in


def geometry(name: str, family: str, **text: Any) -> Geometry:
    """By the published sizes of a text model, beside a vision tower of one layer."""
    vision = {"deepstack_visual_indexes": [0]} if family.startswith("qwen3_vl") else {}
    return Geometry(name, family, text, {"depth": 1, **vision}, published_parameters=0, source=name)


GLM = geometry(
    "GLM-4.1V-9B", "glm4v",
    vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
    num_key_value_heads=2,
)  # fmt: skip
"""Its MLPs make two matrices by one product."""
VICUNA = geometry(
    "LLaVA-NeXT-Video-7B", "llava_onevision",
    vocab_size=32064, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=32,
)  # fmt: skip
"""It has keys and values for each head."""
GLM_MIXTURE = geometry(
    "GLM-4.5V", "glm4v_moe",
    vocab_size=151552, hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, num_attention_heads=96,
    num_key_value_heads=8, head_dim=128, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408,
    mrope_section=[8, 12, 12],
)  # fmt: skip
BUDGETED = SIZES | {each.name: each for each in (GLM, VICUNA, GLM_MIXTURE)}
MOST_GB = {"Qwen2.5-VL-72B": 2.5, "Qwen2.5-VL-32B": 2.0, "Qwen2.5-VL-7B": 1.6}


@pytest.mark.parametrize(("name", "most_gb"), MOST_GB.items())
def test_a_prefill_needs_no_more_than_that(name: str, most_gb: float) -> None:
    assert prefill_bytes(GEOMETRIES[name]) <= most_gb * GB


@pytest.mark.parametrize("num_tokens", [1000, 10_000, 100_000])
@pytest.mark.parametrize("name", BUDGETED)
@one_in(3, "name", "num_tokens")
def test_budgets_count_on_a_little_more(name: str, num_tokens: int) -> None:
    model, most = BUDGETED[name], 1.5 if "num_experts_per_tok" in BUDGETED[name].text else 4 / 3
    measured, runner = prefill_bytes(model, num_tokens), runner_of(model, 2)
    assert measured <= runner.prefill_bytes(plan_of(num_tokens).num_tokens) <= most * measured


def test_no_matrix_of_tokens_by_tokens_is_made() -> None:
    geometry = GEOMETRIES["llava-onevision-qwen2-0.5b"]
    short, long = (prefill_bytes(geometry, num_tokens) for num_tokens in (10_000, 40_000))
    assert long <= 4.5 * short, "twice as many tokens need twice as much"


def test_what_is_computed_is_what_is_published() -> None:
    memory = memory_of(GEOMETRIES["Qwen2.5-VL-72B"])
    assert memory.weights_gb == pytest.approx(146.8, abs=0.5)
    assert memory.kv_gb == pytest.approx(8.24, abs=0.05)  # 80 layers x 8 heads x 128 x 2 x 2 bytes x 25,152 tokens
    assert memory.fits == "4 of 48 GB, 4 of 80 GB, 2 of 141 GB"
    assert memory_of(GEOMETRIES["llava-onevision-qwen2-0.5b"]).fits == "24 GB"


@pytest.mark.parametrize("name", sorted(SIZES.keys() - GEOMETRIES.keys()))
def test_sizes_have_the_weights_that_their_names_say(name: str) -> None:
    assert count_parameters(SIZES[name]) == pytest.approx(SIZES[name].published_parameters, rel=0.02)


def test_what_several_gpus_share() -> None:
    """Weights go down with each, keys and values as far as there are heads of them."""
    model = ModelMemory("m", 470.0, 0.2, 4.0, 3.0, shares=(2, 4, 8, 16), kv_heads=4, first_gb=2.0)
    assert [model.caption_gb(n) for n in (1, 2, 8)] == [479, 243, 66.5]
    assert model.fits == "8 of 80 GB, 4 of 141 GB"
    assert ModelMemory("m", 2000.0, 0.2, 4.0, 3.0, shares=(2,)).fits == "more"


def test_pocket_models_are_never_cut() -> None:
    config = SimpleNamespace(intermediate_size=2048, hidden_size=512)
    assert whole_rows(config, torch.float32.itemsize) > 32_000
