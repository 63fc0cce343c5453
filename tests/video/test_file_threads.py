"""Files of a slow or hanging file system: nobody else waits for it, and what is opened too late is closed."""

import asyncio
import io
import threading
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from slipstream.errors import ServiceUnavailable
from slipstream.video.files import FileThreads
from tests.support.processes import eventually, file_threads_rest

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_file_system_that_hangs_stops_only_those_who_ask_it() -> None:
    healed = threading.Event()
    hung, well = FileThreads(0.3, max_threads=2), FileThreads(10.0)
    waiting = [asyncio.create_task(hung.run(healed.wait)) for _ in range(4)]
    assert await well.run(lambda: "answers") == "answers"
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServiceUnavailable] * 4
    healed.set()
    hung._timeout_s = 60.0
    assert await hung.run(lambda: "again") == "again"


async def test_what_a_file_system_gives_too_late_is_closed(tmp_path: Path) -> None:
    (tmp_path / "clip").write_bytes(b"frames")
    healed, opened = threading.Event(), []

    def open_late() -> BinaryIO:
        healed.wait()
        opened.append((tmp_path / "clip").open("rb"))
        return opened[0]

    with pytest.raises(ServiceUnavailable, match=r"limit of 0\.1 s"):
        await FileThreads(0.1).run(open_late)
    healed.set()
    await eventually(lambda: bool(opened) and opened[0].closed)


async def test_a_file_that_is_open_just_as_nobody_waits_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    files, opened = FileThreads(), [io.BytesIO()]
    opening = asyncio.create_task(files.run(lambda: opened[0]))
    hand_over = files._hand_over

    def hand_over_too_late(*given: Any) -> None:
        hand_over(*given)
        opening.cancel()

    monkeypatch.setattr(files, "_hand_over", hand_over_too_late)
    with pytest.raises(asyncio.CancelledError):
        await opening
    await eventually(lambda: opened[0].closed)


async def test_a_file_that_is_open_when_the_loop_has_ended_is_closed() -> None:
    healed, opened = threading.Event(), [io.BytesIO()]

    def open_late() -> io.BytesIO:
        healed.wait()
        return opened[0]

    async def leave() -> None:
        opening = asyncio.ensure_future(FileThreads().run(open_late))
        await eventually(lambda: any(thread.name == "files" for thread in threading.enumerate()))
        opening.cancel()

    await file_threads_rest()
    await asyncio.to_thread(asyncio.run, leave())
    healed.set()
    await eventually(lambda: opened[0].closed)


async def test_errors_of_a_file_system_reach_the_caller() -> None:
    with pytest.raises(IsADirectoryError):
        await FileThreads().run(Path("/").read_bytes)
