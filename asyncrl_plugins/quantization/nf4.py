"""The frozen base below adapters in 4 bits: NF4 with double quantisation (QLoRA, arXiv 2305.14314, sec. 3), by
bitsandbytes.

A weight is one of 16 quantiles of a normal distribution, times the largest magnitude of its block of 64. These
magnitudes have 8 bits, in blocks of 256 with a float32 scale each: 1/2 + 1/64 + 4/(64 · 256) = 0.516 bytes a weight.
The learner holds that, and dequantises a layer for each product with it. Engines hold the dequantised values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from asyncrl.errors import UserError
from asyncrl_plugins.quantization.grid import Rounding, quantizable

TYPE = "nf4"
BLOCK, BLOCK_OF_SCALES = 64, 256
"""Weights that share a scale, and scales that share one of float32 (bitsandbytes' own numbers)."""
BUFFERS = ("code", "absmax", "offset", "nested_code", "nested_absmax")
"""Names of what weights in 4 bits are dequantised by."""


def base_layers(model: Any) -> list[str]:
    """Names of the linear layers of the language model that are held in 4 bits, in the order of the model.

    Layers that compute more than a product, such as routers, keep their precision.
    """
    names = (name.removesuffix(".weight") for name in quantizable(model))
    plain = {name for name in names if type(model.get_submodule(name)).forward is nn.Linear.forward}
    return [name for name, _ in model.named_modules() if name in plain]


# --- in the learner -------------------------------------------------------------------------------


@torch.no_grad()
def held_by_learner(model: Any, device: torch.device) -> None:
    """Replace the layers of a model, which is on the CPU, by layers in 4 bits on `device`, one at a time. The rest
    follows."""
    _check_installed()
    names = base_layers(model)
    if not names:
        raise UserError(
            f"model.quantization is nf4, and models of the family {model.config.model_type} have no linear layers that "
            "could be quantised. Leave model.quantization out"
        )
    with _one_thread():
        for name in names:
            model.set_submodule(name, _in_4_bits(model.get_submodule(name), model.dtype, device))
    model.to(device)
    _let_scales_sleep([model.get_submodule(name) for name in names])
    _let_peft_see(model)


def _in_4_bits(layer: nn.Linear, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Layer of bitsandbytes with the weights of `layer`, whose products are in `dtype`."""
    library: Any = import_module("bitsandbytes.nn")
    made = library.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type=TYPE,
        device=torch.device("meta"),
    )
    weight = library.Params4bit(layer.weight.detach(), requires_grad=False, quant_type=TYPE, module=made)
    made.weight = weight.to(device)  # which quantises them
    made.bias = layer.bias
    # On CPUs with AVX512-BF16 a layer in eval mode would round its scales to 16 bits, and never have them back.
    made.support_avx512bf16_for_cpu = False
    return made


def _let_scales_sleep(layers: Sequence[Any]) -> None:
    """Make the scales buffers, which sleep and wake with a model, as attributes of a weight would not. Files do not
    have them.

    All layers share the two tables of values; on a CPU one of these would be the library's own.
    """
    states = [layer.weight.quant_state for layer in layers]
    tables = states[0].code, states[0].state2.code.clone()
    for layer, state in zip(layers, states, strict=True):
        state.code, state.state2.code = tables
        tensors = (state.code, state.absmax, state.offset, state.state2.code, state.state2.absmax)
        for name, tensor in zip(BUFFERS, tensors, strict=True):
            layer.register_buffer(name, tensor, persistent=False)


def _let_peft_see(model: Any) -> None:
    """Let PEFT put adapters of its own kind on these layers.

    It may remember that bitsandbytes is not there (`lean_imports.import_peft`), and would take a layer for a plain
    one.
    """
    from peft.import_utils import is_bnb_4bit_available, is_bnb_available

    model.is_loaded_in_4bit = True
    for remembered in (is_bnb_available, is_bnb_4bit_available):
        remembered.cache_clear()


# --- in engines and exports -----------------------------------------------------------------------


@torch.no_grad()
def nf4(model: Any) -> Rounding:
    """Give the model's own layers the values that the learner computes with. Returns the function for versions."""
    names = {f"{name}.weight" for name in base_layers(model)}
    for name in names:
        weight = model.get_parameter(name)
        weight.copy_(dequantized(weight))
    return lambda tensors: ((name, dequantized(tensor) if name in names else tensor) for name, tensor in tensors)


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """[out, in], the values of `weight` in 4 bits, in its own dtype."""
    _check_installed()
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    with _one_thread():
        return dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type=TYPE))


# --- the library ----------------------------------------------------------------------------------


def _check_installed() -> None:
    if find_spec("bitsandbytes") is None:
        raise UserError(
            "model.quantization is nf4, and the package bitsandbytes is not installed here: pip install "
            "'asyncrl[qlora]', or leave model.quantization out"
        )
    # Its advice is about a kernel for layers in eval mode, which is not used.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Quantise to the same bits in learner and engine: threads of a CPU would add up scales in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
