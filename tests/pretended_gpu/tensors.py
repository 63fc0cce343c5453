"""Tensors of the device: each has one of the CPU inside, on which everything is computed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.pretended_gpu import kernels, queue

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")

# Of these names the device's work is waited for: what they return depends on its numbers, or is on the host.
_READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal", "allclose", "nonzero",
    "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "is_nonzero", "__format__", "__repr__",
    "new_tensor", "inv", "linalg_inv",
}  # fmt: skip
_INDEXING = {"__getitem__", "__setitem__", "index", "index_put_", "index_put"}
_MIX = {"copy_", "to", "cuda", "type_as", "set_", "__set__", *_INDEXING}
"""What takes tensors of both places."""
_TAKES_NO_NUMBERS = {
    "cat", "concat", "stack", "index_select", "index_copy", "index_copy_", "index_add", "index_add_", "gather",
    "scatter", "scatter_", "scatter_add_", "embedding", "matmul", "mm", "bmm", "linear", "isin", "searchsorted",
}  # fmt: skip
"""What takes no tensor of the host, not even one that is a mere number."""
_NOT_ON_DEVICE = {"numpy", "__array__", "__dlpack__"}


class GpuTensor(Tensor):
    """A tensor of the device, [shape, strides and dtype of `on_cpu`]."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "GpuTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=GPU,
            requires_grad=inner.requires_grad,
        )
        made.on_cpu = inner
        queue.hold(made, inner)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "requires_grad_", "is_floating_point", "dim", "size", "stride", "numel"):
            return _own(func, name, args, kwargs or {})
        if name == "_has_compatible_shallow_copy_type":
            return all(isinstance(each, GpuTensor) for each in args)
        return on_device(func, name, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """What C++ computes by itself of such a tensor."""
        return on_device(func, func._schema.name.partition("::")[2], args, kwargs or {})


def _own(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    if name == "__set__" and isinstance(args[1], Tensor):
        raise NotImplementedError("a device's tensor that is set anew")
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def unwrap(value: Any) -> Any:
    if isinstance(value, GpuTensor):
        return value.on_cpu
    return CPU if is_gpu(value) else value


def wrap(value: Any) -> Any:
    return GpuTensor(value) if isinstance(value, Tensor) and not isinstance(value, GpuTensor) else value


def is_gpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    )


def _is_cpu(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cpu") or (isinstance(value, str) and value == "cpu")


def on_device(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """What `func` returns, computed by the device."""
    queue.check_not_lost()
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if name in _NOT_ON_DEVICE:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    of_host = [each for each in tensors if not isinstance(each, GpuTensor)]
    foreign = [each for each in of_host if each.dim()]
    if (foreign and name not in _MIX) or (of_host and name in _TAKES_NO_NUMBERS) or _indexes_across(name, args, kwargs):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            f" (when calling {name})"
        )
    if name in ("copy_", "_copy_from", "to", "_to_copy", "cpu", "cuda"):
        return _moved(func, name, args, kwargs)
    if name in _READS or foreign or _index_waits(name, args, kwargs) or _repeats_unseen(name, args, kwargs):
        queue.wait(name)
    elif name.startswith("empty") or name == "new_empty":
        return queue.spoilt(wrap(func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))))
    out = _computed(kernels.BY_NAME.get(name, func), args, kwargs)
    to_cpu = any(_is_cpu(leaf) for leaf in leaves)
    return out if to_cpu else tree_map(wrap, out)


def _index(args: Any, kwargs: Any) -> Any:
    return args[1] if len(args) > 1 else kwargs["indices"]


def _index_waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an index is of the host, which is copied there first, a mask, whose rows are counted, or a number of the
    device, by which a view is made."""
    if name not in _INDEXING:
        return False
    index = _index(args, kwargs)
    there = [each for each in tree_leaves(index) if isinstance(each, GpuTensor)]
    return bool(_lists(index)) or any(not each.dim() or each.dtype in (torch.bool, torch.uint8) for each in there)


def _lists(index: Any) -> list[Any]:
    """The indices of an index that are sequences of numbers. A tuple is one only within another."""
    of_dims = index if isinstance(index, tuple) else (index,)
    return [
        each
        for each in of_dims
        if isinstance(each, np.ndarray | range | tuple) or (isinstance(each, list) and not any(map(_is_tensor, each)))
    ]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _indexes_across(name: str, args: Any, kwargs: Any) -> bool:
    """Whether the device would have to index memory of the host, or to put numbers of the host one by one."""
    if name not in _INDEXING:
        return False
    index = _index(args, kwargs)
    indices = [each for each in tree_leaves(index) if isinstance(each, Tensor) and each.dim()]
    if not isinstance(args[0], GpuTensor):
        return any(isinstance(each, GpuTensor) for each in indices)
    values = args[2] if len(args) > 2 else kwargs.get("values")
    puts = isinstance(values, Tensor) and not isinstance(values, GpuTensor) and values.dim() > 0
    return puts and bool(indices or _lists(index))


def _repeats_unseen(name: str, args: Any, kwargs: Any) -> bool:
    """`repeat_interleave` whose result's length is the device's to say."""
    if name != "repeat_interleave" or kwargs.get("output_size") is not None:
        return False
    return isinstance(args[1] if len(args) > 1 else kwargs.get("repeats", args[0]), Tensor)


def _computed(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if queue.recording() is not None:  # numbers of the host are recorded as they are
        args, kwargs = tree_map(_as_it_is, (args, kwargs))
    args, kwargs = tree_map(unwrap, (args, kwargs))
    try:
        out = func(*args, **kwargs)
        if queue.recording() is None and not _is_view(out, (args, kwargs), func):
            queue.CALLS["launch"] += 1
        return out
    except IndexError as error:
        if "out of range in self" in str(error) or "out of bounds for dimension" in str(error):
            queue.lose(str(error))
        raise
    except RuntimeError as error:
        if "assert" in str(error).lower() or "out of bounds" in str(error):
            queue.lose(str(error))
        raise


def _places(tree: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


def _is_view(out: Any, given: Any, func: Callable[..., Any]) -> bool:
    """Whether nothing was computed: no tensor was made, nor changed in its place."""
    made, held = (_places(tree) for tree in (out, given))
    name = getattr(func, "__name__", "")
    changes = (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__iadd__")
    return made <= held and not changes


def _as_it_is(value: Any) -> Any:
    is_number = isinstance(value, Tensor) and not isinstance(value, GpuTensor) and not value.dim()
    return value.clone() if is_number else value


def _moved(func: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
    """Copies, of which those between host and device are waited for unless they say that nobody does."""
    if name in ("copy_", "_copy_from"):
        target, source = (args[0], args[1]) if name == "copy_" else (args[1], args[0])
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        queue.copy(target, source, waits=waits)
        return target
    source = args[0]
    device, dtype, non_blocking = _asked(name, args, kwargs)
    if device is None or (device.type == "cuda") == isinstance(source, GpuTensor):
        return wrap(_computed(func, args, kwargs)) if isinstance(source, GpuTensor) else func(*args, **kwargs)
    dtype = dtype or source.dtype
    made: Tensor = torch.empty_like(unwrap(source), dtype=dtype)
    target = GpuTensor(made) if device.type == "cuda" else queue.pin(made) if non_blocking else made
    queue.copy(target, source, waits=not non_blocking)
    return target


def _asked(name: str, args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Device, dtype and `non_blocking` of a move."""
    non_blocking = bool(kwargs.get("non_blocking"))
    if name in ("cpu", "cuda"):
        return (CPU if name == "cpu" else GPU), None, non_blocking
    if name == "_to_copy":
        return kwargs.get("device"), kwargs.get("dtype"), non_blocking
    like = args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(like, Tensor):
        return like.device, like.dtype, non_blocking
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(
        *args[1:], **{key: value for key, value in kwargs.items() if key != "copy"}
    )
    return device, dtype, non_blocking
