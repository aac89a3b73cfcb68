"""Tensors that travel as weights: a model's adapter, if it has one, else every parameter and persistent buffer once."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from asyncrl.devices.host_copies import copy_into, to_host
from protocol.messages import AdapterSpec

_ADAPTER_TENSOR = re.compile(r"(.*\.lora_[AB])\.[^.]+(\.weight)")
"""PEFT's name of an adapter's tensor in a model: the adapter's name stands in its middle."""
_WHOLE_TENSOR = re.compile(r"(.*)\.modules_to_save\.[^.]+(\..*)")
"""PEFT's name of a tensor in a module that is trained whole, beside the one that it takes the place of."""


def published_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors in a stable order; of tied weights only the first name.

    An adapter's tensors have the names of PEFT's files, which leave the adapter's own name out.
    """
    return ((name, tensor.detach()) for name, tensor in published_parts(model))


def published_parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Published names with the model's own parameters and buffers."""
    seen: set[int] = set()
    whole: list[tuple[str, torch.Tensor]] = []
    adapter: list[tuple[str, torch.Tensor]] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        whole.append((name, tensor))
        if match := _ADAPTER_TENSOR.fullmatch(name) or _WHOLE_TENSOR.fullmatch(name):
            adapter.append((f"base_model.model.{match[1]}{match[2]}", tensor))
    yield from adapter or whole


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Raw little-endian bytes of a tensor, without a copy where it is on the CPU and contiguous."""
    flat = to_host(tensor.detach()).contiguous().view(-1)
    if flat.numel() == 0:
        return memoryview(b"")
    return flat.view(torch.uint8).numpy().data


def load_published(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy published tensors into the model in place.

    Raises ValueError if names or shapes differ from the model's: a partial update would be silent corruption.
    """
    own = dict(published_tensors(model))
    with torch.no_grad():
        for name, tensor in fitting(own, tensors):
            copy_into(own[name], tensor)


def fitting(
    own: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors one by one, each compared with the model's `own` of its name, of which none may be left out.

    Raises ValueError where names, shapes or dtypes differ.
    """
    given: set[str] = set()
    for name, tensor in tensors:
        if name not in own or own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
            have = f"{own[name].dtype}{tuple(own[name].shape)}" if name in own else "no such tensor"
            raise ValueError(f"published {name} is {tensor.dtype}{tuple(tensor.shape)}, the model has {have}")
        yield name, tensor
        given.add(name)
    missing = own.keys() - given
    if missing:
        raise ValueError(f"{len(missing)} tensors were not published, such as {sorted(missing)[:3]}")


def architecture_fingerprint(model: nn.Module, adapter: AdapterSpec | None = None) -> str:
    """Equal for two models whose published weights fit each other: names, shapes and dtypes, tied weights once."""
    return fingerprint_of(((name, str(t.dtype), tuple(t.shape)) for name, t in published_tensors(model)), adapter)


def fingerprint_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]], adapter: AdapterSpec | None = None) -> str:
    """Fingerprint of names, torch dtypes and shapes, in the order of publication, and of the adapter's settings."""
    described: list[Any] = [(name, dtype, list(shape)) for name, dtype, shape in tensors]
    if adapter is not None:
        described.append(adapter.model_dump(mode="json"))
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32]
