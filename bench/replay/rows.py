"""The tables that a replay runs by, and its figures in their time: what was measured, times the speed it was run at."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.methods.samples import Sample, median
from bench.replay.device_times import ROLES, DeviceTimes, load_device_times
from slipstream.errors import InvalidConfig
from slipstream.stack.local import StackOptions

TABLES = Path(__file__).parent / "tables"
LEAST_TARGET_PASS_S, LEAST_DRAFT_PASS_S = 0.05, 0.004
"""No faster: the pocket models' own passes and messages must stay small beside those of the table."""


@dataclass(frozen=True)
class Replay:
    """One table and how fast it is run."""

    path: Path
    speed: float
    target: DeviceTimes
    """At speed 1."""
    draft: DeviceTimes
    paper_speedups: dict[str, float]
    """What the paper measured at this working point, by method."""
    prefill_tokens: int | None = None
    """Of the prompt whose prefill the table has."""

    @property
    def name(self) -> str:
        return self.target.name

    def without_prefill(self, folder: Path) -> "Replay":
        """The same from a copy in `folder`, in which prefills and frames last what they really take."""
        return self._with_prefills(folder, None)

    def of_prompts(self, folder: Path, num_tokens: int) -> "Replay":
        """The same from a copy in `folder`, in which a prompt has so many tokens and its prefill lasts in proportion.
        Raises `InvalidConfig` for a table that says no `prefill_tokens`."""
        if not self.prefill_tokens:
            raise InvalidConfig(f"{self.path} does not say of how many prefill_tokens its prefill_s are")
        return self._with_prefills(folder, num_tokens / self.prefill_tokens)

    def _with_prefills(self, folder: Path, share: float | None) -> "Replay":
        """None: they last what they really take."""
        table = json.loads(self.path.read_text())
        for role in ROLES:
            part = table[role]
            table[role] = {name: part[name] for name in ("pass_s", "row_share") if name in part}
            if share is not None:
                table[role] |= {name: share * part[name] for name in ("prefill_s", "guidance_s") if name in part}
        path = folder / self.path.name
        path.write_text(json.dumps(table))
        return replace(open_replay(path, self.speed), paper_speedups=self.paper_speedups)


def replaying(options: StackOptions, table: Path, speed: float = 1.0, roles: Sequence[str] = ROLES) -> StackOptions:
    """The same stack, in which the services of these roles keep to the table's times, divided by `speed`."""
    replay = ("--replay", str(table), "--replay-speed", f"{speed:.6g}")
    flags = {role: (*options.extra_flags.get(role, ()), "--role", role, *replay) for role in roles}
    modules = dict.fromkeys(roles, "bench.replay.service")
    return replace(options, modules={**options.modules, **modules}, extra_flags={**options.extra_flags, **flags})


def open_replay(path: Path, speed: float) -> Replay:
    """The table, at `speed` or as fast as it may be run: a fast device's is run slower than it is, which keeps its
    ratios, too. Raises `InvalidConfig` for what is no table."""
    target, draft = (load_device_times(str(path), role, 1.0) for role in ("target", "draft"))
    shortest_target_s, shortest_draft_s = (min(seconds for _, seconds in times.points) for times in (target, draft))
    fastest = min(shortest_target_s / LEAST_TARGET_PASS_S, shortest_draft_s / LEAST_DRAFT_PASS_S)
    said = json.loads(path.read_text())
    return Replay(path, min(speed, fastest), target, draft, said.get("speedups", {}), said.get("prefill_tokens"))


PLAIN = "autoregressive"
LATE = 1.1
"""Passes that took longer than this many times their table's time show that the machine was too slow for the replay."""


def replay_rows(
    replay: Replay, samples: Sequence[Sample], alphas: Mapping[str, float], most_rows: Mapping[str, int] | None = None
) -> list[dict[str, object]]:
    """A row a method: medians over the clips.

    Args:
        alphas: by method, the share of the video that its draft does without.
        most_rows: by method, the most rows of its draft's passes, where that is more than one.
    """
    rows = most_rows or {}
    plain = {sample.clip: sample for sample in samples if sample.method == PLAIN}
    methods = list(dict.fromkeys(sample.method for sample in samples))
    own = {name: [sample for sample in samples if sample.method == name] for name in methods}
    return [_row(replay, own[name], plain, alphas.get(name), rows.get(name, 1)) for name in methods]


def _row(
    replay: Replay, own: Sequence[Sample], plain: Mapping[str, Sample], alpha: float | None, most_rows: int
) -> dict[str, object]:
    def figure(name: str, factor: float = 1.0) -> float | None:
        return median(sample.figures[name] * factor for sample in own if sample.figures.get(name))

    draft_s, table_target_s = figure("draft_pass_s", replay.speed), replay.target.pass_s(1)
    table_draft_s = None if alpha is None else replay.draft.pass_s(alpha)
    longest_draft_s = None if alpha is None else replay.draft.pass_s(alpha, most_rows - 1)
    pairs = [(s, plain[s.clip]) for s in own if s.clip in plain]
    return {
        "method": own[0].method,
        "n": len(own),
        "tokens_per_s": median(s.tokens_per_s / replay.speed for s in own),
        "speedup": median(s.tokens_per_s / p.tokens_per_s for s, p in pairs if p.tokens_per_s),
        "paper_speedup": replay.paper_speedups.get(own[0].method),
        "tau": figure("tau"),
        "M": figure("mean_accepted_length"),
        "mean_window": figure("mean_window"),
        "T_p": figure("target_pass_s", replay.speed),
        "T_q": draft_s,
        "c": table_target_s / table_draft_s if table_draft_s else None,
        "table_T_p": table_target_s,
        "table_T_q": table_draft_s,
        "late": _is_late(own, replay, draft_s, longest_draft_s),
        # Nobody's, where prefills lasted what they really take.
        "first_token_s": median(s.first_token_s * replay.speed for s in own) if replay.target.prefill_s else None,
        "end_to_end": _end_to_end(pairs) if replay.target.prefill_s else None,
        "identical": median(float(s.token_ids == p.token_ids) for s, p in pairs),
    }


def _end_to_end(pairs: Sequence[tuple[Sample, Sample]]) -> float | None:
    """Speedup from the request to the last token, over plain decoding of the same clips."""
    return median(plain.total_s / own.total_s for own, plain in pairs if own.total_s and plain.total_s)


def _is_late(
    samples: Sequence[Sample], replay: Replay, measured_draft_s: float | None, longest_draft_s: float | None
) -> bool:
    costs = [(window, cost) for sample in samples for window, cost in sample.costs.items()]
    took_s = replay.speed * sum(cost.count * cost.pass_s for _, cost in costs)
    if took_s > LATE * sum(cost.count * replay.target.pass_s(window + 1) for window, cost in costs):
        return True
    return measured_draft_s is not None and longest_draft_s is not None and measured_draft_s > LATE * longest_draft_s
