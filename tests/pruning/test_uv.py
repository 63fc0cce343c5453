"""UV-Prune against the paper's equations as they are printed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.pruning import Guidance, VideoTokens, get_pruner, guided, prune
from slipstream.pruning.guided import make_guidance, similarity_variation, top_k


def states(num_layers: int, num_video: int, num_text: int, hidden: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(num_layers + 1, num_video, hidden, generator=generator)
    text = torch.randn(num_layers + 1, num_text, hidden, generator=generator)
    return video.bfloat16().float(), text


def naive_scores(video: Tensor, text: Tensor) -> Tensor:
    """Equations 2 and 3: cosines of all pairs at every layer, differences of consecutive layers, summed over both."""
    scores = torch.zeros(video.shape[1], dtype=torch.float64)
    for layer in range(1, len(video)):
        for i in range(video.shape[1]):
            for j in range(text.shape[1]):
                now, before = (
                    torch.cosine_similarity(video[at, i].double(), text[at, j].double(), dim=0)
                    for at in (layer, layer - 1)
                )
                scores[i] += now - before
    return scores


@pytest.mark.parametrize("seed", range(3))
def test_telescoped_scores_equal_the_sum_over_layers_and_text_tokens(seed: int) -> None:
    video, text = states(num_layers=4, num_video=12, num_text=5, hidden=16, seed=seed)
    guidance = make_guidance(video[0], text[0], video[-1], text[-1], "scores")
    assert guidance.scores is not None
    torch.testing.assert_close(guidance.scores.double(), naive_scores(video, text), rtol=1e-5, atol=1e-5)


def test_scores_of_some_tokens_at_a_time_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "_SCORED_AT_ONCE", 5)
    video, text = states(num_layers=2, num_video=12, num_text=3, hidden=16, seed=0)
    guidance = make_guidance(video[0], text[0], video[-1], text[-1], "scores")
    assert guidance.scores is not None
    torch.testing.assert_close(guidance.scores.double(), naive_scores(video, text), rtol=1e-5, atol=1e-5)


@given(st.integers(1, 60), st.integers(1, 8), st.floats(0, 1), st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_both_kinds_of_guidance_keep_the_same_tokens(num_video: int, num_text: int, alpha: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(2, num_video, 24, generator=generator)  # not rounded: both kinds must round
    text = torch.randn(2, num_text, 24, generator=generator)
    kinds = [make_guidance(video[0], text[0], video[1], text[1], kind) for kind in ("hidden_states", "scores")]
    chosen = [prune(get_pruner("uv"), VideoTokens(num_video), alpha, guidance=guidance) for guidance in kinds]
    assert torch.equal(chosen[0], chosen[1])


def test_hidden_states_travel_in_bf16_and_sums_in_fp32() -> None:
    video, text = states(1, 6, 3, 8, 0)
    guidance = make_guidance(video[0], text[0], video[1], text[1], "hidden_states")
    assert guidance.scores is None
    assert guidance.video_states is not None
    assert guidance.text_sums is not None
    assert {tensor.dtype for tensor in guidance.video_states} == {torch.bfloat16}
    assert {tensor.dtype for tensor in guidance.text_sums} == {torch.float32}
    assert guidance.num_video_tokens == 6
    expected = make_guidance(video[0], text[0], video[1], text[1], "scores").scores
    assert expected is not None
    assert torch.equal(similarity_variation(guidance.video_states, guidance.text_sums), expected)


def test_the_best_are_kept_in_order_and_ties_go_to_the_earlier_token() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, float("nan"), 2.0])
    assert top_k(scores, 3).tolist() == [1, 2, 3]
    assert top_k(scores, 4).tolist() == [1, 2, 3, 4]
    assert top_k(scores, 6).tolist() == [0, 1, 2, 3, 4, 6], "NaN goes last"
    assert top_k(torch.zeros(500), 7).tolist() == list(range(7))


def test_a_zero_state_scores_zero_instead_of_nan() -> None:
    video, text = torch.zeros(2, 3, 8), torch.zeros(2, 2, 8)
    scores = make_guidance(video[0], text[0], video[1], text[1], "scores").scores
    assert scores is not None
    assert scores.tolist() == [0.0, 0.0, 0.0]


def test_unknown_guidance_is_refused() -> None:
    video, text = states(1, 2, 2, 4, 0)
    with pytest.raises(InvalidRequest, match="hidden_states, scores"):
        make_guidance(video[0], text[0], video[1], text[1], "attention")


@pytest.mark.parametrize("guidance", [None, Guidance(), Guidance(scores=torch.zeros(3))])
def test_missing_or_foreign_guidance_is_refused(guidance: Guidance | None) -> None:
    with pytest.raises(InvalidRequest, match="4 video tokens"):
        prune(get_pruner("uv"), VideoTokens(4), 0.5, guidance=guidance)


def test_half_a_guidance_is_refused() -> None:
    half = Guidance(video_states=(torch.zeros(4, 2), torch.zeros(4, 2)))
    with pytest.raises(InvalidRequest, match="similarity_variation"):
        prune(get_pruner("uv"), VideoTokens(4), 0.5, guidance=half)


@given(st.integers(1, 80), st.floats(0, 1), st.integers(0, 2**16))
def test_spread_keeps_the_best_of_each_equal_stretch(num_video: int, alpha: float, seed: int) -> None:
    scores = torch.randn(num_video, generator=torch.Generator().manual_seed(seed))
    keep = prune(get_pruner("uv_spread"), VideoTokens(num_video), alpha, guidance=Guidance(scores=scores))
    stretches = (torch.arange(num_video) * len(keep) // num_video).tolist()
    best = {
        max((i for i, s in enumerate(stretches) if s == n), key=lambda i: float(scores[i])) for n in range(len(keep))
    }
    assert keep.tolist() == sorted(best)


def test_guidance_moves_to_a_device_with_all_its_parts() -> None:
    states = torch.ones(3, 4, dtype=torch.bfloat16)
    sums = torch.ones(4)
    moved = Guidance(video_states=(states, states), text_sums=(sums, sums)).to("meta")
    assert moved.video_states is not None and moved.text_sums is not None
    assert {tensor.device.type for tensor in (*moved.video_states, *moved.text_sums)} == {"meta"}
    assert moved.num_video_tokens == 3
    scores = torch.ones(3)
    assert Guidance(scores=scores).to("cpu").scores is scores
