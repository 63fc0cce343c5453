"""What a process used while something was measured: seconds of processor time, and the most memory. Linux only."""

import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_FORGET_PEAK = "5"
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Of one process between two moments."""

    cpu_s: float
    """Seconds that its threads ran, together."""
    peak_bytes: int
    """Most resident memory since the peak was last forgotten."""
    cores: int = 1
    """That it may run on at a time."""


def cpu_s(pid: int) -> float:
    """Seconds that all threads of a process have run, in user code and in the kernel."""
    fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / _TICKS_A_SECOND


def peak_bytes(pid: int) -> int:
    """The most memory that was resident since the process began, or since `forget_peak`."""
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peak(pid: int) -> None:
    """The peak is counted anew from here, where the kernel lets us; else it stays that of the whole process."""
    try:
        (PROC / str(pid) / "clear_refs").write_text(_FORGET_PEAK)
    except OSError:
        return
