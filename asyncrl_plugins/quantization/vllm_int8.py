"""int8 weights for vLLM's online quantisation, which has a kernel for them and no method that makes them.

The layout is that of the checkpoints which that kernel is for: a scale for each output channel, and inputs that are
rounded, too, with a scale for each token. vLLM's processes import this file.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.kernels.linear import init_int8_linear_kernel  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.quantization.online.base import (  # pyright: ignore[reportMissingImports]
    _ONLINE_LINEAR_METHODS,
)
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.quantization.utils.quant_utils import (  # pyright: ignore[reportMissingImports]
    kInt8StaticChannelSym,
)
from vllm.model_executor.utils import replace_parameter  # pyright: ignore[reportMissingImports]

from asyncrl_plugins.quantization.grid import channel_scales

MADE = "_already_called_process_weights_after_loading"
"""vLLM's mark of a layer that is quantised. A reload takes it away."""


class Int8LinearMethod(OnlineLinearBase):
    """A linear layer whose weights are made int8 whenever all of them have been loaded, at a reload, too."""

    activation_quant_key = None

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        super().create_weights(layer, *arguments, **named)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, MADE, False):
            return
        weight = self.get_weight_for_quantization(layer)
        scales = channel_scales(weight, "int8")
        replace_parameter(layer, "weight", (weight.float() / scales).round_().to(torch.int8))
        replace_parameter(layer, "weight_scale", scales)
        self.kernel.process_weights_after_loading(layer)
        # On a CPU the kernel holds the bare address of these. A reload copies them to where the first ones are, and
        # would free them.
        self.scales = layer.weight_scale
        setattr(layer, MADE, True)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.apply_weights(layer, x, bias)


_ONLINE_LINEAR_METHODS[kInt8StaticChannelSym] = Int8LinearMethod
