"""Tasks whose failure may find nobody listening."""

import asyncio
from typing import Any, TypeVar

FutureT = TypeVar("FutureT", bound="asyncio.Future[Any]")


def heard(task: FutureT) -> FutureT:
    """`task`, whose failure counts as heard. Whoever waits for it may be cancelled just as it fails, and the event loop
    would report a failure that concerns nobody any more as an error."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
