"""What travels as weights: every parameter and persistent buffer once, under its Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def published_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors in a stable order; of tied weights only the first name."""
    return ((name, tensor.detach()) for name, tensor in published_parts(model))


def published_parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as the model's own parameters and buffers."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield name, tensor


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Raw little-endian bytes of a CPU tensor, without a copy where it is contiguous."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def load_published(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy published tensors into the model in place.

    Raises ValueError if names or shapes differ from the model's: a partial update would be silent corruption.
    """
    own = dict(published_tensors(model))
    given: set[str] = set()
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                have = f"{own[name].dtype}{tuple(own[name].shape)}" if name in own else "no such tensor"
                raise ValueError(f"published {name} is {tensor.dtype}{tuple(tensor.shape)}, the model has {have}")
            own[name].copy_(tensor)
            given.add(name)
    missing = own.keys() - given
    if missing:
        raise ValueError(f"{len(missing)} tensors were not published, such as {sorted(missing)[:3]}")
