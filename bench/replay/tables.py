"""The tables of a replay: how fast one may be run, a copy without its prefill, and a stack that keeps to one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.replay.device_times import ROLES, DeviceTimes, load_device_times
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

    @property
    def name(self) -> str:
        return self.target.name

    def without_prefill(self, folder: Path) -> "Replay":
        """The same from a copy in `folder`, in which prefills and frames last what they really take."""
        table = json.loads(self.path.read_text())
        for role in ("target", "draft"):
            table[role] = {"pass_s": table[role]["pass_s"]}
        path = folder / self.path.name
        path.write_text(json.dumps(table))
        target, draft = (replace(times, prefill_s=None, guidance_s=None) for times in (self.target, self.draft))
        return replace(self, path=path, target=target, draft=draft)


def replaying(options: StackOptions, table: Path, speed: float = 1.0, roles: Sequence[str] = ROLES) -> StackOptions:
    """The same stack, in which the services of these roles keep to the table's times, divided by `speed`."""
    replay = ("--replay", str(table), "--replay-speed", f"{speed:.6g}")
    flags = {role: (*options.extra_flags.get(role, ()), "--role", role, *replay) for role in roles}
    modules = dict.fromkeys(roles, "bench.replay.service")
    return replace(options, modules={**options.modules, **modules}, extra_flags={**options.extra_flags, **flags})


def open_replay(path: Path, speed: float) -> Replay:
    """The table, at `speed` or as fast as it may be run. Raises `InvalidConfig` for what is no table."""
    target, draft = (load_device_times(str(path), role, 1.0) for role in ("target", "draft"))
    shortest_target_s, shortest_draft_s = (min(seconds for _, seconds in times.points) for times in (target, draft))
    fastest = min(shortest_target_s / LEAST_TARGET_PASS_S, shortest_draft_s / LEAST_DRAFT_PASS_S)
    speedups = json.loads(path.read_text()).get("speedups", {})
    return Replay(path, max(min(speed, fastest), 1.0), target, draft, speedups)
