"""Counts the bytes of the tensors that are alive, operation by operation: on real devices, and without any memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """While active, every new storage of `device_type` counts until it is freed; views and in-place results do not.

    What a kernel allocates and frees within one operation is not seen. On `meta`, tensors that are on the CPU because
    code reads their values (image grids, sequence lengths) join the others where they meet.
    """

    def __init__(self, device_type: str, known: Iterable[torch.Tensor] = ()):
        """`known` tensors are not counted."""
        super().__init__()
        self.device_type = device_type
        self.live = 0
        self.peak = 0
        self._seen = WeakIdKeyDictionary()
        for tensor in known:
            self._seen[tensor.untyped_storage()] = True

    def restart(self) -> int:
        """Forget the peak so far. Returns what is alive now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.device_type == "meta":
            args, kwargs = _on_meta(args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((result,)):
            if tensor.device.type == self.device_type:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, nbytes: int) -> None:
        self.live -= nbytes


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """What operations take and return holds no deeper containers than lists; pytrees would cost most of the time."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _on_meta(args: Any, kwargs: Any) -> Any:
    if len({tensor.device.type for tensor in _tensors((*args, *kwargs.values()))}) < 2:
        return args, kwargs
    return tree_map(lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, (args, kwargs))


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all of them, shared storage once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
