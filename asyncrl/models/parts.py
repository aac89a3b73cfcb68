"""Parts of a vision-language model, by the names of its parameters, and those that are not trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from asyncrl.config.sections import ModelConfig
from asyncrl.errors import UserError


def is_adapted(model: nn.Module) -> bool:
    """PEFT leaves its configuration there; models without adapters do not import PEFT."""
    return hasattr(model, "peft_config")


def gathered_units(model: Any) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """Modules that are gathered by themselves, inner ones first, and the dtype that they compute in: layers, what keeps
    fp32 in a 16-bit model (a value head), and last the model with all the rest. None: each weight computes in the dtype
    that it has, as those of an adapted model do but for its modules that are trained whole. A parameter belongs to the
    first unit that has it."""
    adapted = is_adapted(model)
    layers = set(model._no_split_modules or ())  # with those of the vision tower
    for name, module in reversed(list(model.named_modules())):
        own = [p.dtype for p in module.parameters(recurse=False)]
        if name.rpartition(".")[0].endswith(".modules_to_save"):  # trained whole beside an adapter
            yield module, model.dtype
            continue
        if module is model or type(module).__name__ in layers:
            yield module, None if adapted else model.dtype
        elif not adapted and torch.float32 in own and model.dtype != torch.float32:
            yield module, torch.float32


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


def trains_language_model(model: nn.Module) -> bool:
    """Whether a parameter of the language model, or of an adapter on it, is trained."""
    return any(p.requires_grad and part_of(name.split(".")) == "language_model" for name, p in model.named_parameters())


def freeze_parts(model: nn.Module, config: ModelConfig) -> None:
    """Take the parts that `model.freeze_*` name out of training. Raises UserError where nothing is left."""
    frozen = config.frozen_parts
    for name, parameter in model.named_parameters():
        if part_of(name.split(".")) in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        settings = ", ".join(f"model.freeze_{part}" for part in frozen)
        raise UserError(f"nothing of the model in {config.path} is trained with {settings}: set one of them to false")


def checkpoint_layers(model: Any, layers: bool | int) -> None:
    """Let layers be computed again in the backward pass: all of them, or of the language model the first `layers`
    alone. It frees what the last ones keep before it computes the first ones again."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # by which a frozen tower would be computed again, and have gradients
    names = set(model._no_split_modules or ())
    found = [(name.split("."), module) for name, module in model.named_modules() if type(module).__name__ in names]
    text = [module for path, module in found if part_of(path) == "language_model"]
    for layer in text[len(text) if layers is True else layers :]:
        layer.gradient_checkpointing = False
