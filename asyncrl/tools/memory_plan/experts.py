"""What a grouped matrix product of a mixture of experts allocates, for tensors without memory.

torch's own stand-in for the meta device takes bfloat16 only; the kernels of CPU and CUDA take float32 too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def grouped_experts() -> Iterator[None]:
    """Until it is left, `grouped_mm` is the stand-in below, for every caller in this process."""
    with patch("torch.nn.functional.grouped_mm", _multiply):
        yield


def _multiply(tokens: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """[S, D] tokens, sorted by expert, and [E, D, F] weights -> [S, F]."""
    return _GroupedProduct.apply(tokens, weights)  # pyright: ignore[reportReturnType]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weights)
        return tokens.new_empty((len(tokens), weights.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tuple(
            torch.empty_like(tensor) if needed else None
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        )
