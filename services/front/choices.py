"""The choices of one answer (`n`), which differ in their seeds: the first one's prefill is in the target's cache before
the others ask for it, and then all are written at once."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from slipstream.documents.reading import DocumentEvent
from slipstream.messages import PREFILLED, StageChange
from slipstream.services.front.answer import Answer

Events = AsyncGenerator[DocumentEvent, None]


async def tell_choices(answers: Sequence[Answer], events_of: Callable[[int], Events]) -> AsyncGenerator[bytes, None]:
    """What is sent of a stream of them, as it comes; whoever needs none of it has them whole at its end. Raises what
    any of them raises, and ends the others."""
    events = asyncio.Queue[bytes | Exception | None](1)
    is_prefilled = asyncio.Event()

    async def tell(index: int) -> None:
        if index:
            await is_prefilled.wait()
        try:
            async with aclosing(answers[index].events(_watched(events_of(index), is_prefilled))) as pieces:
                async for piece in pieces:
                    await events.put(piece)
        except Exception as error:
            await events.put(error)
        else:
            await events.put(None)

    telling = [asyncio.create_task(tell(index)) for index in range(len(answers))]
    try:
        num_left = len(telling)
        while num_left:
            match await events.get():
                case None:
                    num_left -= 1
                case bytes(piece):
                    yield piece
                case error:
                    raise error
        yield answers[0].form.close([answer.written for answer in answers])
    finally:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)


async def _watched(events: Events, is_prefilled: asyncio.Event) -> Events:
    """The same. A text that needs no prefill lets the others begin when it ends."""
    async with aclosing(events):
        async for happened in events:
            if isinstance(happened, StageChange) and happened.stage == PREFILLED:
                is_prefilled.set()
            yield happened
    is_prefilled.set()
