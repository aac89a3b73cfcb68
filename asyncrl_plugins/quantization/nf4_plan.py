"""Layers in 4 bits in a memory plan: bytes of their weights, and what they take in a pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from asyncrl_plugins.quantization.nf4 import BLOCK, BLOCK_OF_SCALES, base_layers

TABLE_BYTES = 4 * (16 + 256)
"""Values of 4 bits and of scales in 8 bits, of all layers."""


class _Dequantising(torch.autograd.Function):
    """A product with a weight that is dequantised for it, in both directions."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return nn.functional.linear(states, _dequantizing(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient @ _dequantizing(ctx.weight), None, None


def _dequantizing(weight: torch.Tensor) -> torch.Tensor:
    """An empty weight, once its scales have been there in float32."""
    scales = weight.new_empty(-(-weight.numel() // BLOCK), dtype=torch.float32)
    whole = torch.empty_like(weight)
    del scales
    return whole


def planned(model: Any) -> int:
    """Let the layers of a model without weights take what those in 4 bits do in a pass with gradients. Returns the
    bytes by which the weights of these are fewer."""
    fewer = -TABLE_BYTES
    for name in base_layers(model):
        layer: Any = model.get_submodule(name)
        layer.forward = _stand_in(layer)
        fewer += layer.weight.nbytes - quantized_bytes(layer.weight.numel())
    return fewer


def quantized_bytes(weights: int) -> int:
    """Bytes of a layer's weights in 4 bits, with their scales, and the mean of these."""
    scales = -(-weights // BLOCK)
    return -(-weights // 2) + scales + 4 * -(-scales // BLOCK_OF_SCALES) + 4


def _stand_in(layer: nn.Linear) -> Any:
    def forward(states: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():  # an engine's, whose weights are whole
            return nn.functional.linear(states, layer.weight, layer.bias)
        return _Dequantising.apply(states, layer.weight, layer.bias).clone()  # PEFT's layer copies it, too

    return forward
