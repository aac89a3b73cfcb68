"""Counts the bytes of the tensors that are alive, operation by operation: on real devices, and without any memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

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
        self.__seen = WeakIdKeyDictionary()
        for tensor in known:
            self.__seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mixed = len({tensor.device.type for tensor in _tensors((*args, *kwargs.values()))}) > 1
        if self.device_type == "meta" and mixed:
            args, kwargs = tree_map(lambda value: value.to("meta") if torch.is_tensor(value) else value, (args, kwargs))
        result = _on_meta(func, args, kwargs) if self.device_type == "meta" else func(*args, **kwargs)
        for tensor in _tensors((result,)):
            if tensor.device.type == self.device_type:
                self.__count(tensor.untyped_storage())
        return result

    def __count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.__seen:
            return
        self.__seen[storage] = True
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.__freed, storage.nbytes())

    def __freed(self, nbytes: int) -> None:
        self.live -= nbytes


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors in values and lists of them; pytrees would cost most of the time."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


_MADE: dict[Any, list[tuple[Any, ...]]] = {}
"""Sizes, strides and dtypes of what an operation makes on the meta device, by its arguments; empty for views and
whatever else is not new."""


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Result of an operation. Torch finds its sizes in Python, which is most of the time of a rehearsal, and the layers
    of a model ask for the same ones again."""
    key = func, _described(args), _described(kwargs.items())
    try:
        known = _MADE.get(key)
    except TypeError:  # an argument without a hash
        return func(*args, **kwargs)
    if known:
        made = [torch.empty_strided(*like, dtype=dtype, device="meta") for *like, dtype in known]
        return tuple(made) if len(made) > 1 else made[0]
    result = func(*args, **kwargs)
    if known is None:
        _MADE[key] = _new_tensors(result, (*args, *kwargs.values()))
    return result


def _described(values: Iterable[Any]) -> tuple[Any, ...]:
    """All of the arguments that sizes, strides and dtypes of a result depend on."""
    return tuple(
        (value.shape, value.stride(), value.dtype, value.device.type)
        if isinstance(value, torch.Tensor)
        else _described(value)
        if isinstance(value, list | tuple)
        else (type(value), value)  # 1, 1.0 and True are equal
        for value in values
    )


def _new_tensors(result: Any, arguments: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Describe a tensor or several, if each is all of a storage of its own."""
    given = [tensor.untyped_storage() for tensor in _tensors(arguments)]
    known = []
    for tensor in result if isinstance(result, tuple) and len(result) > 1 else (result,):
        if type(tensor) is not torch.Tensor or not tensor.is_meta:
            return []
        like, storage = (tensor.shape, tensor.stride()), tensor.untyped_storage()
        whole = nbytes([torch.empty_strided(*like, dtype=tensor.dtype, device="meta")]) == storage.nbytes()
        if not whole or any(storage is other for other in given):
            return []
        known.append((*like, tensor.dtype))
    return known


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages, shared ones once."""
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())


# --- stand-ins for CUDA's kernels ------------------------------------------------------------------


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Attention and grouped products allocate what CUDA's kernels do, on the meta device, for all of this process.

    Left to itself torch would count the whole score matrix there, and its grouped product for meta takes bfloat16 only.
    A TorchFunctionMode would not do: it is off during a backward pass, where checkpointed layers run again.
    """
    with (
        patch("torch.nn.functional.scaled_dot_product_attention", _attend),
        patch("torch.nn.functional.grouped_mm", lambda tokens, weights, *, offs: tokens @ weights[0]),
    ):
        yield


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """CUDA's memory-efficient kernel takes a mask in the inputs' dtype, and no key heads that queries share.

    Packed attention brings its own; a vision tower's bool mask is made into one in each layer.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype)
    if query.shape[-3] != key.shape[-3]:
        key, value = (tensor.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for tensor in (key, value))
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:-1], key.shape[-2])
    needs_grad = torch.is_grad_enabled()
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs_grad)[0]
