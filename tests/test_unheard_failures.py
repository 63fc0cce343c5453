"""Tasks that fail just when nobody waits for them any more."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from slipstream.logs import heard
from slipstream.rpc.peers import DraftCall


async def unheard(fail: Callable[[asyncio.Event], asyncio.Task[Any]]) -> list[dict[str, Any]]:
    """What the event loop reports when the task that `fail` starts is cancelled just after what it waits for failed."""
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: reports.append(context))
    now, others = asyncio.Event(), asyncio.all_tasks()
    waiting = fail(now)
    while not (inner := asyncio.all_tasks() - others - {waiting}):  # noqa: ASYNC110 (it begins with the waiting one)
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    now.set()
    while not all(task.done() for task in inner):  # noqa: ASYNC110 (the moment at which it fails)
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    del inner, waiting
    gc.collect()
    return reports


async def failure(now: asyncio.Event) -> None:
    await now.wait()
    raise ConnectionError


@pytest.mark.parametrize(("hears", "num_reports"), [(heard, 0), (lambda task: task, 1)])
async def test_who_is_cancelled_just_then_leaves_a_report_unless_it_was_heard(
    hears: Callable[[asyncio.Task[None]], asyncio.Task[None]], num_reports: int
) -> None:
    async def wait(now: asyncio.Event) -> None:
        await asyncio.wait({hears(asyncio.create_task(failure(now)))})

    assert len(await unheard(lambda now: asyncio.create_task(wait(now)))) == num_reports


async def test_a_draft_that_is_lost_while_its_caption_ends_is_no_error() -> None:
    class LostCall:
        def __init__(self, now: asyncio.Event) -> None:
            self._now = now

        async def read(self) -> None:
            await failure(self._now)

    async def listen(now: asyncio.Event) -> None:
        call = DraftCall(None, lambda *_, **__: LostCall(now), iter(()), "one", 1.0)  # type: ignore[arg-type]
        async for _ in call.events(60.0, lambda: True):
            pass

    assert not await unheard(lambda now: asyncio.create_task(listen(now)))
