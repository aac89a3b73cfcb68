"""What a fused attention kernel allocates, for tensors without memory.

torch has no fused kernel for the meta device and would count the whole score matrix. These are the tensors that
CUDA's memory-efficient and flash kernels keep: the inputs, the output, one fp32 log-sum-exp per query, and of a
boolean mask its additive form in the inputs' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def fused_attention() -> Iterator[None]:
    """Until it is left, `scaled_dot_product_attention` is the stand-in below, for every caller in this process.

    A TorchFunctionMode would not do: it is off during a backward pass, and checkpointed layers run again there.
    """
    with patch("torch.nn.functional.scaled_dot_product_attention", _attend):
        yield


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    grouped = query.shape[-3] != key.shape[-3]
    assert attn_mask is None or not grouped, "with a mask and shared key heads torch computes whole score matrices"
    return _Attention.apply(query, key, value, attn_mask)  # pyright: ignore[reportReturnType]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        additive = mask if mask is None or mask.dtype != torch.bool else torch.empty_like(mask, dtype=query.dtype)
        ctx.save_for_backward(query, key, value, additive, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
