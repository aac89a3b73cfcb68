"""Checkpoint files of a model on several ranks, each of which writes its parts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

from asyncrl.errors import UserError
from asyncrl.models.export import export_model
from asyncrl.models.parts import is_adapted
from asyncrl.models.published import published_parts
from learner.ranks.group import Ranks
from learner.training.sharded_state import (
    Part,
    Stored,
    joined_tensors,
    kept,
    stored_tensors,
    write_parts,
)
from learner.training.train_engine import Write


class ShardedFiles:
    """Common base of the placements over several ranks."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def take(self, model: Any) -> None:
        """Remember the model as it was loaded: it is whole now."""
        self._model = model
        self.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        self.is_adapted = is_adapted(model)
        self._skeleton = _without_weights(model) if hasattr(model, "save_pretrained") and not self.is_adapted else None
        self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))  # for the threads that write

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor | Part:
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
        return self._write_state(self._weights(copies=copies), str(Path(name).with_suffix(".pt")))

    def _weights(self, *, copies: bool) -> dict[str, torch.Tensor | Part]:
        """Weights, or this rank's parts of them, by their published names."""
        self.changed()
        return {n: kept(self.part_of(n, tensor), copies=copies) for n, tensor in published_parts(self._model)}

    @torch.no_grad()
    def load_weights(self, file: Path) -> None:
        self.changed()
        own = self._model.state_dict(keep_vars=True)
        if not file.exists():
            for name, given in self.read_state(file.with_suffix(".pt")).items():
                self._set(own[name], given)
            return
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                self._set(own[name], opened.get_tensor(name))

    def state_files(self, state: Any, name: str, *, copies: bool) -> Write:
        mine = tree_map_only((torch.Tensor, Part), lambda value: kept(value, copies=copies), state)
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


def _take_parts(state: Any) -> tuple[Any, dict[str, Part]]:
    """The state without its parts, as `state_file` has it, and these by their names."""
    parts = {name: value for name, value in named_values(state) if isinstance(value, Part)}
    outlines = tree_map_only(Part, lambda p: torch.empty(p.shape, dtype=p.elements.dtype, device="meta"), state)
    return outlines, parts


def _without_weights(model: Any) -> Any:
    """Model on the meta device: it knows how its family's files are written."""
    config = copy(model.config)
    with torch.device("meta"):
        skeleton = type(model)._from_config(config, dtype=model.dtype)
    skeleton.generation_config = model.generation_config
    skeleton._weight_conversions = getattr(model, "_weight_conversions", None)  # names in the files that it came from
    return skeleton


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
