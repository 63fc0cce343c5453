"""How captions at a fake gateway end early: streams that are left, a cancelled task, Ctrl-C, a closed captioner."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import slipstream
from slipstream import Captioner
from slipstream.errors import InvalidRequest, ServiceUnavailable
from tests.cli.fake_gateway import TEXT, FakeGateway
from tests.support.processes import eventually

HANG = b"hang"


def _break_off(captioner: Captioner) -> None:
    for _ in captioner.stream(HANG):
        break


def _close(captioner: Captioner) -> None:
    stream = captioner.stream(HANG)
    next(stream)
    stream.close()
    assert list(stream) == []


def _leave(captioner: Captioner) -> None:
    with captioner.events(HANG) as events:
        next(events)


@pytest.mark.parametrize("end", [_break_off, _close, _leave])
def test_the_end_of_a_stream_ends_the_caption(
    captioner: Captioner, gateway: FakeGateway, end: Callable[[Captioner], None]
) -> None:
    end(captioner)
    assert gateway.cancelled.wait(60)


def test_a_stream_is_closed_while_another_thread_reads_it(captioner: Captioner, gateway: FakeGateway) -> None:
    stream = captioner.stream(HANG)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(list, stream)
        while not stream.text:
            time.sleep(0.01)
        stream.close()
        assert [str(piece) for piece in reading.result(60)] == ["A red"]
    assert gateway.cancelled.wait(60)


async def test_the_end_of_an_asynchronous_stream_ends_the_caption(gateway: FakeGateway) -> None:
    async with slipstream.connect_async(gateway.address) as captioner:
        async for piece in captioner.stream(HANG):
            assert str(piece) == "A red"
            break
        assert await asyncio.to_thread(gateway.cancelled.wait, 60)


async def test_a_cancelled_task_ends_its_caption(gateway: FakeGateway) -> None:
    async with slipstream.connect_async(gateway.address) as captioner:
        captioning = asyncio.create_task(captioner.caption(HANG))
        await eventually(lambda: gateway.received == HANG)
        captioning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await captioning
        assert await asyncio.to_thread(gateway.cancelled.wait, 60)


def test_ctrl_c_ends_the_caption(gateway: FakeGateway) -> None:
    script = f"""
import signal, slipstream, threading
captioner = slipstream.connect({gateway.address!r})
for piece in captioner.stream(b"hang"):  # a signal, which wakes a thread that waits: `interrupt_main` does not
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode != 0 and process.stderr.rstrip().endswith("KeyboardInterrupt")
    assert gateway.cancelled.wait(60)


def test_threads_that_outlive_the_main_one_have_their_captions(gateway: FakeGateway, video: Path) -> None:
    """Python gives no work to helper threads from then on."""
    script = f"""
import slipstream, threading

def caption_late():
    threading.main_thread().join()
    print(captioner.caption({str(video)!r}).text)
    with slipstream.connect({gateway.address!r}) as another, open({str(video)!r}, "rb") as file:
        print("".join(map(str, another.stream(file))))

captioner = slipstream.connect({gateway.address!r})
threading.Thread(target=caption_late).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (f"{TEXT}\n{TEXT}\n", "")


@pytest.mark.parametrize("kind", ["DocumentStream(captioner, ", "BlockingItems(captioner._run, "])
def test_ctrl_c_before_the_first_answer_is_just_that(gateway: FakeGateway, kind: str) -> None:
    """What is asked needs some rounds of its loop to end."""
    script = f"""
import asyncio, contextlib, signal, slipstream, threading
from slipstream.client.batch_handles import BlockingItems
from slipstream.client.sync_captioner import DocumentStream

async def answers():
    try:
        main = threading.main_thread().ident
        asyncio.get_running_loop().call_soon(signal.pthread_kill, main, signal.SIGINT)
        await asyncio.sleep(3600)
        yield
    finally:
        for _ in range(1000):
            await asyncio.sleep(0)
        print("ended", flush=True)

captioner = slipstream.connect({gateway.address!r})
with contextlib.closing({kind}answers())) as stream:
    next(stream)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "ended\n" and done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "already running" not in done.stderr


def test_a_captioner_lives_as_long_as_its_streams(gateway: FakeGateway, video: Path) -> None:
    stream = slipstream.connect(gateway.address).stream(video)
    gc.collect()
    assert "".join(map(str, stream)) == TEXT


def test_close_tells_who_still_waits(gateway: FakeGateway) -> None:
    captioner = slipstream.connect(gateway.address)
    stream = captioner.stream(HANG)
    next(stream)
    threading.Timer(0.2, captioner.close).start()
    with pytest.raises(ServiceUnavailable, match="closed"):
        next(stream)
    assert stream.text == "A red"
    with pytest.raises(InvalidRequest, match="closed"):
        captioner.info()
    captioner.close()
