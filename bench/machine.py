"""What the figures were measured on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")


def machine_facts() -> dict[str, Any]:
    """Processor, cores and versions."""
    return {
        "processor": _processor(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "grpcio")},
    }


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cpu_info() -> list[str]:
    return CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
