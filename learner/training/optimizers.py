"""The optimisers of `learner.optimizer`: torch's AdamW, and bitsandbytes' with moments of 8 bits (arXiv 2110.02861)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.parts import SMALLEST_8BIT
from asyncrl.config.service_sections import OptimConfig, Optimizer
from asyncrl.errors import UserError
from asyncrl.models.parts import part_of
from asyncrl.run_folder.contents import export_advice


def make_optimizer(kind: Optimizer, groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """Raises UserError where the package of `adamw_8bit` is missing."""
    if kind == "adamw_8bit":
        if find_spec("bitsandbytes") is None:
            raise UserError(
                "learner.optimizer is adamw_8bit, and the package bitsandbytes is not installed here: pip install "
                "'asyncrl[learner-8bit]', or set learner.optimizer=adamw"
            )
        from bitsandbytes.optim.adamw import AdamW8bit

        return AdamW8bit(groups, lr=optim.lr, betas=optim.betas, min_8bit_size=SMALLEST_8BIT)
    # Fused is one pass over memory: unfused, torch takes 4 bytes a parameter more on a GPU, and loops over DTensors.
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=True)


def check_same_moments(state: Mapping[str, Any], kind: Optimizer, folder: Path) -> None:
    """Raise UserError unless a checkpoint's moments are those of the optimiser here."""
    for values in state["state"].values():
        saved = "adamw" if "exp_avg" in values else "adamw_8bit"
        if saved != kind:
            raise UserError(
                f"{folder} holds the moments of learner.optimizer={saved}, and it is {kind} now. Set it to {saved}, or "
                f"start a new run from it: {export_advice(folder.parent.parent)}"
            )


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
