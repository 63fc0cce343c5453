"""A model spread over processes computes what it does in one, and a lost process is noticed."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.parallel import shard_loading, shards
from slipstream.engine.parallel.ranks import Leader, RankOrder
from slipstream.engine.sparse_drafter import SparseState
from slipstream.engine.startup import load_together
from slipstream.engine.text_attention import TextAttention
from slipstream.errors import DeviceLost, LimitExceeded, ModelNotUsable
from slipstream.speculation.protocol import TokenTree
from tests.engine.conftest import random_frames
from tests.engine.test_families import FAMILIES as ALL_FAMILIES
from tests.support import hub_forms
from tests.support.tiny_checkpoint import write_tiny_llava
from tests.support.tiny_families import write_tiny_qwen3
from tests.support.tiny_pair import WriteCheckpoint
from tests.support.tiny_qwen3_5 import write_tiny_qwen3_5
from tests.support.variants import some

PROMPT = "Describe the video."
FRAMES = random_frames(4, seed=3)


@dataclass
class Spread:
    """One checkpoint in one process, and over several."""

    path: Path
    alone: VideoLM
    spread: VideoLM
    leader: Leader
    losses: list[DeviceLost]

    def both(self) -> tuple[VideoLM, VideoLM]:
        return self.alone, self.spread


def start(path: Path, size: int) -> Spread:
    losses: list[DeviceLost] = []
    order = RankOrder(str(path), ("cpu",) * size, "float32", "auto", 0, 1)
    spread, leader = load_together(order, losses.append)
    return Spread(path, load_model(str(path), dtype="float32"), spread, leader, losses)


def write_as_on_the_hub(path: Path, *, seed: int) -> Path:
    """Its experts, and what they are made of, lie the other way round."""
    hub_forms.turn_experts(write_tiny_qwen3(path, seed=seed, num_experts=4))
    return path


def write_with_joined_experts(path: Path, *, seed: int) -> Path:
    """Its experts lie in one matrix a layer."""
    hub_forms.join_experts(write_tiny_qwen3_5(path, seed=seed, num_experts=4))
    return path


FAMILIES: dict[str, WriteCheckpoint] = ALL_FAMILIES | {
    "qwen3_vl_moe, the hub's": write_as_on_the_hub,
    "qwen3_5_moe, the hub's": write_with_joined_experts,
}
WITH_MORE_TO_SHARE = ("glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe, the hub's")


@pytest.mark.parametrize("family", some(FAMILIES, keep=WITH_MORE_TO_SHARE))
def test_families_are_shared_out(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every rank would hold all of it, and compute all of it; and of each half of a layer there is one sum."""
    found = start(FAMILIES[family](tmp_path / "model", seed=1), 2)
    try:
        test_decoding_is_that_of_one_process(found)
        test_windows_rollbacks_and_trees(found)
        test_packed_sessions_and_pruned_prompts(found)
        test_a_forked_cache_and_a_resumed_prompt(found)
        for layers in zip(*(model.runner.decoder.layers for model in found.both()), strict=True):
            whole, shared = (sum(map(torch.numel, _matrices(layer))) for layer in layers)
            assert 2 * shared == whole
        assert sums_of_a_step(found.spread, monkeypatch) == 2 * len(found.spread.runner.decoder.layers)
    finally:
        found.leader.close()


def sums_of_a_step(model: VideoLM, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often its ranks wait for each other's part of a sum."""
    state, _ = prefilled(model)
    with monkeypatch.context() as patched:
        sums = Mock(wraps=shards.sum_ranks)
        patched.setattr(shards, "sum_ranks", sums)
        model.step([(state, [3])])
    return sums.call_count


def test_long_answers_of_layers_that_recur(tmp_path: Path) -> None:
    """Their bases move at all ranks; what none can take back is refused, and nothing is lost with it."""
    found, rows = start(write_tiny_qwen3_5(tmp_path / "model", seed=1), 2), []
    try:
        for model in found.both():
            state, _ = prefilled(model)
            before, logits = state.num_tokens, []
            for first in range(0, 480, 12):
                logits += model.step([(state, list(range(first % 300, first % 300 + 12)))])
                state.rollback(state.num_tokens - first % 5)
            with pytest.raises(LimitExceeded, match="would be taken back"):
                state.rollback(before + 1)
            logits += model.step([(state, [5])])
            rows.append(torch.cat(logits))
        assert found.leader.loss is None and torch.allclose(*rows, atol=1e-4)
    finally:
        found.leader.close()


def _matrices(layer: nn.Module) -> Iterator[torch.Tensor]:
    """All of a layer's but a router's, which every rank has."""
    for name, weight in layer.named_parameters():
        if weight.dim() > 1 and not name.endswith("gate.weight"):
            yield weight


def test_layers_that_are_not_shared_out_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_loading, "_OWN_PLANS", {})
    with pytest.raises(ModelNotUsable, match="does not share the layers of 'qwen3_vl' out"):
        start(write_tiny_qwen3(tmp_path / "model", seed=1), 2)


@pytest.fixture(
    scope="module",
    params=[(2, 4), (2, 1), pytest.param((4, 4), marks=pytest.mark.long), pytest.param((4, 2), marks=pytest.mark.long)],
    ids=lambda param: "{} ranks, {} heads of keys".format(*param),
)
def spread(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    folder = tmp_path_factory.mktemp("ranks")
    size, kv_heads = request.param
    path = write_tiny_llava(folder / "model", seed=1, layers=3, heads=8, kv_heads=kv_heads)
    found = start(path, size)
    yield found
    found.leader.close()


def prefilled(model: VideoLM, **options: object) -> tuple[DecodeState, torch.Tensor]:
    plan = model.plan_prompt(PROMPT, len(FRAMES), frame_size=FRAMES.shape[1:3])
    with torch.inference_mode():
        return model.start_prefill(plan, model.encode_frames(FRAMES), **options).finish()  # type: ignore[arg-type]


def greedy(model: VideoLM, state: DecodeState, logits: torch.Tensor, num_tokens: int) -> list[int]:
    tokens = [int(logits.argmax())]
    while len(tokens) < num_tokens:
        (logits,) = model.step([(state, tokens[-1:])])
        tokens.append(int(logits[-1].argmax()))
    return tokens


def kv_heads_of(model: VideoLM) -> int:
    return int(model.runner.decoder.config.num_key_value_heads)


def test_decoding_is_that_of_one_process(spread: Spread) -> None:
    expected, found = (greedy(model, *prefilled(model), 20) for model in spread.both())
    assert found == expected
    states = [prefilled(model)[0] for model in spread.both()]
    num_shares = min(spread.leader.size, kv_heads_of(spread.alone))
    assert states[1].kv_bytes * num_shares == states[0].kv_bytes


def test_windows_rollbacks_and_trees(spread: Spread) -> None:
    rows = []
    for model in spread.both():
        state, _ = prefilled(model)
        found = []
        for width in range(1, 17):
            (logits,) = model.step([(state, list(range(width)))])
            found.append(logits)
            state.rollback(state.num_tokens - width // 2)
        before = state.num_tokens
        tree = TokenTree((5, 6, 7, 8, 9), (-1, 0, 0, 1, 2))
        (logits,) = model.step([(state, tree)])
        found.append(logits)
        state.keep_path(before, [0, 2, 4])
        (logits,) = model.step([(state, [11])])
        rows.append(torch.cat([*found, logits]))
        state.close()
    assert torch.allclose(*rows, atol=1e-4)
    assert rows[0].argmax(-1).equal(rows[1].argmax(-1))


def test_packed_sessions_and_pruned_prompts(spread: Spread) -> None:
    rows = []
    for model in spread.both():
        keep = torch.arange(0, model.plan_prompt(PROMPT, len(FRAMES), frame_size=FRAMES.shape[1:3]).num_video_tokens, 3)
        states = [prefilled(model)[0], prefilled(model, keep=keep)[0]]
        rows.append(torch.cat(model.step([(states[0], [3, 4]), (states[1], [5])])))
    assert torch.allclose(*rows, atol=1e-4)


def test_a_forked_cache_and_a_resumed_prompt(spread: Spread) -> None:
    rows = []
    for model in spread.both():
        state, _ = prefilled(model)
        plan = model.plan_prompt("What else?", len(FRAMES), frame_size=FRAMES.shape[1:3])
        cache = state.cache.fork(plan.text_start, plan.num_tokens + 8)
        state.close()
        again, logits = model.resume_prefill(plan, cache).finish()
        rows.append(torch.cat([logits[None], *model.step([(again, [1, 2, 3])])]))
    assert torch.allclose(*rows, atol=1e-4)


def test_attention_is_recorded_of_all_heads(spread: Spread) -> None:
    drafted = []
    for model in spread.both():
        plan = model.plan_prompt(PROMPT, len(FRAMES))
        attention = TextAttention(plan)
        state, logits = prefilled(model, observer=attention)
        assert attention.by_layer[0].shape == (kv_heads_of(model), plan.num_video_tokens)
        sparse = SparseState(state, attention, 5)
        tokens = greedy(model, sparse, logits, 6)
        model.step([(state, tokens[:3])])
        sparse.sync(state)
        drafted.append((tokens, torch.cat([attention.mean(), *(row for row in model.step([(sparse, [7])])[0])])))
    assert drafted[0][0] == drafted[1][0] and torch.allclose(drafted[0][1], drafted[1][1], atol=1e-4)


def test_what_is_no_more_is_forgotten(spread: Spread) -> None:
    for _ in range(3):
        prefilled(spread.spread)[0].close()
    assert not spread.losses and spread.leader.loss is None


def test_video_that_is_dropped_twice_is_recorded_of_what_is_left(spread: Spread) -> None:
    """As FastV and PyramidDrop do: the rows that count change while the prompt runs."""
    means = []
    for model in spread.both():
        plan = model.plan_prompt(PROMPT, len(FRAMES))
        attention = TextAttention(plan, text_rows=[-1])
        with torch.inference_mode():
            prefill = model.start_prefill(plan, model.encode_frames(FRAMES), observer=attention)
        found = []
        for layer in range(1, model.info.num_layers + 1):
            prefill.run_layers(layer)
            found.append(attention.mean([layer - 1]))
            prefill.keep_video(found[-1].topk(len(found[-1]) // 2).indices.sort().values)
        means.append(torch.cat(found))
        prefill.finish()[0].close()
    assert torch.allclose(*means, atol=1e-5)


@pytest.mark.parametrize("width", [1, 5])
def test_a_strict_width(spread: Spread, width: int) -> None:
    """Every step is filled up and rolled back at all ranks alike."""
    alone, over_ranks = spread.both()
    for model in spread.both():
        model.strict_width = 8
    try:
        rows = [model.step([(prefilled(model)[0], list(range(width)))])[0] for model in (alone, over_ranks)]
    finally:
        for model in spread.both():
            model.strict_width = 0
    assert rows[0].shape[0] == width and torch.allclose(*rows, atol=1e-4)


def test_ranks_of_one_machine_share_its_memory(spread: Spread) -> None:
    assert [model.room(1000) for model in spread.both()] == [1000, 1000 // spread.leader.size]


def test_a_runner_alone_holds_no_vision_tower(spread: Spread) -> None:
    """All that a follower keeps of its model, beside which a GPU is to have room."""
    model = load_model(str(spread.path), dtype="float32")
    tower = weakref.ref(model._adapter._model.model.vision_tower)  # type: ignore[attr-defined]
    runner = model.runner
    del model
    gc.collect()
    assert tower() is None and runner.num_layers == 3
