"""Seconds of threads, as the kernel counts them, by service and kind."""

import os
import threading

from bench.round_costs import LOOP, MODEL, OTHERS, read_threads, split


def test_threads_by_kind() -> None:
    pids = {"gateway": 1, "draft": 5}
    before = {("gateway", 1): 10**9, ("draft", 5): 0, ("draft", 6): 10**9, ("draft", 7): 0}
    after = {("gateway", 1): 3 * 10**9, ("gateway", 2): 10**9, ("draft", 5): 10**9, ("draft", 6): 5 * 10**9}
    seconds = split(before, after | {("draft", 7): 2 * 10**9}, pids)
    assert seconds == {
        ("gateway", LOOP): 2.0,
        ("gateway", OTHERS): 1.0,
        ("draft", LOOP): 1.0,
        ("draft", MODEL): 4.0,
        ("draft", OTHERS): 2.0,
    }


def test_a_thread_that_works_is_seen_working() -> None:
    done, may_end = threading.Event(), threading.Event()

    def work() -> None:
        sum(range(300_000))
        done.set()
        may_end.wait()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert done.wait(60)
        after = read_threads({"own": os.getpid()})
    finally:
        may_end.set()
        worker.join()
    assert worker.native_id is not None
    assert after["own", worker.native_id] > 0
