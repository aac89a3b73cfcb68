"""A nested state in one file of torch, of which large tensors may lie in files beside it.

In the place of such a tensor the file has an empty one on the meta device, with its shape and dtype; its name is its
path in the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from asyncrl.errors import UserError

OWN_SUFFIX = ".own"
"""Suffix of the folder with files in an engine's own format, beside the file of the state that they lack."""
OWN_FORMAT = "own_format"
"""Key of a state that lies in an engine's own format: `name` of the engine, `placement` (settings by key that alone go
on from it), and `portable`, the setting by which the engine writes what any engine reads."""


def is_portable(checkpoint: Path) -> bool:
    """Whether any engine goes on from a checkpoint: it is not in the own format of one."""
    return not any(checkpoint.glob(f"*{OWN_SUFFIX}"))


def check_portable(state: Mapping[str, Any], folder: Path, here: Mapping[str, object] | None = None) -> None:
    """Raise UserError for a checkpoint in an engine's own format, unless it is of the settings `here`, by key."""
    found = state.get(OWN_FORMAT)
    if found is None or found["placement"] == here:
        return
    settings = " ".join(f"{key}={value}" for key, value in found["placement"].items())
    raise UserError(
        f"{folder} is in {found['name']}'s own format, from which only these settings go on: {settings}. Resume once, "
        f"for one more step at least (trainer.max_steps), with them and {found['portable']}: any engine goes on from "
        f"the checkpoint after it. Or start a new run from it: asyncrl export {folder.parent.parent} TARGET, then "
        "model.path=TARGET"
    )


def named_values(state: Any) -> Iterator[tuple[str, Any]]:
    return ((_name(path), value) for path, value in tree_flatten_with_path(state)[0])


def missing_parts(state: Any) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of the tensors that lie elsewhere."""
    return {n: t for n, t in named_values(state) if isinstance(t, torch.Tensor) and t.device.type == "meta"}


def put_parts(state: Any, parts: Mapping[str, Any]) -> Any:
    """The state with these in the places of the tensors that lie elsewhere."""
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
    from learner.training.sharded_state import stored_tensors  # torch.distributed

    stored = stored_tensors(file.with_suffix(""), missing)
    return put_parts(state, {name: tensor.whole() for name, tensor in stored.items()})


def _name(path: tuple[Any, ...]) -> str:
    """Keys and numbers of the way to a value, such as `optimizer.state.3.exp_avg`."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", step))) for step in path)
