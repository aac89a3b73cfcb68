"""Parts of a vision-language model, by the names of its parameters, and those that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError

Part = Literal["vision_tower", "connector", "language_model"]
VISION_TOWER_NAMES = ("visual", "vision_tower", "vision_model")
"""Attribute names under which transformers' VLMs keep the vision tower."""
CONNECTOR_NAMES = ("merger", "connector", "multi_modal_projector", "image_newline")
"""Parts that map vision features to the language model, also where they are inside the tower."""


def part_of(path: Sequence[str]) -> Part:
    """Return the part that a parameter or layer belongs to, by its name cut at the dots."""
    if any(name in CONNECTOR_NAMES for name in path):
        return "connector"
    return "vision_tower" if any(name in VISION_TOWER_NAMES for name in path) else "language_model"


def freeze_parts(model: nn.Module, config: ModelConfig) -> None:
    """Take the parts that `model.freeze_*` name out of training. Raises UserError where nothing is left."""
    frozen = config.frozen_parts
    for name, parameter in model.named_parameters():
        if part_of(name.split(".")) in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        settings = ", ".join(f"model.freeze_{part}" for part in frozen)
        raise UserError(f"nothing of the model in {config.path} is trained with {settings}: set one of them to false")
