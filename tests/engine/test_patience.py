"""Waits that nothing else ends."""

import queue

import pytest

from slipstream.engine.parallel import patience
from slipstream.engine.parallel.patience import Patience


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "CHECK_S", 0.01)


def test_what_takes_too_long_is_ended_once_and_what_does_not_is_left_alone() -> None:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = Patience(ended.put)
    with watch.within(60, "in time"):
        pass
    with watch.within(0.01, "too long"):
        assert ended.get(timeout=60) == "too long"
    with watch.within(0.0, "behind the end"), pytest.raises(queue.Empty):
        ended.get(timeout=0.2)


def test_an_error_ends_the_wait() -> None:
    watch = Patience(pytest.fail)
    with pytest.raises(ValueError, match="x"), watch.within(60, "a wait"):
        raise ValueError("x")
    assert watch._limit is None
    watch.close()


def test_nothing_is_watched_once_it_is_closed() -> None:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = Patience(ended.put)
    watch.close()
    with watch.within(0.0, "nobody looks"), pytest.raises(queue.Empty):
        ended.get(timeout=0.2)
