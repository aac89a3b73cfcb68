"""A nested state in one file of torch, of which large tensors may lie in files beside it.

In the place of such a tensor the file has an empty one on the meta device, with its shape and dtype; its name is its
path in the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

T = TypeVar("T", bound=torch.Tensor)


def take_parts(state: Any, kind: type[T]) -> tuple[Any, dict[str, T]]:
    """The state without its tensors of this type, and these by their names."""
    parts = {name: value for name, value in _named(state) if isinstance(value, kind)}
    return tree_map_only(kind, lambda part: torch.empty(part.shape, dtype=part.dtype, device="meta"), state), parts


def missing_parts(state: Any) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of the tensors that lie elsewhere."""
    return {n: t for n, t in _named(state) if isinstance(t, torch.Tensor) and t.device.type == "meta"}


def put_parts(state: Any, parts: Mapping[str, torch.Tensor]) -> Any:
    """The state with these tensors in their places."""
    leaves, spec = tree_flatten_with_path(state)
    return tree_unflatten([parts.get(_name(path), value) for path, value in leaves], spec)


class StateOnly:
    """A state that is saved as if it were a module's."""

    def __init__(self, state: Mapping[str, torch.Tensor]):
        self._state = state

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self._state


def read_whole_state(file: Path) -> Any:
    """A state of whole tensors, also where parts of them lie beside the file."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    missing = missing_parts(state)
    if not missing:
        return state
    from learner.training.sharded_state import read_shards  # torch.distributed

    found = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in missing.items()}
    read_shards(file.with_suffix(""), found)
    return put_parts(state, found)


def _named(state: Any) -> Iterator[tuple[str, Any]]:
    return ((_name(path), value) for path, value in tree_flatten_with_path(state)[0])


def _name(path: tuple[Any, ...]) -> str:
    """Keys and numbers of the way to a value, such as `optimizer.state.3.exp_avg`."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path)
