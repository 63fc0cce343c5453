"""Memory of models at their full size, on a device that stores nothing: weights, keys and values, a layer's peak."""

import pytest
import torch

from bench.gpu.random_model import GEOMETRIES, make_upstream, plan_of
from slipstream.engine.attention import SdpaKernel
from slipstream.engine.forward import ChunkedMlp, Decoder, Rows, Runner
from slipstream.engine.loading import chunk_mlps
from tests.support.live_memory import LiveBytes

NUM_VIDEO_TOKENS = 25_088
META = torch.device("meta")
GB = 1e9


def runner_of(name: str, num_layers: int) -> Runner:
    geometry = GEOMETRIES[name]
    text = {**geometry.text, "num_hidden_layers": num_layers}
    upstream = make_upstream(type(geometry)(**{**vars(geometry), "text": text}), META, torch.bfloat16)
    decoder: Decoder = upstream.model.language_model
    chunk_mlps(decoder)
    return Runner(decoder, upstream.lm_head, SdpaKernel())


@pytest.mark.parametrize(
    ("name", "most_gb"), [("Qwen2.5-VL-72B", 2.5), ("Qwen2.5-VL-32B", 2.0), ("Qwen2.5-VL-7B", 1.5)]
)
def test_a_prefills_layer_needs_no_more_than_that(name: str, most_gb: float) -> None:
    runner = runner_of(name, num_layers=2)
    plan = plan_of(NUM_VIDEO_TOKENS)
    hidden = torch.empty(plan.num_tokens, runner.decoder.config.hidden_size, dtype=torch.bfloat16, device=META)
    positions = torch.arange(plan.num_tokens, device=META)
    if "Qwen2.5" in name:
        positions = positions.expand(3, -1)
    with LiveBytes() as live:
        cache = runner.new_cache(plan.num_tokens)
        forward = runner.start([Rows(cache, hidden, positions)])
        forward.run_layers(1)
        of_a_layer = live.peak
        forward.run_layers(2)
    assert live.peak - of_a_layer <= cache.num_bytes, "the second layer adds its keys and values only"
    assert of_a_layer <= most_gb * GB


def test_chunks_are_what_the_whole_is() -> None:
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 8)).double()
    rows = torch.randn(1, 23, 8, dtype=torch.float64)
    for max_rows in (1, 5, 22, 23, 100):
        torch.testing.assert_close(ChunkedMlp(mlp, max_rows)(rows), mlp(rows), rtol=1e-12, atol=1e-12)


def test_pocket_models_are_never_cut() -> None:
    assert ChunkedMlp.around(torch.nn.Identity(), 2048, torch.float32).max_rows > 32_000
