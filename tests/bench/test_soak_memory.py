"""What a soak says of memory: a leak is found however often its process is started again, warming up is none."""

from collections.abc import Sequence

from bench.soak_memory import Growth, Memory, growth_of, memory_faults

MB = 1_000_000


def lives(*held_mb: Sequence[int]) -> list[Memory]:
    """One target, each life of which held so much after its batches."""
    return [{"target-0": (start, mb * MB)} for start, life in enumerate(held_mb, 1) for mb in life]


def test_warming_up_is_no_growth() -> None:
    memory = lives([100, 150, 150, 150], [100, 150, 150], [90, 150])
    assert growth_of(memory) == {"target": Growth(3, 0.0)}
    assert memory_faults(growth_of(memory), ["target"]) == []


def test_a_leak_is_found_over_several_short_lives() -> None:
    memory = lives([100, 150, 152, 154], [100, 150, 152], [100, 150])
    assert growth_of(memory) == {"target": Growth(3, 2.0)}
    assert memory_faults(growth_of(memory), ["target"]) == ["memory: a target grows by 2.0 MB a batch"]


def test_who_never_lived_long_enough_is_named() -> None:
    assert growth_of(lives([100, 150], [100, 150], [100])) == {}
    assert memory_faults({}, ["target"]) == ["memory: no target lived through three batches"]
