"""Weights on a grid of 8 bits: what weight-only quantisation makes of them, in the dtype that they have.

The scale of an output channel is its largest magnitude over the grid's. It is never kept: a version is rounded by its
own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from asyncrl.models.parts import part_of

Rounding = Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[tuple[str, torch.Tensor]]]
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Largest number of the grid: float8_e4m3fn's, and int8's without -128."""
SCALE_BYTES = 4
"""A scale's, of each output channel, where an engine holds the weights in 8 bits."""
SMALLEST_SCALE = 1 / (448 * 512)
"""vLLM's, for channels of zeros."""


def quantizable(model: Any) -> frozenset[str]:
    """Names of the weights that engines quantise: linear layers of the language model without its output layer.

    Vision tower, connector, embeddings and output layer are a small part of a large model, and rounding shows most in
    them.
    """
    output = model.get_output_embeddings()
    return frozenset(
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output and part_of(name.split(".")) == "language_model"
    )


def rounded(
    tensors: Iterable[tuple[str, torch.Tensor]], names: Collection[str], kind: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors, with the named ones on the grid of `kind`."""
    for name, tensor in tensors:
        yield name, on_grid(tensor, kind) if name in names else tensor


def channel_scales(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """[out, in] -> [out, 1] fp32: the largest magnitude of each row over the grid's."""
    return (weight.float().abs().amax(-1, keepdim=True) / LARGEST[kind]).clamp_min(SMALLEST_SCALE)


def on_grid(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """[out, in], each row the nearest numbers that its scale times the grid has, rounded to the dtype of `weight`."""
    scales = channel_scales(weight, kind)
    steps = (weight.float() / scales).clamp_(-LARGEST[kind], LARGEST[kind])
    steps = steps.to(torch.float8_e4m3fn).float() if kind == "fp8" else steps.round_()
    return (steps * scales).to(weight.dtype)


# --- parts of the descriptions --------------------------------------------------------------------


def fp8(model: Any) -> Rounding:
    return _in_place(model, "fp8")


def int8(model: Any) -> Rounding:
    return _in_place(model, "int8")


@torch.no_grad()
def _in_place(model: Any, kind: str) -> Rounding:
    """Round the model's own weights. Returns the function for those of versions."""
    names = quantizable(model)
    for name in names:
        weight = model.get_parameter(name)
        weight.copy_(on_grid(weight, kind))
    return lambda tensors: rounded(tensors, names, kind)


def saved_bytes(model: Any) -> int:
    """Bytes by which the model's weights are smaller where an engine holds these in 8 bits."""
    held = [model.get_parameter(name) for name in quantizable(model)]
    return sum(weight.nbytes - weight.numel() - SCALE_BYTES * len(weight) for weight in held)
