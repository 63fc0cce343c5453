"""The engine against plain transformers on the same checkpoint, and against itself in other groupings."""

from pathlib import Path

import pytest
import torch

from slipstream.engine import DecodeState, VideoLM
from slipstream.errors import InvalidRequest, LimitExceeded
from tests.engine.conftest import Pair, load_pair, random_frames
from tests.support.tiny_checkpoint import TOKENS_PER_FRAME, write_tiny_llava
from tests.support.variants import one_in

PROMPTS = ("Describe the video.", "What happens?\nAnswer in one sentence, s'il vous plaît 🎬", "?")


def greedy(model: VideoLM, state: DecodeState, logits: torch.Tensor, num_tokens: int) -> list[int]:
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        token_ids.append(int(logits.argmax()))
        logits = model.step([(state, token_ids[-1:])])[0][-1]
    return token_ids


@pytest.mark.parametrize("attention", ["matmul", "sdpa", "joined"])
@pytest.mark.parametrize(("seed", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 1), (3, 2, 2)])
@one_in(3, "attention", "seed")
def test_greedy_answers_equal_those_of_transformers(
    tmp_path: Path, seed: int, heads: int, kv_heads: int, attention: str
) -> None:
    pair = load_pair(write_tiny_llava(tmp_path, seed=seed, heads=heads, kv_heads=kv_heads), attention)
    for num_frames, prompt in zip((1, 9, 20), PROMPTS, strict=True):
        frames = random_frames(num_frames, seed)
        _, state, logits = pair.prefill(prompt, frames)
        assert greedy(pair.ours, state, logits, 24) == pair.generate(prompt, frames, 24)


@pytest.mark.parametrize("attention", ["matmul", "sdpa", "joined"])
def test_every_window_judges_like_single_steps(pair: Pair, attention: str) -> None:
    pair = load_pair(pair.path, attention)
    _, state, logits = pair.prefill(PROMPTS[0], random_frames(6, 0))
    num_prompt = state.num_tokens
    answer = greedy(pair.ours, state, logits, 33)
    for window_len in range(1, 17):
        state.rollback(num_prompt)
        choices = [int(logits.argmax())]
        for first in range(0, 32, window_len):
            (rows,) = pair.ours.step([(state, answer[first : first + window_len])])
            choices += rows.argmax(dim=-1).tolist()
        assert choices[:33] == answer


def test_a_window_longer_than_a_kernel_block_equals_prefill_of_the_same_tokens(pair: Pair) -> None:
    tokens = [5 + index % 200 for index in range(150)]
    _, state, _ = pair.prefill(PROMPTS[0], random_frames(3, 0))
    together = pair.ours.step([(state, tokens)])[0]
    _, state, _ = pair.prefill(PROMPTS[0], random_frames(3, 0))
    apart = torch.cat([pair.ours.step([(state, tokens[i : i + 10])])[0] for i in range(0, 150, 10)])
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)


def test_sessions_packed_in_one_pass_do_not_see_each_other(pair: Pair) -> None:
    videos = [(PROMPTS[0], random_frames(2, 1)), (PROMPTS[1], random_frames(11, 2)), (PROMPTS[2], random_frames(5, 3))]
    references = [pair.generate(prompt, frames, 16) for prompt, frames in videos]
    sessions = [pair.prefill(prompt, frames)[1:] for prompt, frames in videos]
    answers = [[int(logits.argmax())] for _, logits in sessions]
    windows = (1, 3, 2)
    while min(map(len, answers)) < 16:
        # every session feeds its reference's next tokens, as a perfect draft would propose them
        batch, todo = [], []
        for (state, _), answer, reference, window_len in zip(sessions, answers, references, windows, strict=True):
            if len(answer) < 16:
                batch.append((state, reference[len(answer) - 1 : len(answer) - 1 + window_len]))
                todo.append(answer)
        for answer, rows in zip(todo, pair.ours.step(batch), strict=True):
            answer += rows.argmax(dim=-1).tolist()
    assert [answer[:16] for answer in answers] == references


def test_a_prefill_in_any_two_parts_equals_one_in_one_go(pair: Pair) -> None:
    frames = random_frames(4, 5)
    plan = pair.ours.plan_prompt(PROMPTS[0], 4)
    video = pair.ours.encode_frames(frames)
    _, expected = pair.ours.start_prefill(plan, video).finish()
    other = pair.prefill(PROMPTS[1], random_frames(2, 6))[1]
    for layer in range(pair.ours.info.num_layers + 1):
        prefill = pair.ours.start_prefill(plan, video)
        prefill.run_layers(layer)
        assert prefill.next_layer == layer
        pair.ours.step([(other, [17])])
        prefill.run_layers(0)
        assert prefill.next_layer == layer, "layers run once"
        torch.testing.assert_close(prefill.finish()[1], expected, rtol=0, atol=0)


def test_states_are_those_of_transformers_at_the_same_layer(pair: Pair) -> None:
    frames = random_frames(4, 5)
    plan = pair.ours.plan_prompt(PROMPTS[0], 4)
    reference = pair.theirs(
        input_ids=torch.tensor([plan.token_ids]),
        pixel_values_videos=pair.pixels(frames)[None],
        output_hidden_states=True,
    ).hidden_states
    prefill = pair.ours.start_prefill(plan, pair.ours.encode_frames(frames))
    for layer in range(pair.ours.info.num_layers):
        prefill.run_layers(layer)
        video = slice(plan.video_start, plan.video_stop)
        torch.testing.assert_close(prefill.video_states(), reference[layer][0, video], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(prefill.text_states(), reference[layer][0, plan.text_start :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("positions", ["original", "compact"])
@pytest.mark.parametrize("kept", [[], [0], [3, 4, 11, 19], list(range(20))])
def test_pruned_prefill_equals_transformers_on_the_kept_tokens(pair: Pair, kept: list[int], positions: str) -> None:
    frames = random_frames(5, 9)
    plan = pair.ours.plan_prompt(PROMPTS[0], 5)
    keep = torch.tensor(kept, dtype=torch.int64)
    prefill = pair.ours.start_prefill(plan, pair.ours.encode_frames(frames), keep=keep, positions=positions)
    assert prefill.video_states().shape == (len(kept), pair.ours.info.hidden_size)
    state, logits = prefill.finish()
    (window,) = pair.ours.step([(state, [11, 12, 13])])

    rows = [i for i in range(plan.num_tokens) if not plan.video_start <= i < plan.video_stop]
    rows = sorted(rows + [plan.video_start + i for i in kept])
    features = pair.theirs.get_video_features(pair.pixels(frames)[None]).pooler_output[0]
    embeds = pair.theirs.get_input_embeddings()(torch.tensor([*plan.token_ids, 11, 12, 13])).clone()
    embeds[plan.video_start : plan.video_stop] = features[: plan.num_video_tokens]
    embeds[plan.video_stop] = pair.theirs.model.image_newline
    position_ids = torch.tensor([*rows, *range(plan.num_tokens, plan.num_tokens + 3)])
    if positions == "compact":
        position_ids = torch.arange(len(rows) + 3)
    embeds = embeds[[*rows, *range(plan.num_tokens, plan.num_tokens + 3)]]
    reference = pair.theirs(inputs_embeds=embeds[None], position_ids=position_ids[None]).logits[0]
    assert state.num_tokens == len(rows) + 3
    torch.testing.assert_close(torch.cat([logits[None], window]), reference[-4:], rtol=1e-4, atol=1e-4)


def test_encoding_in_chunks_equals_the_features_of_transformers(pair: Pair) -> None:
    frames = random_frames(19, 4)
    ours, theirs = pair.ours.encode_frames(frames), pair.theirs.get_video_features(pair.pixels(frames)[None])
    features = theirs.pooler_output[0, : len(ours)]  # newer releases of transformers have the newline behind them
    torch.testing.assert_close(ours, features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (2, 8, 8), (2, 3, 8, 8), (2, 0, 8, 3)])
def test_frames_of_another_shape_are_refused(pair: Pair, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="uint8"):
        pair.ours.encode_frames(torch.zeros(shape, dtype=torch.uint8).numpy())


def test_float_frames_are_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="float32"):
        pair.ours.encode_frames(torch.zeros(2, 8, 8, 3).numpy())


def test_an_answer_cannot_leave_the_context(pair: Pair) -> None:
    info = pair.ours.info
    plan, state, _ = pair.prefill("?", random_frames(info.max_frames, 0))
    room = info.max_context - plan.num_tokens
    assert 1 <= room <= TOKENS_PER_FRAME
    other = pair.prefill("?", random_frames(1, 0))[1]
    before = other.num_tokens
    with pytest.raises(LimitExceeded, match="512"):
        pair.ours.step([(other, [9]), (state, [9] * (room + 1))])
    assert other.num_tokens == before
    pair.ours.step([(state, [9] * room)])
    assert state.num_tokens == info.max_context


def test_every_pass_is_told_with_its_sessions_and_seconds(pair: Pair) -> None:
    model, frames = load_pair(pair.path).ours, random_frames(2, 0)
    told: list[tuple[int, float]] = []
    model.on_pass = lambda num_states, seconds: told.append((num_states, seconds))
    plan = model.plan_prompt(PROMPTS[0], 2)
    embeddings = model.encode_frames(frames)
    states = [model.start_prefill(plan, embeddings).finish()[0] for _ in range(2)]
    model.step([(state, [1]) for state in states])
    model.step([(states[0], [2, 3])])
    assert [num_states for num_states, _ in told] == [2, 1]
    assert all(seconds > 0 for _, seconds in told)
