"""A session's work on the model's thread: its place among the others' work."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest_asyncio
import structlog

from slipstream.budget import Turns
from slipstream.engine.session_work import PROMPT_BEHIND_PEOPLE_S, SessionWork
from slipstream.engine.thread import Lane, ModelThread

MANY = 50


@pytest_asyncio.fixture
async def thread() -> AsyncIterator[ModelThread]:
    thread = ModelThread(1)
    yield thread
    await asyncio.to_thread(thread.close)


async def test_a_late_session_is_not_starved_by_endless_decoding(thread: ModelThread) -> None:
    turns = Turns(PROMPT_BEHIND_PEOPLE_S)
    SessionWork(thread, turns)  # an earlier caption, so that the next is not the process's first
    late, is_waiting, num_passes = SessionWork(thread, turns), threading.Event(), 0

    def decode() -> None:
        nonlocal num_passes
        is_waiting.wait()
        num_passes += 1
        if num_passes < MANY:
            thread.submit(decode, Lane.DECODE)

    thread.submit(decode, Lane.DECODE)
    first_judgement = asyncio.create_task(late.run(lambda: num_passes, Lane.DECODE))
    await asyncio.sleep(0)
    is_waiting.set()
    assert (await first_judgement)[0] == 1


async def test_whatever_a_session_holds_is_freed_though_a_part_of_it_cannot_be(thread: ModelThread) -> None:
    work, freed = SessionWork(thread, Turns(PROMPT_BEHIND_PEOPLE_S)), list[str]()

    def register() -> None:
        for name in ("first", "", "last"):
            work.on_release(lambda name=name: freed.append(name) if name else 1 // 0)  # type: ignore[misc]

    await thread.run(register)
    with structlog.testing.capture_logs() as events:
        await work.close(then=lambda: freed.append("place"))
    assert freed == ["first", "last", "place"] and [event["event"] for event in events] == ["session.release_failed"]


def blocks(name: str, done: list[str]) -> Iterator[None]:
    for _ in range(3):
        done.append(name)
        yield


async def test_prompts_run_at_their_turns(thread: ModelThread) -> None:
    turns, done, may_go = Turns(PROMPT_BEHIND_PEOPLE_S), list[str](), threading.Event()
    turns.observe(1000, 5.0)

    async def run(name: str, num_tokens: int, in_background: bool = False) -> None:
        work = SessionWork(thread, turns, in_background=in_background)
        work.take_turn(num_tokens)
        async for _ in work.run_blocks(blocks(name, done)):
            pass

    def hold() -> None:
        may_go.wait()

    thread.submit(hold, Lane.PREFILL)
    told = [("archive", 10, True), ("long", 1000, False), ("short", 10, False), ("middle", 100, False)]
    running = [asyncio.create_task(run(*each)) for each in told]
    await asyncio.sleep(0)
    may_go.set()
    await asyncio.gather(*running)
    assert done == [name for name in ("short", "middle", "long", "archive") for _ in range(3)]
