"""Adapters for tests: a configuration that trains one, made-up versions, and the same policies as whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.models.loading import load_model
from asyncrl.models.lora import add_adapter, resolve_adapter
from asyncrl.models.published import published_tensors
from protocol.messages import AdapterSpec

Weights = dict[str, torch.Tensor]
MakeConfig = Callable[..., RunConfig]
CPU = torch.device("cpu")


def lora_config(make_config: MakeConfig, lora: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """A configuration with an adapter, of rank 4 unless `lora` says otherwise."""
    return make_config(**sections, model={"lora": {"rank": 4, **(lora or {})}})


def spec_of(config: RunConfig) -> AdapterSpec:
    spec = resolve_adapter(config.model)
    assert spec is not None
    return spec


def made_up_adapter(config: RunConfig, seed: int) -> Weights:
    """Published tensors of a policy that differs visibly from the base; of modules that are trained whole, too."""
    model = load_model(config.model, device=CPU)
    add_adapter(model, spec_of(config))
    random = torch.Generator().manual_seed(seed)
    made = {name: 0.2 * torch.randn(tensor.shape, generator=random) for name, tensor in published_tensors(model)}
    own = dict(published_tensors(model))
    return {n: t if ".lora_" in n else (own[n] + 0.2 * t).to(own[n].dtype) for n, t in made.items()}


def merged(config: RunConfig, adapter: Weights) -> Weights:
    """W + alpha / rank * B A of every layer and the modules that were trained whole, without PEFT: the published
    tensors of an ordinary model."""
    spec = spec_of(config)
    whole = {name: tensor.clone() for name, tensor in published_tensors(load_model(config.model, device=CPU))}
    for layer in spec.target_modules:
        a, b = (adapter[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB")
        weight = whole[f"{layer}.weight"]
        whole[f"{layer}.weight"] = (weight + spec.alpha / spec.rank * (b @ a)).to(weight.dtype)
    trained = {name.removeprefix("base_model.model."): tensor for name, tensor in adapter.items()}
    return whole | {name: tensor for name, tensor in trained.items() if name in whole}
