"""Counts the tensor memory that is alive while code runs, exactly and the same on every machine."""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):
    """Bytes of the storages that operations inside the context make, while they are alive.

    Tensors that were there before count nothing; temporary memory inside one kernel is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0  # bytes
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, None] = weakref.WeakKeyDictionary()

    def __enter__(self) -> "AliveBytes":
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                self._known[thing.untyped_storage()] = None
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        size = storage.nbytes()
        self._known[storage] = None
        weakref.finalize(storage, self._forget, size)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)

    def _forget(self, size: int) -> None:
        self.now -= size
