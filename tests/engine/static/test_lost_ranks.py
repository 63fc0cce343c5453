"""A rank that is lost, or fails, in the middle of static steps ends all of them within the bound."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine import DecodeState, VideoLM
from slipstream.engine.static.step import StaticStep
from slipstream.errors import DeviceLost
from tests.engine.static.test_shared_steps import open_steps
from tests.engine.test_ranks import Spread, prefilled, start
from tests.support.tiny_checkpoint import write_tiny_llava

GONE_S = 5.0


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[Spread]:
    """With static steps."""
    found = start(write_tiny_llava(tmp_path / "model", seed=1), 2)
    open_steps(found.spread)
    yield found
    found.leader.close()


def step_for_ever(model: VideoLM, state: DecodeState) -> None:
    while True:
        model.step([(state, [5])])
        state.rollback(state.num_prompt_tokens)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_lost_rank(spread: Spread, number: signal.Signals) -> None:
    state, _ = prefilled(spread.spread)
    spread.spread.step([(state, [5])])
    struck_at = time.monotonic()
    os.kill(spread.leader._processes[1].pid, number)
    with pytest.raises(DeviceLost, match="a rank of the model was lost"):
        step_for_ever(spread.spread, state)
    assert time.monotonic() - struck_at < GONE_S and spread.leader.loss is not None


@pytest.mark.long
def test_a_rank_that_is_lost_while_all_agree(spread: Spread) -> None:
    """Where rank 0 waits for its word, and not for a sum."""
    os.kill(spread.leader._processes[1].pid, signal.SIGKILL)
    with pytest.raises(DeviceLost, match="a rank of the model was lost"):
        spread.leader.gather("")


@pytest.mark.long
def test_an_error_of_rank_0_in_a_step(spread: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in the middle of theirs."""
    state, _ = prefilled(spread.spread)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StaticStep, "run", fail)
    with pytest.raises(DeviceLost, match="rank 0: out of memory"):
        spread.spread.step([(state, [5])])
    assert spread.losses and spread.leader._processes[1].poll() is not None
