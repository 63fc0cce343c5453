"""Layers that recur: whatever is taken back, grown, copied or cut, the next token is upstream's."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from slipstream.engine import DecodeState, VideoLM, load_model
from slipstream.engine.attention import IMPLEMENTATION, SdpaKernel
from slipstream.engine.prefix_cache import PrefixCache, PrefixKey, VideoPrefix
from slipstream.engine.recurrent.cache import MOST_ROWS, REACH, RecurrentCache
from slipstream.engine.recurrent.runner import RecurrentRunner
from slipstream.engine.segments import Rows
from slipstream.errors import LimitExceeded, ModelNotUsable
from slipstream.speculation.protocol import TokenTree
from tests.engine.test_families import CLIPS, PROMPT, Family
from tests.support.live_memory import LiveBytes
from tests.support.reference import Reference
from tests.support.tiny_qwen3_5 import write_tiny_qwen3_5
from tests.support.variants import one_in

NUM_TOKENS = 2 * MOST_ROWS
"""So many that the base of every layer moves several times."""
VIDEO = CLIPS[1]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    path = write_tiny_qwen3_5(tmp_path_factory.mktemp("qwen3_5"), seed=7, max_context=2048)
    family = Family(load_model(str(path)), Reference(path))
    family.theirs.model.generation_config.eos_token_id = None
    return family


@pytest.fixture(scope="module")
def answer(family: Family) -> list[int]:
    return family.theirs.answer(VIDEO, PROMPT, NUM_TOKENS)


def begun(family: Family, answer: Sequence[int]) -> DecodeState:
    state, logits = family.prefill(VIDEO)
    assert int(logits.argmax()) == answer[0]
    return state


def largest(model: VideoLM, state: DecodeState, window: Sequence[int] | TokenTree) -> list[int]:
    """The likeliest token behind each of the new ones."""
    return [int(row.argmax()) for row in model.step([(state, window)])[0]]


@pytest.mark.parametrize("seed", range(4))
def test_windows_of_any_length_of_which_any_part_is_right(family: Family, answer: list[int], seed: int) -> None:
    chance, state, done = random.Random(seed), begun(family, answer), 0
    while done < NUM_TOKENS - 17:
        num_right = chance.randrange(16)
        window = answer[done : done + 1 + num_right] + [chance.randrange(320) for _ in range(chance.randrange(8))]
        before = state.num_tokens
        found = largest(family.ours, state, window)
        assert found[: num_right + 1] == answer[done + 1 : done + num_right + 2]
        state.rollback(before + num_right + 1)
        done += num_right + 1
        assert state.kv_bytes <= family.ours.kv_bytes(state.num_tokens + 512)


@pytest.mark.parametrize("seed", range(4))
@one_in(2, "seed")
def test_trees_that_grow_pass_by_pass(family: Family, answer: list[int], seed: int) -> None:
    """The right path among others, in one to three passes; then a path of it is kept, which may be shorter."""
    chance, state, done = random.Random(seed), begun(family, answer), 0
    while done < NUM_TOKENS - 8:
        tokens, parents, path = [answer[done]], [-1], [0]
        num_cached, before = 0, state.num_tokens
        for _ in range(chance.randint(1, 3)):
            for _ in range(chance.randrange(4)):
                parents.append(chance.randrange(-1, len(tokens)))
                tokens.append(chance.randrange(320))
            if len(path) < 8:
                parents.append(path[-1])
                path.append(len(tokens))
                tokens.append(answer[done + len(path) - 1])
            if len(tokens) == num_cached:
                continue
            found = largest(family.ours, state, TokenTree(tuple(tokens), tuple(parents), num_cached))
            for depth, node in enumerate(path):
                assert node < num_cached or found[node - num_cached] == answer[done + depth + 1]
            num_cached = len(tokens)
        kept = path[: chance.randint(1, len(path))]
        state.keep_path(before, kept)
        done += len(kept)


def test_a_tree_of_more_nodes_than_can_be_taken_back(family: Family, answer: list[int]) -> None:
    state, num_right = begun(family, answer), NUM_TOKENS - 300
    largest(family.ours, state, answer[:num_right])
    before, num_wrong = state.num_tokens, MOST_ROWS + 10
    tokens, parents = [answer[num_right], *[3] * num_wrong], [-1, *[0] * num_wrong]
    largest(family.ours, state, TokenTree(tuple(tokens), tuple(parents)))
    for step in range(1, 4):
        tokens.append(answer[num_right + step])
        parents.append(0 if step == 1 else len(parents) - 1)
        (found,) = largest(family.ours, state, TokenTree(tuple(tokens), tuple(parents), len(tokens) - 1))
        assert found == answer[num_right + step + 1]
    state.keep_path(before, [0, *range(num_wrong + 1, num_wrong + 4)])
    assert largest(family.ours, state, answer[num_right + 4 : num_right + 8]) == answer[num_right + 5 : num_right + 9]


def test_a_pass_of_many_tokens_holds_no_more_memory_behind_it(family: Family, answer: list[int]) -> None:
    held = []
    for size in (16, 496):
        state = begun(family, answer)
        for first in range(0, 496, size):
            largest(family.ours, state, answer[first : first + size])
        assert largest(family.ours, state, answer[496:497]) == answer[497:498]
        held.append(state.kv_bytes)
    assert held[0] == held[1]


def test_a_draft_that_ran_far_ahead_goes_back(family: Family, answer: list[int]) -> None:
    state, num_right = begun(family, answer), NUM_TOKENS - 300
    largest(family.ours, state, answer[:num_right])
    right = state.num_tokens
    for _ in range(REACH):
        largest(family.ours, state, [3])
    state.rollback(right)
    assert largest(family.ours, state, answer[num_right : num_right + 5]) == answer[num_right + 1 : num_right + 6]
    for _ in range(MOST_ROWS):
        largest(family.ours, state, [3])
    with pytest.raises(LimitExceeded, match=f"takes back {REACH}: start the gateway with a smaller --max-window"):
        state.rollback(right)


def test_a_pass_that_is_given_up_leaves_no_trace(family: Family, answer: list[int]) -> None:
    state, model = begun(family, answer), family.ours
    for done in range(0, 60, 4):
        abandoned = model.runner.start([model._step_rows(state, [5, 6, 7, 8])])
        abandoned.run_layers(3)
        assert largest(model, state, answer[done : done + 4]) == answer[done + 1 : done + 5]


def test_a_long_prompt_goes_through_in_pieces(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = family.prefill(VIDEO)
    monkeypatch.setattr("slipstream.engine.recurrent.delta_rule.PIECE_ROWS", 64)
    _, pieces = family.prefill(VIDEO)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)


def test_a_prompt_goes_on_from_anothers_video(family: Family, answer: list[int]) -> None:
    """While that one is answered, and when it has ended."""
    other = "And what is blue?"
    expected = family.theirs.answer(VIDEO, other, 16)
    state, plan = begun(family, answer), family.plan(VIDEO)
    prefix = VideoPrefix(PrefixKey.of(plan, b"frames"), state.cache, (torch.zeros(1), torch.zeros(1)))
    prefixes = PrefixCache(2**30)
    prefixes.share(prefix)
    for ended in (False, True):
        largest(family.ours, state, answer[:200])
        if ended:
            prefixes.retire(prefix)
            assert prefix.cache.length == plan.text_start
            assert prefixes.num_bytes == prefix.num_bytes
        resumed, cache = family.plan(VIDEO, other), prefix.cache.fork(plan.text_start, 600)
        again, logits = family.ours.resume_prefill(resumed, cache).finish()
        found = [int(logits.argmax())]
        while len(found) < 16:
            found += largest(family.ours, again, found[-1:])
        assert found == expected
        assert isinstance(again.cache, RecurrentCache)
        again.close()


HEADS = {"num_key_value_heads": 2, "head_dim": 256, "linear_value_head_dim": 128}
SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "9B": ("qwen3_5", {}),
    "27B": (
        "qwen3_5",
        HEADS | {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4},
    ),
    "35B-A3B": (
        "qwen3_5_moe",
        HEADS | {"hidden_size": 2048, "num_attention_heads": 16, "num_experts": 256, "moe_intermediate_size": 512},
    ),
    "397B-A17B": (
        "qwen3_5_moe",
        HEADS
        | {"hidden_size": 4096, "num_attention_heads": 32, "num_experts": 512, "moe_intermediate_size": 1024}
        | {"num_experts_per_tok": 10, "linear_num_value_heads": 64},
    ),
}
"""Published ones; upstream's defaults are the 9B's."""


@pytest.mark.parametrize("num_tokens", [2_000, 25_000, 100_000])
@pytest.mark.parametrize("name", SIZES)
@one_in(3, "name", "num_tokens")
def test_the_memory_that_a_prompt_is_said_to_need(name: str, num_tokens: int) -> None:
    """On the device that stores nothing: no less than it needs, and at most a half more."""
    model_type, sizes = SIZES[name]
    meta, rotary = torch.device("meta"), {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]}
    text = {"num_hidden_layers": 4, "rope_parameters": rotary | {"partial_rotary_factor": 0.25}, **sizes}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config={"depth": 1})
    with meta:
        model: Any = AutoModelForImageTextToText.from_config(
            config, attn_implementation={"text_config": IMPLEMENTATION}, dtype=torch.bfloat16
        )
    runner = RecurrentRunner(model.model.language_model, model.lm_head, SdpaKernel())
    positions = torch.arange(num_tokens, device=meta).expand(3, -1)
    with LiveBytes() as live:
        live.ignore(*model.parameters(), *model.buffers())
        cache = runner.new_cache(num_tokens, 64)
        hidden = torch.empty(num_tokens, config.get_text_config().hidden_size, dtype=torch.bfloat16, device=meta)
        forward = runner.start([Rows(cache, hidden, positions)])
        del hidden
        forward.run_layers(4)
    measured = live.peak - cache.num_bytes
    assert measured <= runner.prefill_bytes(num_tokens) <= 1.5 * measured


def test_several_sessions_in_one_pass(family: Family, answer: list[int]) -> None:
    """A chain and a tree."""
    states = [begun(family, answer) for _ in range(2)]
    tree = TokenTree((answer[0], 9, answer[1]), (-1, 0, 0))
    chain, nodes = family.ours.step([(states[0], answer[:5]), (states[1], tree)])
    assert chain.argmax(dim=-1).tolist() == answer[1:6]
    assert nodes.argmax(dim=-1)[[0, 2]].tolist() == answer[1:3]


def test_what_a_strict_width_cannot_promise_is_refused(family: Family) -> None:
    with pytest.raises(ModelNotUsable, match="start it without --strict-width"):
        load_model(family.ours.info.model_id, strict_width=16)
