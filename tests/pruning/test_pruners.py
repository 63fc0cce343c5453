"""What every pruner promises, and the ratio's arithmetic."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.pruning import PRUNERS, Guidance, VideoTokens, get_pruner, num_kept, prune
from slipstream.speculation.methods import PRUNER_SPECS, PrunerSpec

sizes = st.integers(1, 400)
ratios = st.floats(0, 1)
seeds = st.integers(0, 2**63 - 1)


KEPT_WHATEVER_ALPHA = {"none": 1.0, "all": 0.0}


@pytest.mark.parametrize("name", PRUNERS)
@given(num_steps=st.integers(1, 20), per_step=st.integers(1, 20), alpha=ratios, seed=seeds)
@settings(max_examples=60, deadline=None)
def test_the_index_is_sorted_unique_in_range_and_repeatable(
    name: str, num_steps: int, per_step: int, alpha: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = num_steps * per_step
    video = VideoTokens(num_tokens, num_steps, torch.randn(num_tokens, 4, generator=generator))
    guidance = Guidance(scores=torch.rand(num_tokens, generator=generator))
    keep = prune(get_pruner(name), video, alpha, guidance=guidance, seed=seed)
    share = KEPT_WHATEVER_ALPHA.get(name)
    assert keep.dtype == torch.int64
    assert len(keep) == (num_kept(num_tokens, alpha) if share is None else share * num_tokens)
    assert bool((keep.diff() > 0).all())
    assert bool(((keep >= 0) & (keep < num_tokens)).all())
    assert torch.equal(keep, prune(get_pruner(name), video, alpha, guidance=guidance, seed=seed))


@pytest.mark.parametrize("name", [name for name in PRUNERS if get_pruner(name).score is None])
def test_a_pruner_without_need_takes_no_guidance(name: str) -> None:
    video = VideoTokens(10, 2, torch.eye(10))
    assert len(prune(get_pruner(name), video, 0.5, guidance=None)) in (0, 5, 10)


@given(sizes, ratios, ratios)
def test_more_pruning_never_keeps_more(num_video_tokens: int, alpha: float, other: float) -> None:
    less, more = sorted((alpha, other))
    assert num_kept(num_video_tokens, more) <= num_kept(num_video_tokens, less)
    assert abs(num_kept(num_video_tokens, alpha) - num_video_tokens * (1 - alpha)) <= 0.5


def test_the_ends_of_the_ratio() -> None:
    assert num_kept(6272, 0.0) == 6272
    assert num_kept(6272, 0.9) == 627
    assert num_kept(6272, 1.0) == 0


@pytest.mark.parametrize("alpha", [-0.01, 1.01, math.nan, math.inf, -math.inf])
def test_ratios_out_of_range_are_refused(alpha: float) -> None:
    with pytest.raises(InvalidRequest, match="between 0 and 1"):
        num_kept(10, alpha)


def test_an_unknown_pruner_lists_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"uv_spread, uv, .*random, uniform, .*none, all"):
        get_pruner("attention-deficit")


@given(sizes, st.integers(1, 400))
def test_uniform_spacing_differs_by_one_at_most(num_video_tokens: int, num_keep: int) -> None:
    num_keep = min(num_keep, num_video_tokens)
    keep = get_pruner("uniform").keep(VideoTokens(num_video_tokens), num_keep, None, 0)
    gaps = keep.diff()
    assert len(gaps) == 0 or int(gaps.max() - gaps.min()) <= 1
    assert abs(int(keep[0]) - (num_video_tokens - 1 - int(keep[-1]))) <= num_video_tokens // num_keep


def test_random_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = get_pruner("random").keep(VideoTokens(1000), 100, None, 5)
    torch.manual_seed(2)
    assert torch.equal(first, get_pruner("random").keep(VideoTokens(1000), 100, None, 5))
    assert not torch.equal(first, get_pruner("random").keep(VideoTokens(1000), 100, None, 6))


def keep_last(video: VideoTokens, num_keep: int, scores: torch.Tensor | None, seed: int) -> torch.Tensor:
    return torch.arange(video.num_tokens - num_keep, video.num_tokens)


def test_a_new_pruner_is_a_function_and_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRUNER_SPECS, "last", PrunerSpec("last", f"{__name__}:keep_last"))
    assert prune(get_pruner("last"), VideoTokens(10), 0.7, guidance=None).tolist() == [7, 8, 9]
