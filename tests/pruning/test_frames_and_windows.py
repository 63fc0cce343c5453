"""Pruners that look at frames, positions and repetition, on videos whose right answer can be seen."""

import pytest
import torch

from slipstream.errors import InvalidRequest
from slipstream.pruning import VideoTokens, get_pruner, prune
from slipstream.pruning.unguided import evenly


def video_of(steps: list[list[int]], hidden: int = 8) -> VideoTokens:
    """Tokens by number: equal numbers are equal tokens, different ones are orthogonal."""
    rows = torch.eye(hidden)[torch.tensor(steps).flatten()]
    return VideoTokens(len(rows), len(steps), rows)


def kept(name: str, video: VideoTokens, num_keep: int) -> list[int]:
    return get_pruner(name).keep(video, num_keep, None, 0).tolist()


def test_frames_are_kept_whole_at_even_distances() -> None:
    assert kept("frame", VideoTokens(24, 6), 8) == [4, 5, 6, 7, 16, 17, 18, 19]
    assert kept("frame", VideoTokens(24, 6), 6) == [4, 5, 6, 7, 17, 19], "an even part of the last one"


def test_the_window_is_the_first_frame_and_the_latest_tokens() -> None:
    assert kept("window", VideoTokens(24, 6), 10) == [0, 1, 2, 3, 18, 19, 20, 21, 22, 23]
    assert kept("window", VideoTokens(24, 6), 4) == [0, 1, 22, 23], "half of the places at most for the first frame"


def test_dycoke_keeps_first_frames_and_what_changed_since() -> None:
    still = video_of([[0, 1, 2], [0, 1, 2], [0, 3, 2], [0, 3, 4]])
    assert kept("dycoke", still, 5) == [0, 1, 2, 7, 11]


def test_dycoke_thins_out_the_first_frames_where_there_is_no_room() -> None:
    long = video_of([[0, 1, 2, 3]] * 16)
    assert kept("dycoke", long, 4) == [2, 18, 34, 50]


def test_fastvid_keeps_whole_frames_at_the_cuts() -> None:
    cuts = video_of([[0, 1], [0, 1], [2, 3], [2, 3], [2, 4], [5, 6]])
    assert kept("fastvid", cuts, 6) == [0, 1, 4, 5, 10, 11]


@pytest.mark.parametrize("name", ["dycoke", "fastvid"])
@pytest.mark.parametrize("video", [VideoTokens(6, 2), VideoTokens(7, 2, torch.zeros(7, 4))])
def test_redundancy_needs_embeddings_and_equal_steps(name: str, video: VideoTokens) -> None:
    with pytest.raises(InvalidRequest, match="embeddings"):
        prune(get_pruner(name), video, 0.5, guidance=None)


def test_evenly_takes_the_middles() -> None:
    assert evenly(10, 2).tolist() == [2, 7]
    assert evenly(3, 3).tolist() == [0, 1, 2]
    assert evenly(5, 0).tolist() == []
