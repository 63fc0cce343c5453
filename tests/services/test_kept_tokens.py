"""Which video tokens a draft says that it kept: any choice, in any grid, as a map of bits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.families.adapter import PromptPlan, VideoGrid
from slipstream.frame_size import FrameSize
from slipstream.messages import KeptTokens
from slipstream.rpc import session_codec
from slipstream.services.draft.servicer import kept_tokens
from slipstream.session_messages import DraftReady


def plan_of(num_steps: int, num_tokens: int, grid: VideoGrid | None = None) -> PromptPlan:
    return PromptPlan((0,) * num_tokens, (range(num_tokens),), num_tokens, grid, num_steps)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.data())
def test_any_choice_in_any_grid_comes_over_the_wire(
    num_steps: int, num_rows: int, num_columns: int, data: st.DataObject
) -> None:
    num_tokens = num_steps * num_rows * num_columns
    chosen = sorted(data.draw(st.sets(st.integers(0, num_tokens - 1))))
    plan = plan_of(num_steps, num_tokens, VideoGrid(num_steps, num_rows, num_columns))
    kept = kept_tokens(torch.tensor(chosen, dtype=torch.int64), plan, FrameSize())
    assert kept is not None and kept.num_kept == len(chosen) and kept.num_tokens == num_tokens
    bits = np.unpackbits(np.frombuffer(kept.bitmap, np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == chosen
    ready = DraftReady(len(chosen), num_tokens, kept=kept)
    (message,) = session_codec.draft_events(ready)
    assert session_codec.read_draft_event(message) == ready


def test_a_draft_that_was_not_asked_says_nothing() -> None:
    (message,) = session_codec.draft_events(DraftReady(1, 2))
    assert session_codec.read_draft_event(message) == DraftReady(1, 2)


def test_frames_without_a_grid_of_their_own_are_squares() -> None:
    kept = kept_tokens(torch.tensor([0, 9]), plan_of(2, 18), FrameSize(3, 3, shortest_edge=3))
    assert kept == KeptTokens(b"\x01\x02\x00", 2, 3, 3, middle_square=True)


@pytest.mark.parametrize("num_tokens", [15, 513**2])
def test_what_is_no_square_or_too_large_is_not_told(num_tokens: int) -> None:
    assert kept_tokens(torch.tensor([0]), plan_of(1, num_tokens), FrameSize()) is None
