"""The device's work: who waits for it, what is on its way, and what is recorded of it."""

import threading
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CALLS: Counter[str] = Counter()
"""Of this process: waits by what waited, copies, replays."""


def waits() -> int:
    """Among the calls."""
    return sum(number for name, number in CALLS.items() if name.startswith("wait"))


_lock = threading.RLock()
_thread = threading.local()


def recording() -> Any:
    """What this thread records, or None."""
    return getattr(_thread, "recording", None)


def record(found: Any) -> None:
    _thread.recording, _thread.broken = found, False


def refuse_while_recording(what: str) -> None:
    """What is not permitted then breaks the recording, also where its error is heard by nobody."""
    if recording() is not None:
        _thread.broken = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


def broken() -> bool:
    """Whether this thread has asked for something else than what can be recorded."""
    return bool(_thread.broken)


# -- faults -----------------------------------------------------------------------------------------------------------

_lost: list[str] = []


def lose(why: str) -> None:
    """The device answers no more."""
    _lost.append(why)
    check_not_lost()


def check_not_lost() -> None:
    if _lost:
        raise torch.AcceleratorError(f"CUDA error: device-side assert triggered ({_lost[0]})")


# -- copies -----------------------------------------------------------------------------------------------------------


@dataclass
class _OnItsWay:
    """A copy that nobody has waited for."""

    host: Tensor
    numbers: Tensor
    """Of the host's memory: as the device is to find them, or as they will be."""
    to_host: bool

    def check(self) -> None:
        """Raises where the device reads what somebody has changed since."""
        if not self.to_host and not torch.equal(self.host, self.numbers):
            raise AssertionError(f"host memory {tuple(self.host.shape)} was changed before the device had read it")


_on_their_way: list[_OnItsWay] = []
_num_waits = 0


def num_waits() -> int:
    """Since the process began."""
    return _num_waits


def wait(why: str) -> None:
    """Until the device has done all that it was given."""
    global _num_waits
    check_not_lost()
    refuse_while_recording(why)
    with _lock, torch.inference_mode():
        CALLS[f"wait {why}"] += 1
        _num_waits += 1
        arrived, _on_their_way[:] = list(_on_their_way), []
        for each in arrived:
            if each.to_host:
                each.host.copy_(each.numbers)
        for each in arrived:
            each.check()


def copy(target: Tensor, source: Tensor, *, waits: bool) -> None:
    """Between any two places; `waits`: the host does, where one of them is its own."""
    from_host, to_host = not hasattr(source, "on_cpu"), not hasattr(target, "on_cpu")
    here, there = getattr(source, "on_cpu", source), getattr(target, "on_cpu", target)
    if from_host == to_host:
        there.copy_(here)
        return
    host = here if from_host else there
    if waits or not (is_pinned(host) or (from_host and not host.dim())):
        if from_host and recording() is None:
            there.copy_(here)
        wait("copy from the host" if from_host else "copy to the host")
        if to_host:
            there.copy_(here)
        return
    CALLS["copy"] += 1
    if from_host or recording() is not None:
        there.copy_(here)
    if recording() is not None:
        return
    with _lock:
        _on_their_way.append(_OnItsWay(host, here.to(host.dtype).clone(), to_host))
    if to_host:
        spoil(host)


# -- memory -----------------------------------------------------------------------------------------------------------

_pinned: dict[int, torch.UntypedStorage] = {}


def pin(tensor: Tensor) -> Tensor:
    """Its own memory is pinned from now on, as long as somebody has it."""
    refuse_while_recording("pin")
    with _lock:
        for place, storage in list(_pinned.items()):
            if torch._C._storage_Use_Count(storage._cdata) == 1:
                del _pinned[place]
        _pinned[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def spoil(inner: Tensor) -> None:
    """Fills it with what nobody may take for a number."""
    if inner.is_floating_point():
        inner.fill_(torch.nan)
    elif inner.dtype is torch.bool:
        inner.fill_(True)
    elif inner.numel():
        inner.fill_(torch.iinfo(inner.dtype).max // 2)


def spoilt(made: Any) -> Any:
    spoil(made.on_cpu)
    return made


# Tensors of recordings that somebody still has: what nobody has is free for the next recording of the same memory.
_holders: Counter[int] = Counter()
_watched: set[int] = set()


def watch(inner: Tensor) -> int:
    place = inner.untyped_storage()._cdata
    _watched.add(place)
    return place


def hold(holder: object, inner: Tensor) -> None:
    if not _watched and recording() is None:
        return
    place = inner.untyped_storage()._cdata
    if place in _watched or recording() is not None:
        _holders[place] += 1
        weakref.finalize(holder, _released, place)


def _released(place: int) -> None:
    _holders[place] -= 1


def is_held(place: int) -> bool:
    return _holders[place] > 0
