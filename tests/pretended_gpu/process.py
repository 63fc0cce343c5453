"""Puts the device into this process, for good."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from tests.pretended_gpu import graphs, queue, runtime
from tests.pretended_gpu.tensors import CPU, GPU, GpuTensor, is_gpu, on_device

_library: list[Any] = []


def install() -> None:
    """From now on torch has `cuda:0`."""
    if _library:
        return
    _device_constructors()  # knows torch's own functions from now on
    library = torch.library.Library("_", "IMPL")
    library.fallback(_made, "CUDA")
    _library.append(library)
    for name, function in runtime.FUNCTIONS.items():
        setattr(torch.cuda, name, function)
    torch._C._cuda_endAllocateToPool = graphs.end_allocating  # type: ignore[attr-defined]
    for name in ("tensor", "as_tensor"):
        setattr(torch, name, _from_numbers(getattr(torch, name)))
    for name in ("zeros", "empty", "ones"):
        setattr(torch, name, _pinned(getattr(torch, name)))
    for name in ("to", "cuda"):
        setattr(Tensor, name, _moving(name, getattr(Tensor, name)))
    Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    Tensor.is_pinned = lambda self, device=None: queue.is_pinned(self)  # type: ignore[method-assign, misc, assignment]
    Tensor.copy_ = _copying(Tensor.copy_)  # type: ignore[method-assign]
    from slipstream.engine import fused_layers

    fused_layers.is_plain = lambda weight: type(weight) in (torch.nn.Parameter, GpuTensor)
    torch.Generator = _Generator  # type: ignore[misc]


def is_installed() -> bool:
    """Whether this process has it."""
    return bool(_library)


def _made(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What C++ makes on the device out of nothing."""
    return on_device(op, op._schema.name.partition("::")[2], args, kwargs)


def _from_numbers(function: Any) -> Any:
    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if is_gpu(device) or (device is None and isinstance(data, GpuTensor)):
            if isinstance(data, GpuTensor):
                return data.to(GPU, **kwargs)
            return function(data, *args, **kwargs).to(GPU)
        return function(data, *args, device=device, **kwargs)

    return make


def _pinned(function: Any) -> Any:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        return queue.pin(made) if pin_memory else made

    return make


def _moving(name: str, function: Any) -> Any:
    def move(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        goes = name == "cuda" or any(is_gpu(each) or isinstance(each, GpuTensor) for each in (*args, *kwargs.values()))
        if isinstance(self, GpuTensor) or goes:
            return on_device(function, name, (self, *args), kwargs)
        return function(self, *args, **kwargs)

    return move


def _copying(function: Any) -> Any:
    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
        if isinstance(self, GpuTensor) or isinstance(source, GpuTensor):
            queue.check_not_lost()
            queue.copy(self, source, waits=not non_blocking)
            return self
        return function(self, source, non_blocking)

    return copy_


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    if isinstance(self, GpuTensor):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    if any(size > 1 and not stride for size, stride in zip(self.shape, self.stride(), strict=True)):
        # aten/src/ATen/native/Memory.cpp: what is pinned has the same strides, and is then copied to
        raise RuntimeError("more than one element of the written-to tensor refers to a single memory location")
    return self if queue.is_pinned(self) else queue.pin(self.clone())


class _Generator(torch.Generator):
    def __new__(cls, device: Any = CPU) -> Any:
        return super().__new__(cls, CPU if is_gpu(torch.device(device)) else device)
