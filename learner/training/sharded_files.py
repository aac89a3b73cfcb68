"""Checkpoint files of a model on several ranks, each of which writes its parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

from asyncrl.models.export import export_model
from asyncrl.models.parts import is_adapted
from asyncrl.models.published import published_parts
from learner.ranks.group import Ranks
from learner.training.sharded_state import (
    Stored,
    TensorPart,
    joined_tensors,
    kept,
    stored_tensors,
    write_parts,
)

Write = Callable[[Path], None]
"""Writes files into a folder, later and on any thread; of several ranks all call it, and write their parts. What it
writes was copied if training goes on meanwhile (`copies`), else it is what the engine has by then."""


class ShardedFiles:
    """Common base of the placements over several ranks."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def take(self, model: Any) -> None:
        """Remember the model as it was loaded: it is whole now."""
        self._model = model
        named = (*model.state_dict().items(), *published_parts(model))
        self.dtypes = {name: tensor.dtype for name, tensor in named}
        self.is_adapted = is_adapted(model)
        self._skeleton = _without_weights(model) if hasattr(model, "save_pretrained") and not self.is_adapted else None
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))  # for the threads that write

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | TensorPart:
        """Part of a weight or a buffer that this rank saves."""
        raise NotImplementedError

    def changed(self) -> None:
        raise NotImplementedError

    def _set(self, tensor: torch.Tensor, given: torch.Tensor | Stored) -> None:
        """Set a weight of the model, or a buffer, to a saved one."""
        raise NotImplementedError

    def model_files(self, processor: Any, *, copies: bool) -> Write:
        names = {id(t): name for name, t in published_parts(self._model)}
        aliases = {name: names[id(t)] for name, t in self._model.state_dict(keep_vars=True).items()}
        state = self._weights(copies=copies)

        def write(folder: Path) -> None:
            """Parts first, and then rank 0 the folder, from a file of whole tensors on the disk."""
            parts_in = folder.with_name(f".{folder.name}.parts")
            if self._ranks.leads:
                shutil.rmtree(parts_in, ignore_errors=True)  # of a process that was killed
            dist.barrier(self._group)
            outlines, parts = _take_parts(state)
            write_parts(parts_in, parts, self._group, puts_together=True)
            if self._ranks.leads:
                whole = {**state, **{n: flat.view(outlines[n].shape) for n, flat in joined_tensors(parts_in)}}
                export_model(self._skeleton, processor, folder, {name: whole[own] for name, own in aliases.items()})
                shutil.rmtree(parts_in)

        return write

    def weights_files(self, name: str, *, copies: bool) -> Write:
        return self._write_state(self._weights(copies=copies), name)

    def _weights(self, *, copies: bool) -> dict[str, torch.Tensor | TensorPart]:
        """Weights, or this rank's parts of them, by their published names."""
        self.changed()
        return {n: kept(self.part_of(n, tensor), copies=copies) for n, tensor in published_parts(self._model)}

    @torch.no_grad()
    def load_weights(self, file: Path) -> None:
        self.changed()
        own = self._model.state_dict(keep_vars=True)
        for name, given in self.read_state(file).items():
            self._set(own[name], given)

    def state_files(self, state: Any, name: str, *, copies: bool) -> Write:
        mine = tree_map_only((torch.Tensor, TensorPart), lambda value: kept(value, copies=copies), state)
        return self._write_state(mine, name)

    def _write_state(self, state: Any, name: str) -> Write:
        """Rank 0 writes the file, and all write their parts beside it."""
        record, parts = _take_parts(state)

        def write(folder: Path) -> None:
            if parts:
                write_parts((folder / name).with_suffix(""), parts, self._group)
            if self._ranks.leads:
                torch.save(record, folder / name)

        return write

    def read_state(self, file: Path) -> Any:
        """The state, with a `Stored` in the place of a tensor that lies beside the file."""
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        missing = missing_parts(state)
        return put_parts(state, stored_tensors(file.with_suffix(""), missing)) if missing else state


def _take_parts(state: Any) -> tuple[Any, dict[str, TensorPart]]:
    """The state without its parts, as `state_file` has it, and these by their names."""
    parts = {name: value for name, value in named_values(state) if isinstance(value, TensorPart)}
    outlines = tree_map_only(TensorPart, lambda p: torch.empty(p.shape, dtype=p.elements.dtype, device="meta"), state)
    return outlines, parts


def _without_weights(model: Any) -> Any:
    """Model on the meta device: it knows how its family's files are written."""
    config = copy(model.config)
    with torch.device("meta"):
        skeleton = type(model)._from_config(config, dtype=model.dtype)
    skeleton.generation_config = model.generation_config
    skeleton._weight_conversions = getattr(model, "_weight_conversions", None)  # names in the files that it came from
    return skeleton


def named_values(state: Any) -> Iterator[tuple[str, Any]]:
    return ((_name(path), value) for path, value in tree_flatten_with_path(state)[0])


def missing_parts(state: Any) -> dict[str, torch.Tensor]:
    """Names, shapes and dtypes of the tensors that lie elsewhere."""
    return {n: t for n, t in named_values(state) if isinstance(t, torch.Tensor) and t.device.type == "meta"}


def put_parts(state: Any, parts: Mapping[str, Any]) -> Any:
    """The state with these in the places of the tensors that lie elsewhere."""
    leaves, spec = tree_flatten_with_path(state)
    return tree_unflatten([parts.get(_name(path), value) for path, value in leaves], spec)


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
