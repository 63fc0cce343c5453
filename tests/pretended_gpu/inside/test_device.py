"""The device is as strict as one of CUDA's where a test on a CPU sees nothing."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slipstream.device_copy import to_device
from slipstream.engine.static.step import Recorder
from slipstream.engine.thread import device_answers, is_device_lost
from tests.pretended_gpu import queue

GPU = torch.device("cuda:0")


def recorded(compute: Callable[[], Any], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Runs nothing."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        compute()
    return graph


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1, 2], device=GPU),
        lambda: torch.arange(3, device="cuda"),
        lambda: torch.ones(2).to("cuda", torch.float16),
        lambda: torch.ones(2).cuda(),
        lambda: torch.randn(3, device=GPU, generator=torch.Generator(GPU).manual_seed(0)),
        lambda: torch.ones(2).new_zeros(3, device=GPU),
        lambda: nn.Linear(3, 4).to(GPU).weight,
        lambda: torch.zeros(2, 3, device=GPU)[:, 1:].T,
        lambda: nn.functional.softmax(torch.zeros(3, device=GPU), dim=0),
    ],
)
def test_what_is_made_there_is_there(make: Callable[[], Tensor]) -> None:
    made = make()
    assert made.device == GPU and made.is_cuda and made.cpu().device.type == "cpu"


def test_places_do_not_mix() -> None:
    there, here = torch.ones(3, device=GPU), torch.ones(3)
    for compute in (lambda: there + here, lambda: here @ there, lambda: torch.stack([here, there])):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            compute()
    with pytest.raises(TypeError, match="convert cuda:0 device type tensor to numpy"):
        there.numpy()
    assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2], "a number is no tensor of a place"


def test_the_host_numbers_rows_before_the_device_takes_them() -> None:
    there, here, rows = torch.zeros(3, 3, device=GPU), torch.zeros(3, 3), torch.tensor([0, 2], device=GPU)
    for index in ([0, 2], ([0, 1], [1, 2]), (slice(None), [0]), np.array([1, 2]), np.array(1), range(2), rows[0]):
        queue.CALLS.clear()
        assert there[index] is not None and queue.waits() == 1
    for index in (1, slice(2), (slice(None), 1), rows, (rows, rows), torch.tensor(1)):
        queue.CALLS.clear()
        assert there[index] is not None and not queue.waits()
    for compute in (
        lambda: here[rows],
        lambda: there.__setitem__(rows, here[:2]),
        lambda: torch.stack([there[0, 0], torch.tensor(1.0)]),
        lambda: there.index_select(0, torch.tensor(1)),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            compute()


def test_memory_that_nobody_has_written_holds_no_numbers() -> None:
    assert torch.empty(2, device=GPU).isnan().all()
    assert torch.zeros(2, device=GPU).new_empty(2).isnan().all()


def test_what_is_read_before_it_has_arrived_is_garbage() -> None:
    there, here = torch.ones(2, device=GPU), torch.zeros(2, pin_memory=True)
    here.copy_(there, non_blocking=True)
    also = there.to("cpu", non_blocking=True)
    assert here.isnan().all() and also.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert here.tolist() == also.tolist() == [1, 1]


def test_memory_that_changes_before_it_was_read_is_an_error() -> None:
    here, there = torch.zeros(2, pin_memory=True), torch.zeros(2, device=GPU)
    event = torch.cuda.Event()
    there.copy_(here, non_blocking=True)
    event.record()
    assert not event.query()
    here.fill_(1)
    with pytest.raises(AssertionError, match="was changed before the device had read it"):
        event.synchronize()
    there.copy_(here, non_blocking=True)
    event.record()
    event.synchronize()
    assert event.query()
    here.fill_(2)
    assert there.tolist() == [1, 1]


def test_a_graph_computes_when_it_is_replayed() -> None:
    number, counted = 3, torch.zeros(2, device=GPU)
    graph = recorded(lambda: counted.add_(number))
    assert counted.tolist() == [0, 0]
    number = 5
    graph.replay()
    graph.replay()
    assert counted.tolist() == [6, 6], "numbers of the host are as they were"


def test_a_graph_keeps_its_tensors() -> None:
    given, found = torch.ones(2, device=GPU), []
    graph = recorded(lambda: found.append((given.float() * 2).reshape(1, 2)))
    assert found[0].isnan().all()
    for number in (1.0, 4.0):
        given.fill_(number)
        graph.replay()
        assert found[0].tolist() == [[2 * number, 2 * number]]


@pytest.mark.parametrize(
    "compute",
    [
        lambda there: there.tolist(),
        lambda there: there.cpu(),
        lambda there: there[there > 0],
        lambda there: there.copy_(torch.zeros(2)),
        lambda there: torch.tensor([1], device=GPU),
        lambda there: bool(there.any()),
        lambda there: torch.cuda.synchronize(),
        lambda there: there[[1, 0]],
        lambda there: there.new_tensor([1.0]),
        lambda there: to_device(torch.zeros(2), GPU),
    ],
)
def test_nothing_recorded_waits(compute: Callable[[Tensor], Any]) -> None:
    there = torch.ones(2, device=GPU)
    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        recorded(lambda: compute(there))
    assert not is_device_lost(raised.value)
    assert there.tolist() == [1, 1]


def test_a_graph_takes_what_earlier_ones_of_its_memory_have_left() -> None:
    given, pool = torch.ones(2, device=GPU), torch.cuda.graph_pool_handle()
    kept: list[Tensor] = []
    place = torch.empty(2, device=GPU)

    def compute() -> None:
        kept.append(given * 2)
        place.copy_(given * 3)

    first = recorded(compute, pool)
    recorded(lambda: given * 4, pool).replay()
    first.replay()
    second = recorded(lambda: given * 5, pool)
    second.replay()
    assert kept[0].tolist() == [2, 2] and place.tolist() == [3, 3], "somebody has them"
    lost = kept.pop()
    inside = lost.on_cpu  # type: ignore[attr-defined]
    del lost
    recorded(lambda: given * 6, pool).replay()
    assert inside.isnan().all(), "nobody has it"


def test_a_wait_that_nobody_hears_of_breaks_a_recording() -> None:
    there = torch.ones(2, device=GPU)

    def compute() -> None:
        with contextlib.suppress(RuntimeError):
            there.tolist()

    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorded(compute)


def test_repeats_that_the_host_knows_are_no_wait() -> None:
    there, times = torch.ones(2, 3, device=GPU), torch.tensor([1, 2], device=GPU)
    for repeat, num_waits in (
        (lambda: there.repeat_interleave(2, dim=0), 0),
        (lambda: there.repeat_interleave(repeats=2, dim=1), 0),
        (lambda: torch.repeat_interleave(there, times, 0), 1),
        (lambda: torch.repeat_interleave(there, times, 0, output_size=3), 0),
    ):
        queue.CALLS.clear()
        assert len(repeat()) > 1 and queue.waits() == num_waits


def test_memory_whose_last_graph_is_gone_is_lost() -> None:
    given, pool = torch.ones(2, device=GPU), torch.cuda.graph_pool_handle()
    first = recorded(lambda: given * 2, pool)
    second = recorded(lambda: given * 3, pool)
    del first
    third = recorded(lambda: given * 4, pool)
    del second, third
    with pytest.raises(RuntimeError, match="use_count > 0"):
        recorded(lambda: given * 5, pool)


def test_memory_of_a_recording_that_failed_is_recorded_in_until_somebody_ends_that() -> None:
    given, pool = torch.ones(2, device=GPU), torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorded(given.tolist, pool)
    with pytest.raises(RuntimeError, match="already recording"):
        recorded(lambda: given * 2, pool)
    recorded(lambda: given * 2).replay()


def test_a_recorder_goes_on_after_what_cannot_be_recorded() -> None:
    recorder, counted = Recorder(GPU), torch.zeros(2, device=GPU)
    add = recorder.record(lambda: counted.add_(1))  # type: ignore[arg-type, return-value]
    for fails in (lambda: counted.add_(counted[[0]]), lambda: counted.add_(to_device(torch.ones(2), GPU))):
        with pytest.raises(RuntimeError, match="previous error during capture") as raised:
            recorder.record(fails)
        assert not is_device_lost(raised.value) and torch.cuda.current_stream() == torch.cuda.default_stream()
    double = recorder.record(lambda: counted.mul_(2))  # type: ignore[arg-type, return-value]
    counted.zero_()
    add()
    double()
    del add, double
    recorder.record(lambda: counted.mul_(3))()  # type: ignore[arg-type, return-value]
    assert counted.tolist() == [54, 54], "1, doubled, and tripled twice before it was recorded"


def test_a_recorder_stays_in_its_memory_where_the_host_fails() -> None:
    recorder, memory = Recorder(GPU), []

    def compute() -> None:
        if queue.recording() is not None:
            memory.append(recorder._memory)
            raise torch.OutOfMemoryError("CUDA out of memory")

    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            recorder.record(compute)
    assert memory == [memory[0]] * 3


def test_a_failed_assert_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "_lost", [])
    table = torch.zeros(3, 2, device=GPU)
    with pytest.raises(torch.AcceleratorError, match="CUDA error: device-side assert triggered") as raised:
        nn.functional.embedding(torch.tensor([7], device=GPU), table)
    assert is_device_lost(raised.value) and not device_answers()
