"""Runs a command's coroutine so that every signal that ends the command also lets it clean up."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

ResultT = TypeVar("ResultT")


def run_async(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, with SIGTERM and SIGHUP cancelling the command as Ctrl-C does."""
    return asyncio.run(_run_cancellable(main))


async def _run_cancellable(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores SIGHUP: leave it so
            loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            raise typer.Exit(128 + received[0]) from None
        raise
