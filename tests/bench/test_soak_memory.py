"""What a soak says of memory: a leak is found however often its process is started again, warming up is none. And that
what it found is kept."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench import host_check
from bench.faults.drain import Harmed
from bench.soak_memory import Growth, Memory, growth_of, memory_faults
from tests.support.archive_faults.checker import Verdict
from tests.support.archive_faults.history import History

MB = 1_000_000


def lives(*held_mb: Sequence[int]) -> list[Memory]:
    """One target, each life of which held so much after its batches."""
    return [{"target-0": (start, mb * MB)} for start, life in enumerate(held_mb, 1) for mb in life]


def test_warming_up_is_no_growth() -> None:
    memory = lives([100, 150, 150, 150], [100, 150, 230], [90, 150])
    assert growth_of(memory) == {"target": Growth(3, 0.0)}
    assert memory_faults(growth_of(memory), ["target"]) == []


def test_a_leak_is_found_over_several_short_lives() -> None:
    memory = lives([100, 150, 153, 156], [100, 150, 153], [100, 150])
    assert growth_of(memory) == {"target": Growth(3, 3.0)}
    assert memory_faults(growth_of(memory), ["target"]) == ["memory: a target grows by 3.0 MB a batch"]


def test_who_never_lived_long_enough_is_named() -> None:
    assert growth_of(lives([100, 150], [100, 150], [100])) == {}
    assert memory_faults({}, ["target"]) == ["memory: no target lived through three batches"]


def test_what_a_soak_found_is_kept_batch_by_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_check, "FOLDER", tmp_path)
    well = Harmed(Verdict(1, 1, 1, 1, 0, 0, 0, 0.0, 0, ()), History([], [], [], []), [])
    soak = host_check.Soak(seed=7)
    for number in range(1, 4):
        soak.add(well, seconds=number, left={}, memory={f"{name}-0": (1, MB) for name in host_check.SERVICES})
        kept = json.loads((tmp_path / "soak-seed-7.json").read_text())
        assert (kept["batches"], kept["passed"], kept["has_ended"]) == (number, False, False)
    assert soak.report()["passed"] is True
    soak.add(replace(well, verdict=replace(well.verdict, identical=0)), seconds=4, left={}, memory=soak.memory[0])
    assert soak.report()["passed"] is False
