"""Needs of weights of 8 bits in vLLM, of the model and of the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncrl.config.schema import RunConfig
from asyncrl.devices.device import resolve_dtype

FIRST_CAPABILITY = {"fp8": (8, 9), "int8": (7, 5)}
"""Compute capability of the first GPUs on which vLLM multiplies such numbers, by rollout.quantization."""


def problems(config: RunConfig, *, cuda: bool) -> Iterator[str]:
    """Requirements of weights of 8 bits: model and GPU."""
    quantization = config.rollout.quantization
    setting = f"rollout.quantization is {quantization}"
    if resolve_dtype(config).model.dtype == "float32":
        yield (
            f"{setting} and model.dtype is float32, and vLLM quantises models of 16 bits. Set model.dtype=bfloat16, or "
            "rollout.engine=hf"
        )
    if quantization == "int8" and config.model.lora.rank and not cuda:
        yield (
            f"{setting} and model.lora.rank is {config.model.lora.rank}, and on a CPU vLLM packs int8 weights away "
            "from where its adapters look for them. Set rollout.quantization=fp8, or rollout.engine=hf"
        )
    first = FIRST_CAPABILITY[quantization]
    found = torch.cuda.get_device_capability() if cuda else first
    if found < first:
        yield (
            f"{setting}, and this GPU has compute capability {found[0]}.{found[1]}: vLLM's {quantization} products "
            f"begin with {first[0]}.{first[1]}. Leave rollout.quantization out"
        )
