"""How many bytes of tensors are alive at once, on any device, `meta` too, where nothing is stored."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """As a context manager, counts the storages that operations inside it make."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return made

    def ignore(self, *tensors: torch.Tensor) -> None:
        """These were there before, and do not count."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes
