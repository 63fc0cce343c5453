"""Packed steps are what single steps are, and one session's trouble is its own."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engine import DecodeState, video_lm
from slipstream.engine import session_work as work_module
from slipstream.engine import thread as threads
from slipstream.engine.batcher import Step, StepBatcher, step_each
from slipstream.engine.segments import GreedyRows, Window
from slipstream.engine.session_work import FRAMES_PER_BLOCK, encode_blocks
from slipstream.engine.thread import Lane
from slipstream.errors import LimitExceeded, SessionGone
from slipstream.session_messages import PassFacts
from slipstream.speculation.company import Company
from slipstream.speculation.protocol import ROOT, TokenTree
from tests.engine.conftest import Pair, random_frames


@dataclass
class LaterThread:
    """Runs jobs when told to, on this thread."""

    jobs: list[Callable[[], None]] = field(default_factory=list)
    noted: list[BaseException] = field(default_factory=list)

    def submit(self, job: Callable[[], None], lane: Lane, order: int = 0) -> None:
        assert lane is Lane.DECODE
        self.jobs.append(job)

    def note(self, error: BaseException) -> None:
        self.noted.append(error)

    def run_one(self) -> None:
        self.jobs.pop(0)()


@dataclass(eq=False)
class Work:
    closed: bool = False


@dataclass
class Session:
    """One session that keeps what it hears."""

    state: DecodeState
    work: Any = field(default_factory=Work)
    heard: list[torch.Tensor | Exception] = field(default_factory=list)
    company: list[Company] = field(default_factory=list)
    """Whom each of its passes was told to have kept waiting."""
    kept_s: list[float] = field(default_factory=list)
    on_logits: Callable[[], bool] = lambda: False

    def step(self, *token_ids: int) -> Step:
        def hear(rows: GreedyRows, facts: PassFacts) -> bool:
            assert facts.pass_s > 0
            self.heard.append(rows.logits)
            self.company.append(facts.company)
            self.kept_s.append(facts.kept_s)
            return self.on_logits()

        return Step(self.work, self.state, token_ids, hear, self.heard.append)


@pytest.fixture
def sessions(pair: Pair) -> Iterator[list[Session]]:
    made = [Session(pair.prefill("?", random_frames(1 + seed, seed))[1]) for seed in range(3)]
    yield made
    for session in made:
        session.state.close()


def make_batcher(pair: Pair, max_steps: int = 32) -> tuple[StepBatcher, LaterThread]:
    thread: Any = LaterThread()
    return StepBatcher(pair.ours, thread, max_steps=max_steps), thread


def test_all_that_wait_are_one_pass(pair: Pair, sessions: list[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    step = type(pair.ours).step
    monkeypatch.setattr(type(pair.ours), "step", lambda model, batch: passes.append(len(batch)) or step(model, batch))
    windows = [(5,), (6, 7, 8), (9, 10)]
    expected = []
    for session, window in zip(sessions, windows, strict=True):
        expected.append(pair.ours.step([(session.state, window)])[0])
        session.state.rollback(session.state.num_prompt_tokens)
    passes.clear()
    batcher, thread = make_batcher(pair)
    for session, window in zip(sessions, windows, strict=True):
        batcher.submit(session.step(*window))
    thread.run_one()
    assert passes == [3] and not thread.jobs
    for session, logits in zip(sessions, expected, strict=True):
        torch.testing.assert_close(session.heard, [logits], rtol=1e-4, atol=1e-4)


def test_more_than_fit_come_next_in_order(pair: Pair, sessions: list[Session]) -> None:
    batcher, thread = make_batcher(pair, max_steps=2)
    for session in sessions:
        batcher.submit(session.step(5))
    thread.run_one()
    assert [len(session.heard) for session in sessions] == [1, 1, 0]
    batcher.submit(sessions[0].step(6))
    thread.run_one()
    assert [len(session.heard) for session in sessions] == [2, 1, 1]
    counts = [[company.num_sessions for company in session.company] for session in sessions]
    assert counts == [[3, 2], [3], [2]], "those that waited count, too"


def test_sessions_are_told_what_plain_passes_would_cost_all(pair: Pair, sessions: list[Session]) -> None:
    batcher, thread = make_batcher(pair)
    for _ in range(10):
        for session, window in zip(sessions, [(5,), tuple(range(3, 11)), (9, 10)], strict=True):
            batcher.submit(session.step(*window))
        thread.run_one()
    for session in sessions:
        assert [company.plain_s > 0 for company in session.company] == [False] * 7 + [True] * 3
        assert session.company[-1].is_shared and session.company[-1].row_s >= 0


def test_each_step_is_told_how_long_the_thread_did_other_work_while_it_waited(
    pair: Pair, sessions: list[Session]
) -> None:
    batcher, thread = make_batcher(pair, max_steps=2)
    first, second, third = sessions
    batcher.submit(first.step(5))
    time.sleep(0.1)  # the block of a prompt
    batcher.submit(second.step(5))
    batcher.submit(third.step(5))
    thread.run_one()
    time.sleep(0.1)
    thread.run_one()
    (early,), (late,), (last,) = (session.kept_s for session in sessions)
    assert early >= late + 0.09, "which came when the block had ended"
    assert last >= 0.09, "it found no place in the first pass, and waited for another block"


def test_passes_that_only_draft_say_nothing_of_others(pair: Pair, sessions: list[Session]) -> None:
    batcher, thread = make_batcher(pair)
    for _ in range(20):
        batcher.submit(replace(sessions[0].step(5), is_drafting=True))
        thread.run_one()
    assert sessions[0].company == [Company(1)] * 20
    for _ in range(20):
        batcher.submit(replace(sessions[0].step(5), is_drafting=True))
        batcher.submit(sessions[1].step(5))
        thread.run_one()
    assert sessions[1].company[-1].is_shared, "else two that draft by turns would keep all others from knowing"


def test_a_session_that_cannot_go_on_harms_no_other(pair: Pair, sessions: list[Session]) -> None:
    batcher, thread = make_batcher(pair)
    batcher.submit(sessions[0].step(5))
    batcher.submit(sessions[1].step(*[5] * pair.ours.info.max_context))
    thread.run_one()
    assert isinstance(sessions[0].heard[0], torch.Tensor)
    assert isinstance(sessions[1].heard[0], LimitExceeded)


def test_a_judge_that_fails_harms_no_other(pair: Pair, sessions: list[Session]) -> None:
    def broken() -> bool:
        raise ValueError("no verdict")

    sessions[0].on_logits = broken
    batcher, thread = make_batcher(pair)
    for session in sessions:
        batcher.submit(session.step(5))
    thread.run_one()
    assert isinstance(sessions[0].heard[-1], ValueError)
    assert [len(session.heard) for session in sessions[1:]] == [1, 1]


def test_a_lost_device_ends_the_pass_for_all(
    pair: Pair, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def step(batch: Sequence[Any]) -> list[torch.Tensor]:
        passes.append(len(batch))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(pair.ours, "step", step)
    monkeypatch.setattr(threads, "device_answers", lambda: False)
    batcher, thread = make_batcher(pair)
    for session in sessions:
        batcher.submit(session.step(5))
    thread.run_one()
    assert passes == [3], "nobody is tried alone"
    assert [len(session.heard) for session in sessions] == [1, 1, 1] and len(thread.noted) == 3


def test_a_session_that_ended_while_it_waited_is_dropped(pair: Pair, sessions: list[Session]) -> None:
    batcher, thread = make_batcher(pair)
    for session in sessions:
        batcher.submit(session.step(5))
    sessions[1].work.closed = True
    before = sessions[1].state.num_tokens
    thread.run_one()
    assert isinstance(sessions[1].heard[0], SessionGone) and sessions[1].state.num_tokens == before
    assert isinstance(sessions[2].heard[0], torch.Tensor)


def test_a_step_may_hand_in_the_next_one(pair: Pair, sessions: list[Session]) -> None:
    batcher, thread = make_batcher(pair)

    def again() -> bool:
        if len(sessions[0].heard) < 3:
            batcher.submit(sessions[0].step(5))
        return True

    sessions[0].on_logits = again
    batcher.submit(sessions[0].step(5))
    while thread.jobs:
        thread.run_one()
    assert len(sessions[0].heard) == 3


def test_a_pass_waits_a_little_for_those_of_the_last_one(
    pair: Pair, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.engine.batcher.GATHER_SHARE", 1e9)
    monkeypatch.setattr("slipstream.engine.batcher.MAX_GATHER_S", 3600.0)
    batcher, thread = make_batcher(pair)
    for session in sessions:
        session.on_logits = lambda: True
        batcher.submit(session.step(5))
    thread.run_one()
    batcher.submit(sessions[0].step(6))
    gathering = threading.Thread(target=thread.run_one)
    gathering.start()
    batcher.submit(sessions[1].step(6))
    assert len(sessions[0].heard) == 1, "the third is still expected"
    batcher.forget(sessions[2].work)
    gathering.join()
    assert [len(session.heard) for session in sessions] == [2, 2, 1]


def test_a_pass_without_room_waits_for_nobody(
    pair: Pair, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.engine.batcher.GATHER_SHARE", 1e9)
    monkeypatch.setattr("slipstream.engine.batcher.MAX_GATHER_S", 3600.0)
    batcher, thread = make_batcher(pair, max_steps=1)
    for session in sessions[:2]:
        session.on_logits = lambda: True
        batcher.submit(session.step(5))
    thread.run_one()
    waiting = threading.Thread(target=thread.run_one, daemon=True)
    waiting.start()
    waiting.join(timeout=60)
    assert [len(session.heard) for session in sessions] == [1, 1, 0]


@dataclass(eq=False)
class WorkThatEnds:
    """Ends right behind the first look at it, as the event loop may decide at any moment."""

    num_looks: int = 0

    @property
    def closed(self) -> bool:
        self.num_looks += 1
        return self.num_looks > 1


def test_a_session_that_ends_while_a_pass_begins_hears_of_it(pair: Pair, sessions: list[Session]) -> None:
    sessions[0].work = WorkThatEnds()
    batcher, thread = make_batcher(pair)
    batcher.submit(sessions[0].step(5))
    thread.run_one()
    assert len(sessions[0].heard) == 1


def test_outcomes_keep_their_order(pair: Pair, sessions: list[Session]) -> None:
    too_long = [5] * pair.ours.info.max_context
    batch = [(sessions[0].state, [5]), (sessions[1].state, too_long), (sessions[2].state, [6])]
    outcomes = step_each(pair.ours.step, batch)
    assert [type(outcome) for outcome in outcomes] == [torch.Tensor, LimitExceeded, torch.Tensor]


@pytest.mark.parametrize("window", [(5, 6, 7), TokenTree((5, 6, 7), (ROOT, 0, 0))])
def test_what_fails_behind_the_rows_leaves_no_row(
    pair: Pair, sessions: list[Session], monkeypatch: pytest.MonkeyPatch, window: Window
) -> None:
    """Else each session's second try, alone, would come behind its own first one."""
    failures, largest_of = [RuntimeError("out of memory"), RuntimeError("out of memory")], video_lm.largest_of

    def short_of_memory(logits: torch.Tensor) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return largest_of(logits)

    batch = [(session.state, window) for session in sessions]
    expected = [rows.largest for rows in pair.ours.step_and_choose(batch)]
    for session in sessions:
        session.state.rollback(session.state.num_prompt_tokens)
    monkeypatch.setattr(video_lm, "largest_of", short_of_memory)
    outcomes = step_each(pair.ours.step_and_choose, batch)
    assert isinstance(outcomes[0], RuntimeError), "the pass of all, and the first one's own"
    assert sessions[0].state.num_tokens == sessions[0].state.num_prompt_tokens
    assert [outcome.largest for outcome in outcomes[1:] if isinstance(outcome, GreedyRows)] == expected[1:]
    assert all(session.state.num_tokens == session.state.num_prompt_tokens + 3 for session in sessions[1:])


# -- frames -----------------------------------------------------------------------------------------------------------


def test_an_abandoned_video_keeps_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next block would wait, with the frames, until the thread that makes pixels has time."""
    asked: list[Future[Any]] = []

    def submit(preprocess: Callable[..., Any], frames: Any, num_frames: int) -> Future[Any]:
        asked.append(Future())
        if len(asked) == 1:
            asked[0].set_result(len(frames))
        return asked[-1]

    monkeypatch.setattr(work_module, "_preprocessing", SimpleNamespace(submit=submit))
    info = SimpleNamespace(device="cpu")
    model: Any = SimpleNamespace(preprocess=None, encode=lambda num_frames: num_frames, info=info)
    work: Any = SimpleNamespace(received_frames=random_frames(40, 0, (8, 8)))
    blocks = encode_blocks(model, work, 40)
    assert next(blocks)[0] == FRAMES_PER_BLOCK
    blocks.close()  # type: ignore[attr-defined]
    assert [future.cancelled() for future in asked] == [False, True]
