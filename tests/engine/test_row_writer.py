"""Tokens that are written row by row are those of passes, and whatever cannot be written so takes passes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.engine import DecodeState, VideoLM, fused_layers, load_model
from slipstream.engine.static.step import MAX_AHEAD
from slipstream.errors import LimitExceeded
from slipstream.sampling.sampler import NO_TOKEN
from tests.engine.conftest import Pair
from tests.engine.static.test_static_steps import FRAMES, close, prefill
from tests.support.tiny_checkpoint import write_tiny_llava, write_tiny_qwen
from tests.support.tiny_families import write_tiny_qwen3

FOREVER_S = 1e9


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "AHEAD_S", FOREVER_S)


@pytest.fixture(scope="module", params=[write_tiny_llava, write_tiny_qwen])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoLM:
    return load_model(str(request.param(tmp_path_factory.mktemp("rows"), seed=3)))


def by_passes(model: VideoLM, state: DecodeState, token: int, num_tokens: int) -> list[int]:
    chosen = []
    for _ in range(num_tokens):
        token = int(model.step([(state, [token])])[0].argmax())
        chosen.append(token)
    return chosen


@given(st.data())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_is_that_of_passes(model: VideoLM, data: st.DataObject) -> None:
    """Also of a cache that grows meanwhile: what its layers hold is the same in the end."""
    state, other = prefill(model), prefill(model)
    for _ in range(data.draw(st.integers(1, 4), label="lines")):
        window = data.draw(st.lists(st.integers(3, 250), max_size=3), label="window")
        for each in (state, other):
            if window:
                model.step([(each, window)])
        token, num_tokens = data.draw(st.integers(3, 250), label="token"), data.draw(st.integers(1, 9), label="ahead")
        written = model.write_ahead([(state, token)], num_tokens)
        assert written == [by_passes(model, other, token, min(num_tokens, MAX_AHEAD))]
        assert state.num_tokens == other.num_tokens
        kept = data.draw(st.integers(other.num_prompt_tokens, other.num_tokens), label="kept")
        for each in (state, other):
            each.rollback(kept)
    close(model.step([(state, [5, 6])])[0], model.step([(other, [5, 6])])[0])


def with_little_room(model: VideoLM) -> DecodeState:
    size = FRAMES.shape[1:3]
    plan = model.plan_prompt("?", len(FRAMES), frame_size=size)
    return model.start_prefill(plan, model.encode_frames(FRAMES), headroom=1).finish()[0]


def test_a_full_cache_grows(model: VideoLM) -> None:
    state, other = with_little_room(model), prefill(model)
    capacity, token = state.cache.capacity, 7
    while state.num_tokens <= capacity:
        written = model.write_ahead([(state, token)], MAX_AHEAD)
        assert written == [by_passes(model, other, token, MAX_AHEAD)]
        token = written[0][-1]
    assert state.cache.capacity > capacity
    close(model.step([(state, [5])])[0], model.step([(other, [5])])[0])


def test_orders_are_looked_at_after_a_while(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "AHEAD_S", 0.0)
    state = prefill(model)
    before = state.num_tokens
    (written,) = model.write_ahead([(state, 5)], MAX_AHEAD) or []
    assert len(written) == 1 and state.num_tokens == before + 1


def test_the_context_ends(model: VideoLM) -> None:
    state = prefill(model)
    with pytest.raises(LimitExceeded, match="end of the context"):
        model.write_ahead([(state, 5)], model.info.max_context - state.next_position + 1)


def test_passes_are_counted(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(model, "on_pass", lambda num_states, seconds: heard.append(num_states))
    model.write_ahead([(prefill(model), 5)], 3)
    assert heard == [1]


@pytest.fixture
def own(tmp_path: Path) -> VideoLM:
    return load_model(str(write_tiny_llava(tmp_path / "own", seed=3)))


def test_logits_that_are_no_numbers_are_told(own: VideoLM) -> None:
    state = prefill(own)
    with torch.inference_mode():
        own.runner.decoder.norm.weight.mul_(torch.nan)  # type: ignore[operator]
    assert own.write_ahead([(state, 5)], 2) == [[NO_TOKEN, NO_TOKEN]]


def with_a_bias_behind_attention(model: Any) -> None:
    """As Llama's layers may have one."""
    part = model.runner.fused.layers[0].output
    object.__setattr__(part, "bias", torch.zeros(len(part.weight)))


def with_a_bias_of_the_head(model: Any) -> None:
    model.runner.lm_head.bias = torch.nn.Parameter(torch.zeros(1))


def with_scaled_embeddings(model: Any) -> None:
    embeddings = model.runner.decoder.embed_tokens
    model.runner.decoder.embed_tokens = type("Scaled", (torch.nn.Embedding,), {})(*embeddings.weight.shape)


@pytest.mark.parametrize("change", [with_a_bias_behind_attention, with_a_bias_of_the_head, with_scaled_embeddings])
def test_what_is_not_plain_takes_passes(own: VideoLM, change: Callable[[Any], None]) -> None:
    state = prefill(own)
    before = state.num_tokens
    change(own)
    assert own.write_ahead([(state, 5)], 2) is None and state.num_tokens == before


def test_sixteen_bits_a_strict_width_another_family_and_company_take_passes(pair: Pair, tmp_path: Path) -> None:
    path = str(pair.path)
    other = write_tiny_qwen3(tmp_path / "model", seed=2)
    for model in (load_model(path, dtype="bfloat16"), load_model(path, strict_width=4), load_model(str(other))):
        assert model.write_ahead([(prefill(model), 5)], 2) is None
    assert pair.ours.write_ahead([(prefill(pair.ours), 5), (prefill(pair.ours, 2), 5)], 2) is None


def test_logits_are_told_token_by_token(model: VideoLM) -> None:
    state, other, told = prefill(model), prefill(model), list[torch.Tensor]()
    written = model.write_ahead([(state, 5)], 3, lambda logits: told.append(logits.clone()))
    assert written is not None and len(told) == len(written[0])
    for logits, token in zip(told, [5, *written[0]], strict=False):
        close(logits, model.step([(other, [token])])[0])
