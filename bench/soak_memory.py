"""Whether processes that are killed now and then grow: pure, over what they held after each batch of a soak.

What a process holds at the end says little where it may have begun a minute ago. So growth is counted from batch to
batch, of those that lived through both and through the one before, in which they warmed up. The median counts: a
decoder that is replaced just then, or a server that rewrites its log, is another 80 MB for a moment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Memory = Mapping[str, tuple[int, int]]
"""Of each process, `SERVICE-NUMBER`: how often it was started, and the bytes that it holds."""
MOST_MB_A_BATCH = 2.0
"""In half an hour, some twenty batches, 40 MB."""


@dataclass(frozen=True)
class Growth:
    """Of all processes of one service."""

    steps: int
    """From a batch to the next, of a process that was warm."""
    mb_a_batch: float


def growth_of(memory: Sequence[Memory]) -> dict[str, Growth]:
    """By service; of those without a step there is nothing to say."""
    grown: dict[str, list[float]] = {}
    for first, second, third in zip(memory, memory[1:], memory[2:], strict=False):
        for name, (starts, held) in third.items():
            if first[name][0] == second[name][0] == starts:
                grown.setdefault(name.partition("-")[0], []).append((held - second[name][1]) / 1e6)
    return {service: Growth(len(steps), round(median(steps), 3)) for service, steps in grown.items()}


def memory_faults(growths: Mapping[str, Growth], services: Sequence[str]) -> list[str]:
    """What is wrong, also where too little was seen to say that nothing is."""
    unseen = [f"memory: no {service} lived through three batches" for service in services if service not in growths]
    return unseen + [
        f"memory: a {service} grows by {growth.mb_a_batch} MB a batch"
        for service, growth in growths.items()
        if growth.mb_a_batch > MOST_MB_A_BATCH
    ]
