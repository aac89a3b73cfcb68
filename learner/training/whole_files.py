"""Files of a model whose ranks have parts of it, as those of a whole one: rank 0 gathers them in host memory, tensor by
tensor, and writes them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_model
from torch import nn

from asyncrl.models.export import export_model
from asyncrl.models.gathered_units import is_adapted
from asyncrl.models.host_copies import host_copy
from asyncrl.models.published import published_parts
from learner.ranks.group import Ranks
from learner.training.state_file import StateOnly, read_whole_state
from learner.training.train_engine import Write


class WholeFiles:
    """What is gathered is a copy: training may go on before it is written."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def take(self, model: Any) -> None:
        """Remember the model as it was loaded: it is whole now."""
        self._model = model
        self.dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        self._is_adapted = is_adapted(model)
        self._skeleton = without_weights(model) if hasattr(model, "save_pretrained") and not self._is_adapted else None

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors, tied weights once; all ranks take them all, one at a time."""
        raise NotImplementedError

    def model_files(self, processor: Any, *, copies: bool) -> Write:
        whole = self._gather()
        return self._written(lambda folder: export_model(self._skeleton, processor, folder, whole))

    def weights_files(self, name: str, *, copies: bool) -> Write:
        weights = cast(nn.Module, StateOnly(self._gather()))
        return self._written(lambda folder: save_model(weights, str(folder / name)))

    def state_files(self, state: Any, name: str, *, copies: bool) -> Write:
        """The state has what `kept` has made."""
        return self._written(lambda folder: torch.save(state, folder / name))

    def read_state(self, file: Path) -> Any:
        return read_whole_state(file)

    def kept(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy in the host memory of the rank that writes; elsewhere nothing of it is kept."""
        return host_copy(whole) if self._ranks.leads else torch.empty(0)

    def _written(self, write: Write) -> Write:
        return write if self._ranks.leads else lambda _: None

    def _gather(self) -> dict[str, torch.Tensor]:
        """All weights on the rank that writes, under all their names; tied ones are one tensor."""
        whole = {name: self.kept(tensor) for name, tensor in self.whole_weights()}
        names = {id(t): name for name, t in published_parts(self._model)}
        return {name: whole[names[id(t)]] for name, t in self._model.state_dict(keep_vars=True).items()}


def without_weights(model: Any) -> Any:
    """The same model on the meta device: it knows how its family's files are written."""
    config = copy(model.config)
    with torch.device("meta"):
        skeleton = type(model)._from_config(config, dtype=model.dtype)
    skeleton.generation_config = model.generation_config
    skeleton._weight_conversions = getattr(model, "_weight_conversions", None)  # names in the files that it came from
    return skeleton
