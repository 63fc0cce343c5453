"""What a device can do is found out by trying it at the start: compilers, packages and versions of torch differ."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from slipstream.engine.thread import is_device_lost
from slipstream.logs import get_logger

T = TypeVar("T")
MAX_ERROR = 2e-2
"""Of a result in 16 bits: see `relative_error`."""


def tried(kind: str, name: str, work: Callable[[], T]) -> T | None:
    """What `work` returns. None, and a line `<kind>.unusable` in the log, where it raises, whatever that is; what
    leaves the device of no use is raised all the same."""
    try:
        return work()
    except Exception as failure:
        if is_device_lost(failure):
            raise
        get_logger().info(f"{kind}.unusable", name=name, error=str(failure).partition("\n")[0])
        return None


def relative_error(found: Tensor, right: Tensor) -> float:
    """The largest difference, beside the largest number. NaN where one is."""
    return float((found - right).abs().max() / right.abs().max())
