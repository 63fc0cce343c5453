"""How much memory there is left on a device."""

import os
from pathlib import Path

import torch

MEMORY_INFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MIB = 1024 * 1024


def available_bytes(device: str) -> int:
    """What can still be taken: of the GPU, or of the machine within the limits of our control group."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    available = _meminfo_available()
    limit, used = _read_number(CGROUP / "memory.max"), _read_number(CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _meminfo_available() -> int:
    if MEMORY_INFO.exists():
        for line in MEMORY_INFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _read_number(path: Path) -> int | None:
    """None when there is no such file, or no limit in it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
