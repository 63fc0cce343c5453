"""The layer loop and its caches over the text models of many families, served or not, against upstream's forward."""

from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModel

from slipstream.engine import row_chunks
from slipstream.engine.attention import IMPLEMENTATION, SdpaKernel
from slipstream.engine.forward import Decoder, Runner
from slipstream.engine.segments import Rows

MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "original_max_position_embeddings": 8},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},  # LLaVA-NeXT-Video, SmolVLM2, Perception LM
    "mistral": {"sliding_window": None},  # Mistral Small 3.1
    "ministral3": {"rope_parameters": YARN},  # Ministral 3
    "qwen2": {},  # LLaVA-OneVision, LLaVA-Interleave, InternVL3, VideoLLaMA 3
    "qwen3": {},  # InternVL3.5
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen3_vl_text": {"rope_parameters": MROPE | {"mrope_interleaved": True}},
    "qwen3_vl_moe_text": EXPERTS | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
    "glm4v_text": {"rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},  # GLM-4.1V
}
FIRST, SECOND = 9, 4
"""Rows of the two passes."""


def widest_row(config: Any) -> int:
    """Bytes: of the MLP, in fp32, or of what a token's experts are given."""
    return 4 * max(config.intermediate_size, getattr(config, "num_experts_per_tok", 0) * config.hidden_size)


@pytest.fixture(params=TEXT_MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(request.param, **sizes | TEXT_MODELS[request.param])
    torch.manual_seed(3)
    return AutoModel.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("max_rows", [1, 4, FIRST - 1, 100])
def test_two_passes_equal_upstreams_one(model: Any, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", max_rows * widest_row(model.config))
    num_rows, axes = FIRST + SECOND, 3 if "mrope_section" in (model.config.rope_parameters or {}) else 1
    hidden = torch.randn(num_rows, 64)
    positions = torch.randint(0, 40, (axes, num_rows)).sort().values
    positions = positions if axes > 1 else positions[0]
    with torch.inference_mode():
        given = positions[:, None] if axes > 1 else positions[None]
        expected = model(inputs_embeds=hidden[None], position_ids=given, attention_mask=torch.ones(1, num_rows))
    model.set_attn_implementation(IMPLEMENTATION)
    runner = Runner(cast(Decoder, model), torch.nn.Identity(), SdpaKernel())
    assert runner.whole_rows == max_rows
    cache = runner.new_cache(num_rows)
    made = []
    for rows in (slice(0, FIRST), slice(FIRST, num_rows)):
        made += runner.start([Rows(cache, hidden[rows], positions[..., rows])]).finish()
    torch.testing.assert_close(torch.cat(made), expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)
