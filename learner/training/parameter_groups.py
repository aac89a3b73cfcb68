"""Groups of an optimiser's parameters: with and without decay, and for each part with a learning rate of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.service_sections import OptimConfig
from asyncrl.errors import UserError
from asyncrl.models.parts import part_of


def parameter_groups(names: Sequence[str], stepped: Sequence[torch.Tensor], optim: OptimConfig) -> list[dict[str, Any]]:
    """Group the tensors that are stepped, by their parameters' names. Norms and biases are not decayed."""
    rates = {"language_model": optim.lr, "vision_tower": optim.vision_tower_lr, "connector": optim.connector_lr}
    own = [part for part, rate in rates.items() if rate and part != "language_model"]
    groups: dict[tuple[str, bool], dict[str, Any]] = {
        (part, decays): {"params": [], "lr": rates[part], "weight_decay": optim.weight_decay if decays else 0.0}
        for part in ("language_model", *own)
        for decays in (True, False)
    }
    for name, tensor in zip(names, stepped, strict=True):
        part = part_of(name.split("."))
        groups[part if part in own else "language_model", tensor.ndim >= 2]["params"].append(tensor)
    return list(groups.values())


def check_same_groups(saved: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Raise UserError unless a checkpoint's groups are as large as ours: moments are kept by place."""
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, ours)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{folder} holds moments of groups of {sizes[0]} tensors, and here the optimiser's are of {sizes[1]}: "
            "other parts are trained, or have a learning rate of their own. Set model.freeze_*, vision_tower_lr and "
            "connector_lr of the optimiser to what the run was started with (0, or any other number)"
        )
