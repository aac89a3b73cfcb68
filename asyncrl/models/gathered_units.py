"""Units of a model that fully sharded training gathers one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def is_adapted(model: nn.Module) -> bool:
    """PEFT leaves its configuration there; models without adapters do not import PEFT."""
    return hasattr(model, "peft_config")


def gathered_units(model: Any) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """Modules that are gathered by themselves, inner ones first, and the dtype that they compute in: layers, what keeps
    fp32 in a 16-bit model (a value head), and last the model with all the rest. None: each weight computes in the dtype
    that it has, as those of an adapted model do. A parameter belongs to the first unit that has it."""
    adapted = is_adapted(model)
    layers = set(model._no_split_modules or ())  # with those of the vision tower
    for module in reversed(list(model.modules())):
        own = [p.dtype for p in module.parameters(recurse=False)]
        if module is model or type(module).__name__ in layers:
            yield module, None if adapted else model.dtype
        elif not adapted and torch.float32 in own and model.dtype != torch.float32:
            yield module, torch.float32
