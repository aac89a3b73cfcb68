"""Low-rank adapters on a model without memory."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.config.model import ModelConfig
from asyncrl.models.adapter_targets import resolve_adapter
from asyncrl.models.lora import add_adapter


def with_adapters(model: Any, config: ModelConfig) -> Any:
    """The model itself with its adapters, if it gets any, and everything else frozen."""
    spec = resolve_adapter(config)
    if spec is None:
        return model
    add_adapter(model, spec)
    return model.to(torch.device("meta"))
