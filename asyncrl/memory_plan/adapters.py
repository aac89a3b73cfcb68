"""Low-rank adapters on a model without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncrl.config.model import ModelConfig
from asyncrl.models.loading import CONNECTOR_NAMES, VISION_TOWER_NAMES


def with_adapters(model: Any, config: ModelConfig) -> Any:
    """The model itself with its adapters, if it gets any, and everything else frozen."""
    lora = config.lora
    if not lora.rank:
        return model
    from peft import LoraConfig, get_peft_model

    output = model.get_output_embeddings()
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    if not lora.vision_tower:
        names = [n for n in names if not any(part in VISION_TOWER_NAMES + CONNECTOR_NAMES for part in n.split("."))]
    wanted = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    targets = names if wanted == "all-linear" else wanted
    get_peft_model(model, LoraConfig(r=lora.rank, lora_alpha=lora.alpha or 2 * lora.rank, target_modules=targets))
    return model.to(torch.device("meta"))
