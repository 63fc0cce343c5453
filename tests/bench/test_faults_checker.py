"""The checker of the fault runs passes a good history, and names what is wrong with each bad one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.archive.queue import JobState
from tests.support.archive_faults.checker import Verdict, check
from tests.support.archive_faults.history import Act, Entry, History, JobEvent, Kind, read_events
from tests.support.archive_faults.injector import plan_strikes

LEASE_S = 5.0
TEXTS = {"a": "text of a", "b": "text of b"}


def event(at: float, kind: Kind, job: str, worker: str, epoch: int = 1, process: str = "") -> JobEvent:
    return JobEvent(at, kind, process or f"gateway-{worker[-1]}", f"id-{job}", worker, epoch)


def entry(name: str, worker: str, epoch: int = 1, state: JobState = JobState.DONE) -> Entry:
    return Entry(name, f"id-{name}", state, worker, epoch, text=TEXTS[name])


CALM = History(
    submitted=("a", "b"),
    events=(
        event(1.0, Kind.TAKEN, "a", "w0"),
        event(1.5, Kind.TAKEN, "b", "w1"),
        event(2.0, Kind.COMMITTED, "a", "w0"),
        event(2.5, Kind.COMMITTED, "b", "w1"),
    ),
    acts=(),
    entries=(entry("a", "w0"), entry("b", "w1")),
)
KILL = Act(1.7, 8.0, "kill", "gateway-0")
STRUCK = History(
    submitted=("a", "b"),
    events=(
        event(1.0, Kind.TAKEN, "a", "w0"),
        event(1.5, Kind.TAKEN, "b", "w1"),
        event(2.5, Kind.COMMITTED, "b", "w1"),
        event(6.2, Kind.TAKEN, "a", "w1", 2),
        event(7.0, Kind.COMMITTED, "a", "w1", 2),
    ),
    acts=(KILL,),
    entries=(entry("a", "w1", 2), entry("b", "w1")),
)


def verdict(history: History) -> Verdict:
    return check(history, TEXTS, LEASE_S)


def without(history: History, index: int) -> History:
    return replace(history, events=history.events[:index] + history.events[index + 1 :])


def violations(history: History) -> str:
    return "\n".join(verdict(history).violations)


@pytest.mark.parametrize("history", [CALM, STRUCK])
def test_a_good_history_passes(history: History) -> None:
    found = verdict(history)
    assert found.passed, found.violations
    assert (found.jobs, found.terminal_once, found.committed_once, found.identical) == (2, 2, 2, 2)


def test_a_lost_job_is_timed_from_the_strike() -> None:
    found = verdict(STRUCK)
    assert (found.reruns, found.lost_jobs, found.rerun_within_s) == (1, 1, 4.5)


def test_a_lost_job_that_waits_too_long() -> None:
    late = (*STRUCK.events[:3], event(9.0, Kind.TAKEN, "a", "w1", 2), event(9.5, Kind.COMMITTED, "a", "w1", 2))
    assert "recovery: ran again 7.3 s after kill of gateway-0" in violations(replace(STRUCK, events=late))


@pytest.mark.parametrize(("busy_until", "excused"), [(11.4, 1), (10.0, 0)])
def test_a_lost_job_that_waits_for_a_place(busy_until: float, excused: int) -> None:
    late = (*STRUCK.events[:3], event(11.5, Kind.TAKEN, "a", "w1", 2), event(12.0, Kind.COMMITTED, "a", "w1", 2))
    other = (event(3.0, Kind.TAKEN, "c", "w1"), event(busy_until, Kind.RETRIED, "c", "w1"))
    killed = Act(1.7, 13.0, "kill", "gateway-0")
    found = check(replace(STRUCK, events=late + other, acts=(killed,)), TEXTS, LEASE_S, places=1)
    assert found.waited_for_a_place == excused
    assert any("recovery" in violation for violation in found.violations) == (not excused)


def test_a_wait_that_the_queue_is_to_blame_for() -> None:
    late = (*STRUCK.events[:3], event(29.0, Kind.TAKEN, "a", "w1", 2), event(29.5, Kind.COMMITTED, "a", "w1", 2))
    frozen = Act(4.0, 24.0, "freeze", "redis")
    assert verdict(replace(STRUCK, events=late, acts=(KILL, frozen))).passed


def test_a_job_that_never_ended() -> None:
    entries = (replace(CALM.entries[0], state=JobState.RUNNING), CALM.entries[1])
    found = verdict(replace(without(CALM, 2), entries=entries))
    assert found.terminal_once == 1
    assert any("a: terminal: ['running']" in violation for violation in found.violations)


def test_a_job_that_is_gone() -> None:
    assert "a: terminal: not in the queue" in violations(replace(CALM, entries=CALM.entries[1:]))


def test_a_job_that_is_there_twice() -> None:
    assert "a: terminal: ['done', 'done']" in violations(replace(CALM, entries=(CALM.entries[0], *CALM.entries)))


def test_a_job_that_nobody_handed_in() -> None:
    assert "b: terminal: nobody handed it in" in violations(replace(CALM, submitted=("a",)))


def test_two_commits() -> None:
    twice = replace(CALM, events=(*CALM.events, event(3.0, Kind.COMMITTED, "a", "w0")))
    assert "a: commits: 2 of them" in violations(twice)
    assert verdict(twice).committed_once == 1


def test_a_commit_by_another_than_the_queue_names() -> None:
    wrong = replace(CALM, entries=(entry("a", "w1", 2), CALM.entries[1]))
    assert "a: commits: by w0/1, but the queue names w1/2" in violations(wrong)


def test_a_commit_by_a_run_that_was_overtaken() -> None:
    events = (*STRUCK.events[:4], event(6.5, Kind.COMMITTED, "a", "w0"))
    wrong = replace(STRUCK, events=events, entries=(entry("a", "w0"), STRUCK.entries[1]))
    assert "a: commits: by w0/1 when a later run had begun" in violations(wrong)


@pytest.mark.parametrize(("since", "passed"), [(6.0, True), (6.3, False)])
def test_a_run_that_only_a_server_knew_that_led_no_more(since: float, passed: bool) -> None:
    events = (*STRUCK.events[:4], event(6.5, Kind.COMMITTED, "a", "w0"), event(6.8, Kind.REFUSED, "a", "w1", 2))
    acts = (KILL, Act(since, 8.0, "freeze", "redis"))
    deposed = replace(STRUCK, events=events, entries=(entry("a", "w0"), STRUCK.entries[1]), acts=acts)
    assert ("a: commits" not in violations(deposed)) == passed


def test_no_commit_of_a_job_that_is_done() -> None:
    assert "a: commits: none" in violations(without(CALM, 2))


def test_a_commit_whose_worker_was_killed_before_it_could_log() -> None:
    killed = replace(without(CALM, 2), acts=(Act(1.9, 8.0, "kill", "gateway-0"),))
    assert verdict(killed).passed


def test_a_commit_of_a_job_that_is_dead() -> None:
    dead = replace(CALM.entries[0], state=JobState.DEAD)
    assert "a: commits: one, but it is dead" in violations(replace(CALM, entries=(dead, CALM.entries[1])))


def test_a_commit_of_an_unknown_job() -> None:
    stranger = replace(CALM, events=(*CALM.events, event(3.0, Kind.COMMITTED, "z", "w0")))
    assert "id-z: commits: of a job that the queue does not know" in violations(stranger)


def test_a_healthy_job_that_runs_twice() -> None:
    assert "a: reruns: w0/1 was well" in violations(replace(STRUCK, acts=()))


def test_a_gateway_that_was_killed_is_no_excuse_for_another() -> None:
    assert "a: reruns: w0/1 was well" in violations(replace(STRUCK, acts=(Act(1.7, 8.0, "kill", "gateway-1"),)))


@pytest.mark.parametrize("victim", ["target", "redis"])
def test_what_all_runs_need_excuses_a_second_run(victim: str) -> None:
    assert verdict(replace(STRUCK, acts=(Act(1.7, 8.0, "kill", victim),))).passed


def test_a_draft_excuses_nothing() -> None:
    assert "a: reruns: w0/1 was well" in violations(replace(STRUCK, acts=(Act(1.7, 8.0, "kill", "draft"),)))


def test_a_text_that_differs() -> None:
    assert "a: identical: another text" in violations(replace(CALM, entries=(replace(CALM.entries[0], text="?"),)))


def test_a_text_of_another_job() -> None:
    mixed = replace(CALM, entries=(replace(CALM.entries[0], text=TEXTS["b"]), CALM.entries[1]))
    assert "a: identical: has the text of b" in violations(mixed)
    assert verdict(mixed).identical == 1


def test_a_refused_commit_is_counted() -> None:
    refused = replace(STRUCK, events=(*STRUCK.events, event(9.0, Kind.REFUSED, "a", "w0")))
    found = verdict(refused)
    assert found.passed and found.stale_commits_refused == 1


def test_logs_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "gateway-0.log"
    line = {"event": "job.taken", "job_id": "x", "worker": "w", "epoch": 3, "timestamp": "2026-01-01T00:00:00.5Z"}
    path.write_text(json.dumps(line) + "\nplain text\n" + json.dumps({"event": "caption.finished"}) + '\n{"event": "jo')
    (found,) = read_events("gateway-0", path)
    assert found == JobEvent(1767225600.5, Kind.TAKEN, "gateway-0", "x", "w", 3)


def test_a_plan_strikes_everything_once_and_is_repeatable() -> None:
    plan = plan_strikes(3, ["gateway-0", "gateway-1"])
    assert plan == plan_strikes(3, ["gateway-0", "gateway-1"]) != plan_strikes(4, ["gateway-0", "gateway-1"])
    assert sorted((s.kind, s.victim.partition("-")[0]) for s in plan) == [
        *(("freeze", name) for name in ("draft", "gateway", "redis", "target")),
        *(("kill", name) for name in ("draft", "gateway", "redis", "target")),
        ("zombie", "gateway"),
    ]
    assert [s.at_share for s in plan] == sorted(s.at_share for s in plan) and plan[-1].at_share < 0.95
