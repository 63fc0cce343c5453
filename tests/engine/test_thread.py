"""The model's thread: blocks in order of their sessions, errors to their callers, nothing for those who left."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch

from slipstream.engine import thread as threads
from slipstream.engine.thread import Lane, ModelThread, is_device_lost
from tests.support.held_memory import no_collection


@pytest_asyncio.fixture
async def thread() -> AsyncIterator[ModelThread]:
    thread = ModelThread(1)
    yield thread
    await asyncio.to_thread(thread.close)


async def collect(thread: ModelThread, blocks: Iterator[str], order: int) -> list[str]:
    return [item async for item in thread.run_blocks(blocks, order)]


async def test_results_and_errors_reach_the_caller(thread: ModelThread) -> None:
    assert await thread.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    assert await thread.run(lambda: 3, Lane.PREFILL) == 3


async def test_the_first_prefill_finishes_before_the_second_goes_on(thread: ModelThread) -> None:
    ran: list[str] = []
    both_are_there = threading.Event()

    def prefill(name: str) -> Iterator[str]:
        for block in range(4):
            ran.append(name)
            yield f"{name}{block}"
            both_are_there.wait()

    first = asyncio.create_task(collect(thread, prefill("a"), order=1))
    second = asyncio.create_task(collect(thread, prefill("b"), order=2))
    await asyncio.sleep(0)
    both_are_there.set()
    assert await first == ["a0", "a1", "a2", "a3"]
    assert await second == ["b0", "b1", "b2", "b3"]
    assert ran == ["a"] * 4 + ["b"] * 4


async def test_decoding_passes_between_two_blocks(thread: ModelThread) -> None:
    ran: list[str] = []
    is_waiting = threading.Event()

    def prefill() -> Iterator[str]:
        for block in range(3):
            ran.append(f"block {block}")
            yield ""
            is_waiting.wait()

    blocks = asyncio.create_task(collect(thread, prefill(), order=1))
    await asyncio.sleep(0)
    one_pass = asyncio.create_task(thread.run(lambda: ran.append("pass")))
    await asyncio.sleep(0)
    is_waiting.set()
    await asyncio.gather(blocks, one_pass)
    assert ran.index("pass") < ran.index("block 2")


async def test_an_error_in_a_block_ends_the_blocks(thread: ModelThread) -> None:
    def prefill() -> Iterator[str]:
        yield "well"
        raise ValueError("broken")

    blocks = thread.run_blocks(prefill(), order=0)
    assert await anext(blocks) == "well"
    with pytest.raises(ValueError, match="broken"):
        await anext(blocks)


async def test_blocks_that_nobody_waits_for_are_not_run(thread: ModelThread) -> None:
    ran: list[int] = []
    may_go_on = threading.Event()

    def prefill() -> Iterator[int]:
        for block in range(100):
            ran.append(block)
            yield block
            may_go_on.wait()

    blocks = thread.run_blocks(prefill(), order=0)
    assert await anext(blocks) == 0
    await blocks.aclose()  # type: ignore[attr-defined]
    may_go_on.set()
    await thread.run(lambda: None, Lane.PREFILL, order=1)
    assert len(ran) <= 2


async def test_a_job_that_fails_does_not_end_the_thread(thread: ModelThread) -> None:
    thread.submit(lambda: [][0], Lane.DECODE)
    assert await thread.run(lambda: "alive") == "alive"


class Held:
    """Something large that a block works on."""


async def test_blocks_that_nobody_waits_for_keep_nothing(thread: ModelThread) -> None:
    held: list[weakref.ref[Held]] = []

    def work(item: Held) -> Iterator[int]:
        while item:
            yield 1

    def blocks() -> Iterator[int]:
        item = Held()
        held.append(weakref.ref(item))
        return work(item)

    with no_collection():
        running = thread.run_blocks(blocks(), order=0)
        async for _ in running:
            break
        await running.aclose()  # type: ignore[attr-defined]
        await thread.run(lambda: None, Lane.PREFILL, order=1)
        await thread.run(lambda: None)
        assert [ref() for ref in held] == [None]


@pytest.mark.parametrize("in_blocks", [True, False])
async def test_an_error_keeps_nothing_once_it_is_dealt_with(thread: ModelThread, in_blocks: bool) -> None:
    held: list[weakref.ref[Held]] = []

    def fail() -> None:
        item = Held()
        held.append(weakref.ref(item))
        raise ValueError(item)

    async def run() -> None:
        if in_blocks:
            await collect(thread, (str(fail()) for _ in range(1)), order=0)
        else:
            await thread.run(fail)

    with no_collection():
        with contextlib.suppress(ValueError):
            await run()
        await thread.run(lambda: None)
        assert [ref() for ref in held] == [None]


# -- a device that is lost --------------------------------------------------------------------------------------------

LOST = RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA")


def fails(error: Exception) -> None:
    raise error


def fails_late(error: Exception) -> Iterator[int]:
    yield 1
    raise error


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (LOST, True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ZeroDivisionError(), False),
    ],
)
async def test_an_error_that_leaves_no_device_is_told(
    thread: ModelThread, error: Exception, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "device_answers", lambda: False)
    told: list[BaseException] = []
    thread.on_device_lost = told.append
    with pytest.raises(type(error)):
        await thread.run(lambda: fails(error))
    with pytest.raises(type(error)):
        [_ async for _ in thread.run_blocks(fails_late(error), order=1)]
    thread.submit(lambda: fails(error), Lane.DECODE)
    assert await thread.run(lambda: 7) == 7
    assert told == [error] * 3 * is_lost


class Device:
    """What CUDA is asked after an error: one small operation, and a wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launch: Exception | None, wait: Exception | None) -> None:
        self.asked: list[str] = []

        def zeros(*size: int, device: str) -> torch.Tensor:
            self._ask("launch", launch)
            return torch.tensor([0])

        monkeypatch.setattr(threads.torch, "zeros", zeros)
        monkeypatch.setattr(threads.torch.cuda, "synchronize", lambda: self._ask("wait", wait))

    def _ask(self, what: str, error: Exception | None) -> None:
        self.asked.append(what)
        if error is not None:
            raise error


NOT_FOR_GOOD = (
    torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    torch.AcceleratorError("CUDA error: invalid argument"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


@pytest.mark.parametrize("error", NOT_FOR_GOOD, ids=str)
@pytest.mark.parametrize("launch", [None, torch.OutOfMemoryError("CUDA out of memory")], ids=str)
def test_a_device_that_answers_is_not_lost(
    error: Exception, launch: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, launch, None)
    assert not is_device_lost(error) and device.asked == ["launch", "wait"]


@pytest.mark.parametrize("answers", [(LOST, None), (None, LOST), (AssertionError("not compiled with CUDA"), None)])
def test_a_device_that_does_not_answer_is_lost(
    answers: tuple[Exception | None, Exception | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    Device(monkeypatch, *answers)
    assert all(map(is_device_lost, (LOST, *NOT_FOR_GOOD)))


def test_what_is_no_error_of_the_device_asks_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, LOST, LOST)
    assert not is_device_lost(ValueError("CUDA error: in a text")) and not device.asked


@pytest.mark.parametrize(("given", "prefill"), [(0, 1), (3, 3)])
async def test_prefills_may_take_more_threads_than_decoding(given: int, prefill: int) -> None:
    thread = ModelThread(1, given)
    try:
        lanes = [Lane.PREFILL, Lane.DECODE, Lane.PREFILL, Lane.IDLE, Lane.DECODE]
        counts = [await thread.run(torch.get_num_threads, lane) for lane in lanes]
        assert counts == [prefill, 1, prefill, prefill, 1]
        assert await collect(thread, (str(torch.get_num_threads()) for _ in range(2)), order=0) == [str(prefill)] * 2
    finally:
        await asyncio.to_thread(thread.close)
