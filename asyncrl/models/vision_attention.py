"""Attention of vision towers that take the patches of all images, or windows of them, one after another.

transformers' own form for PyTorch's attention is a call for each image or window and, in each layer, a wait for the
device, which is asked for their lengths: thousands of calls a layer for a batch of images in windows. Those of one
length are one call here.
"""

from __future__ import annotations

from copy import copy
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

BY_LENGTH = "asyncrl_by_length_as_flash"
"""Name under which transformers finds it. With `flash` in it a tower gives one call all lengths (transformers 5.19)."""
MOST_SEQUENCES = 32_768
"""Of one call: kernels of a GPU count them in 16 bits."""
Layout = list[tuple[int, torch.Tensor]]
"""Lengths, and the places [n, length] of the sequences that have them."""
_LAYOUTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By the tensor of bounds, which all layers of a pass share."""


def attend_by_length(model: nn.Module) -> None:
    """Let the model's vision tower attend so, if it is of that kind (Qwen2-VL, Qwen2.5-VL, Qwen3-VL)."""
    from transformers import AttentionInterface

    AttentionInterface.register(BY_LENGTH, vision_attention)
    vision: Any = getattr(model.config, "vision_config", None)
    if hasattr(vision, "temporal_patch_size"):  # flat patches
        own: Any = copy(vision)  # the model's stays as it is: models are made by it elsewhere
        own._attn_implementation = BY_LENGTH
        for module in model.modules():
            if getattr(module, "config", None) is vision:
                module.config = own


def vision_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value [1, H, T, D], bounds [sequences + 1] of what attends to itself -> [1, T, H, D]."""
    assert attention_mask is None
    layout = _layout(cu_seq_lens_q, query.device)
    parts: list[torch.Tensor] = []
    for length, places in layout:
        whole = len(layout) == 1  # nothing to gather
        sequences = (
            (each[0] if whole else each[0].index_select(1, places)).unflatten(1, (-1, length)).transpose(0, 1)
            for each in (query, key, value)
        )
        out = F.scaled_dot_product_attention(*sequences, dropout_p=dropout, scale=scaling)  # [n, H, length, D]
        parts.append(out.transpose(1, 2).flatten(0, 1))
    if len(parts) == 1:
        return parts[0][None], None
    back = torch.cat([places for _, places in layout]).argsort()
    return torch.cat(parts).index_select(0, back)[None], None


def _layout(bounds: torch.Tensor, device: torch.device) -> Layout:
    if bounds not in _LAYOUTS:
        ends = bounds.tolist()
        sequences = sorted((end - begin, begin) for begin, end in pairwise(ends) if end > begin)
        layout: Layout = []
        for length, group in groupby(sequences, key=lambda sequence: sequence[0]):
            begins = torch.tensor([begin for _, begin in group])
            for some in begins.split(MOST_SEQUENCES):
                layout.append((length, (some[:, None] + torch.arange(length)).flatten().to(device)))
        _LAYOUTS[bounds] = layout
    return _LAYOUTS[bounds]
