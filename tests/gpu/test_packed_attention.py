"""Attention of packed groups by variable-length flash attention, against exact attention over whole score matrices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asyncrl.attention.prefix_kernels import Group
from asyncrl.attention.shared_prefix import make_layout, shared_prefix_attention
from tests.unit.asyncrl.test_shared_prefix import GROUPS, LONG, visible

STEPS: Sequence[Group] = [(790, (256,) * 8), (130, (1, 64, 200)), (40, (30,))]
ABOVE = 2.0
"""Largest error in proportion to that of torch's own attention in the same dtype, as on a CPU. An H100 showed 1.65
where heads of 10 are padded to 16, and at most 1.5 elsewhere."""


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(16, 2, 128), (4, 4, 80), (4, 1, 10)])
@pytest.mark.parametrize("groups", [GROUPS, LONG, STEPS], ids=["several", "long", "steps"])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
)
def test_it_is_as_near_to_exact_attention_as_torchs_own(
    device: str, groups: Sequence[Group], heads: int, key_heads: int, width: int
) -> None:
    if device == "cpu" and groups is STEPS:
        pytest.skip("the size of a GPU's step")
    mask = visible(groups).to(device)
    layout = make_layout(groups, torch.device(device), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, h, len(mask), width, generator=generator) for h in (heads, key_heads, key_heads)]
    direction = torch.randn(1, len(mask), heads, width, generator=generator).to(device)

    def with_gradients(dtype: torch.dtype, *, packed: bool) -> list[torch.Tensor]:
        inputs = [tensor.bfloat16().to(device, dtype).requires_grad_() for tensor in drawn]
        if packed:
            out, _ = shared_prefix_attention(nn.Module(), *inputs, None, shared_prefix=layout)
        else:
            out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        return [out, *torch.autograd.grad(out, inputs, direction.to(dtype))]

    exact = with_gradients(torch.float64, packed=False)
    ours, torchs = with_gradients(torch.bfloat16, packed=True), with_gradients(torch.bfloat16, packed=False)
    for name, whole, mine, theirs in zip(("output", "dq", "dk", "dv"), exact, ours, torchs, strict=True):
        error, usual = (
            float((each.double() - whole).detach().norm() / whole.detach().norm()) for each in (mine, theirs)
        )
        assert error <= ABOVE * usual, f"{name}: relative error {error:.2g}, torch's own {usual:.2g}"
