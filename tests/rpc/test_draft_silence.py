"""When a draft that says nothing is held for frozen."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from slipstream.errors import DraftFault
from slipstream.rpc.peers import SILENCE_LOOKS, DraftCall


class Reads:
    """A call of which the next message is the last one, once it is there."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def read(self) -> Any:
        await self.ended.wait()
        return grpc.aio.EOF


async def listen(reads: Reads, owes: Callable[[], bool], silence_s: float) -> None:
    call = DraftCall(None, lambda *_, **__: reads, iter(()), "one", 1.0)  # type: ignore[arg-type]
    async for _ in call.events(silence_s, owes):
        pass


async def test_a_draft_that_is_told_to_go_on_after_a_long_wait_has_time_to_answer() -> None:
    """It owed nothing while the target read its prompt, and answers as soon as it is seen to owe something."""
    reads, looks = Reads(), 0

    def owes() -> bool:
        nonlocal looks
        looks += 1
        if looks > 3 * SILENCE_LOOKS:
            reads.ended.set()
        return reads.ended.is_set()

    await listen(reads, owes, 0.05)
    assert looks == 3 * SILENCE_LOOKS + 1


async def test_who_is_cancelled_while_a_silent_draft_is_let_go_ends() -> None:
    """Else the link to the draft would outlive its caption, and join again and again with frames that are gone."""
    listening: asyncio.Task[None]

    class Cancelled(Reads):
        async def read(self) -> Any:
            try:
                return await super().read()
            finally:
                listening.cancel()

    listening = asyncio.create_task(listen(Cancelled(), lambda: True, 0.02))
    await asyncio.wait({listening})
    assert listening.cancelled()


async def test_a_draft_that_pays_now_and_then_is_not_frozen() -> None:
    """What it owes may be settled without a word of it: its line ends."""
    reads, looks = Reads(), 0

    def owes() -> bool:
        nonlocal looks
        looks += 1
        if looks == 4 * SILENCE_LOOKS:
            reads.ended.set()
        return looks % SILENCE_LOOKS > 0

    await listen(reads, owes, 0.05)


async def test_a_draft_that_owes_all_the_time_is_frozen() -> None:
    looks = 0

    def owes() -> bool:
        nonlocal looks
        looks += 1
        return True

    with pytest.raises(DraftFault, match=r"the draft was silent for 0\.05 s"):
        await listen(Reads(), owes, 0.05)
    assert looks == SILENCE_LOOKS + 1
