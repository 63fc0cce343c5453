"""Says whether a history keeps the archive's promises. Pure: no clock, no file, no process.

The rules:

- `terminal`: every job that was handed in is in the queue once, in a terminal state.
- `commits`: a job that is done or failed was committed by exactly one run, the one that the queue names, and by no run
  after a later one had begun, but for those that a server gave out while the queue was struck and that the queue does
  not know of: it had led before, and was yet to hear that it leads no more; a job that is neither was committed by
  none. A worker that was killed between the commit and its log line has no line: then it must be the run that the queue
  names.
- `reruns`: a job is run again only if the injector struck what its last run needed, or that run gave it back.
- `recovery`: what ran on a gateway that was killed or frozen runs again within the lease and a margin, unless the
  queue itself was struck meanwhile, or after that time all gateways that were well were full until it was taken.
- `identical`: every text is that of the undisturbed run.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.archive.queue import JobState
from tests.support.archive_faults.history import Act, Entry, History, JobEvent, Kind, Run, overlapping

MARGIN_S = 2.0
"""On top of the lease: until a lost job runs again."""
STEP_S, NOTICED_S = 0.1, 1.5
"""A gateway that has had a place for so long has had time to look for a job, also where it had just found the store
away: it pauses up to a second then."""
SHARED = frozenset({"redis", "target"})
"""What every run needs. A draft is needed by none."""
COMMITTED_STATES = frozenset({JobState.DONE, JobState.FAILED, JobState.CANCELLED})


@dataclass(frozen=True)
class Verdict:
    jobs: int
    terminal_once: int
    committed_once: int
    identical: int
    stale_commits_refused: int
    reruns: int
    """Runs beyond a job's first."""
    lost_jobs: int
    """Runs that a killed or frozen gateway never ended itself."""
    rerun_within_s: float
    """The longest that such a job waited for its next run, from the moment of the strike."""
    waited_for_a_place: int
    """Lost jobs that ran again late because no gateway had room for them."""
    waits_s: Sequence[float]
    violations: Sequence[str] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        return not self.violations


def check(
    history: History,
    expected: Mapping[str, str],
    lease_s: float,
    *,
    places: int = 0,
    states: frozenset[JobState] = COMMITTED_STATES,
) -> Verdict:
    """`expected`: texts by custom id; a job that is not in it has none. `places`: jobs that a gateway holds at most; 0:
    there is always room. `states`: those that jobs may end in."""
    runs = history.runs()
    terminal = _check_terminal(history, states)
    commits = _check_commits(history, runs)
    texts = [_text_fault(entry, expected) for entry in history.entries]
    waits, late, crowded = _check_recovery(history, runs, lease_s, places)
    return Verdict(
        jobs=len(history.submitted),
        terminal_once=len(history.submitted) - len(terminal),
        committed_once=len(history.entries) - len({fault.partition(":")[0] for fault in commits}),
        identical=sum(entry.custom_id in expected for entry in history.entries) - len([t for t in texts if t]),
        stale_commits_refused=sum(event.kind is Kind.REFUSED for event in history.events),
        reruns=sum(len(own) - 1 for own in runs.values()),
        lost_jobs=len(waits),
        rerun_within_s=round(max(waits, default=0.0), 3),
        waited_for_a_place=crowded,
        waits_s=[round(wait, 3) for wait in sorted(waits)],
        violations=(*terminal, *commits, *_check_reruns(history, runs), *late, *filter(None, texts)),
    )


def _check_terminal(history: History, states: frozenset[JobState]) -> list[str]:
    by_name: dict[str, list[Entry]] = {name: [] for name in history.submitted}
    strangers = []
    for entry in history.entries:
        if entry.custom_id in by_name:
            by_name[entry.custom_id].append(entry)
        else:
            strangers.append(f"{entry.custom_id}: terminal: nobody handed it in")
    faults = [
        f"{name}: terminal: {[_state_of(entry) for entry in entries] or 'not in the queue'}"
        for name, entries in by_name.items()
        if len(entries) != 1 or entries[0].state not in states
    ]
    return faults + strangers


def _state_of(entry: Entry) -> str:
    """And why, of one that ended badly."""
    return f"{entry.state}: {entry.error[:300]}" if entry.error else str(entry.state)


def _check_commits(history: History, runs: Mapping[str, Sequence[Run]]) -> list[str]:
    commits: dict[str, list[JobEvent]] = {}
    for event in history.events:
        if event.kind is Kind.COMMITTED:
            commits.setdefault(event.job_id, []).append(event)
    known = {entry.job_id for entry in history.entries}
    faults = [f"{job_id}: commits: of a job that the queue does not know" for job_id in commits.keys() - known]
    for entry in history.entries:
        own = commits.get(entry.job_id, [])
        fault = _commit_fault(entry, own, runs.get(entry.job_id, []), history.acts)
        if fault:
            faults.append(f"{entry.custom_id}: commits: {fault}")
    return faults


def _commit_fault(entry: Entry, commits: Sequence[JobEvent], runs: Sequence[Run], acts: Sequence[Act]) -> str:
    if len(commits) > 1:
        return f"{len(commits)} of them"
    if entry.state not in COMMITTED_STATES:
        return f"one, but it is {entry.state}" if commits else ""
    if not commits:
        return _silent_commit_fault(entry, runs, acts)
    commit = commits[0]
    if (commit.worker, commit.epoch) != (entry.worker, entry.epoch):
        return f"by {commit.worker}/{commit.epoch}, but the queue names {entry.worker}/{entry.epoch}"
    later = [run for run in runs if run.epoch > commit.epoch and run.began < commit.at]
    struck = [act for act in acts if act.victim == "redis"]
    if not all(overlapping(struck, run.began, run.began) for run in later):
        return f"by {commit.worker}/{commit.epoch} when a later run had begun"
    return ""


def _silent_commit_fault(entry: Entry, runs: Sequence[Run], acts: Sequence[Act]) -> str:
    named = [run for run in runs if (run.worker, run.epoch) == (entry.worker, entry.epoch)]
    if not named:
        # Committed without a run: an item that was refused when it was handed in, or cancelled while it waited.
        return "" if entry.state is not JobState.DONE and not entry.worker else "none, and nobody ran it"
    killed = [act for act in acts if act.kind == "kill" and act.victim == named[0].process and act.at >= named[0].began]
    return "" if killed and named[0].end is None else "none"


def _check_reruns(history: History, runs: Mapping[str, Sequence[Run]]) -> list[str]:
    names = {entry.job_id: entry.custom_id for entry in history.entries}
    return [
        f"{names.get(job_id, job_id)}: reruns: {before.worker}/{before.epoch} was well"
        for job_id, own in runs.items()
        for before, after in itertools.pairwise(own)
        if not _has_excuse(before, after, history.acts)
    ]


def _has_excuse(before: Run, after: Run, acts: Sequence[Act]) -> bool:
    until = after.began if before.ended is None else min(after.began, before.ended)
    return any(act.victim in SHARED | {before.process} for act in overlapping(acts, before.began, until))


def _check_recovery(
    history: History, runs: Mapping[str, Sequence[Run]], lease_s: float, places: int
) -> tuple[list[float], list[str], int]:
    """Waits of all lost jobs; complaints about those that waited too long; how many did for want of a place."""
    waits, late, crowded = [], [], 0
    queue_acts = [act for act in history.acts if act.victim == "redis"]
    for act in history.acts:
        if act.victim in SHARED or act.victim == "draft":
            continue
        for own in runs.values():
            wait = _wait_after(act, own)
            if wait is None or overlapping(queue_acts, act.at - lease_s, act.at + wait):
                continue
            waits.append(wait)
            if wait <= lease_s + MARGIN_S:
                continue
            if places and not _had_place(history, runs, act.at + lease_s, act.at + wait, places):
                crowded += 1
            else:
                late.append(f"{own[0].job_id}: recovery: ran again {wait:.1f} s after {act.kind} of {act.victim}")
    return waits, late, crowded


def _had_place(history: History, runs: Mapping[str, Sequence[Run]], since: float, until: float, places: int) -> bool:
    """Whether some gateway that was well could have taken a job between the two, and did not for a while."""
    every = [run for own in runs.values() for run in own]
    for process in {run.process for run in every}:
        own_acts = [act for act in history.acts if act.victim == process]
        moment, free_s = since, 0.0
        while moment < until:
            held = sum(run.process == process and run.began <= moment < _end_of(run, runs, own_acts) for run in every)
            is_free = held < places and not overlapping(own_acts, moment, moment)
            free_s = free_s + STEP_S if is_free else 0.0
            if free_s > NOTICED_S:
                return True
            moment += STEP_S
    return False


def _end_of(run: Run, runs: Mapping[str, Sequence[Run]], acts: Sequence[Act]) -> float:
    killed = [act.at for act in acts if act.kind == "kill" and act.at >= run.began]
    return run.ended if run.ended is not None else min(killed, default=math.inf)


def _wait_after(act: Act, runs: Sequence[Run]) -> float | None:
    """From the act to the job's next run, when the act's victim was running it."""
    for before, after in itertools.pairwise(runs):
        held = before.process == act.victim and before.began <= act.at
        if held and (before.ended is None or before.ended > act.at) and after.began > act.at:
            return after.began - act.at
    return None


def _text_fault(entry: Entry, expected: Mapping[str, str]) -> str:
    if entry.custom_id not in expected or entry.text == expected[entry.custom_id]:
        return ""
    owners = [name for name, text in expected.items() if text == entry.text]
    return f"{entry.custom_id}: identical: " + (f"has the text of {owners[0]}" if owners else "another text")
