"""Which linear layers get an adapter: `model.lora` resolved to full names, before any weights are loaded."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

from torch import nn

from asyncrl.config.model import LoraConfig, ModelConfig
from asyncrl.errors import UserError
from asyncrl.models.loading import CONNECTOR_NAMES, VISION_TOWER_NAMES, has_vision, skeleton
from protocol.messages import AdapterSpec


def resolve_adapter(config: ModelConfig) -> AdapterSpec | None:
    """None where the model itself is trained. Raises UserError for what no layer of the folder's model fits."""
    if not config.lora.rank:
        return None
    if find_spec("peft") is None:
        raise UserError(
            f"model.lora.rank is {config.lora.rank}, which needs the peft package on both sides. Install it: "
            "pip install 'asyncrl[learner,rollout]'"
        )
    model = skeleton(config)
    if config.lora.vision_tower and not has_vision(model.config):
        raise UserError(
            f"model.lora.vision_tower is true, but {config.path} reads text only. Set model.lora.vision_tower=false"
        )
    return AdapterSpec(
        rank=config.lora.rank,
        alpha=config.lora.effective_alpha,
        target_modules=tuple(_targets(model, config.lora)),
    )


def _targets(model: Any, lora: LoraConfig) -> list[str]:
    """Names in the order of the model."""
    output = model.get_output_embeddings()
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not output]
    allowed = layers if lora.vision_tower else [name for name in layers if not _sees(name)]
    wanted = lora.target_modules
    if wanted == "all-linear":
        return allowed
    if isinstance(wanted, str):
        _check(wanted, [n for n in layers if _fits(wanted, n)], allowed, layers)
        return [name for name in allowed if _fits(wanted, name)]
    for end in wanted:
        _check(end, [n for n in layers if _ends(end, n)], allowed, layers)
    if not wanted:
        raise UserError(f"model.lora.target_modules is empty. Name some of {_ends_of(allowed)}, or all-linear")
    return [name for name in allowed if any(_ends(end, name) for end in wanted)]


def _check(wanted: str, found: Collection[str], allowed: Collection[str], layers: Collection[str]) -> None:
    """Every name of the user's must choose some layer: a misspelt one among good ones would go unnoticed."""
    if not found:
        near = difflib.get_close_matches(wanted, sorted({n.rpartition(".")[2] for n in layers}), n=3, cutoff=0.5)
        fix = f"Did you mean [{', '.join(near)}]?" if near else f"There are {_ends_of(allowed)}"
        raise UserError(f"model.lora.target_modules: {wanted!r} fits no linear layer (an adapter needs one). {fix}")
    if not any(name in allowed for name in found):
        raise UserError(
            f"model.lora.target_modules: {wanted!r} fits only layers of the vision tower or connector, such as "
            f"{next(iter(found))}. Set model.lora.vision_tower=true and model.freeze_vision_tower=false, or name "
            f"layers of the language model: {_ends_of(allowed)}"
        )


def _fits(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as problem:
        raise UserError(
            f"model.lora.target_modules is {pattern!r}, no regular expression ({problem}). For ends of names write a "
            "list: [q_proj, v_proj]"
        ) from problem


def _ends(end: str, name: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _ends_of(names: Collection[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _sees(name: str) -> bool:
    """It belongs to the vision tower or the connector."""
    return any(part in VISION_TOWER_NAMES + CONNECTOR_NAMES for part in name.split("."))
