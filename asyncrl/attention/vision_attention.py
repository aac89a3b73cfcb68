"""Attention of vision towers that take the patches of all images, or windows of them, one after another.

transformers' own form for PyTorch's attention is a call for each image or window and, in each layer, a wait for the
device, which is asked for their lengths: thousands of calls a layer for a batch of images in windows. Those of one
length are one call here.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

BY_LENGTH = "asyncrl_by_length_as_flash"
"""Name under which transformers finds it. With `flash` in it a tower gives one call all lengths (transformers 5.19)."""
MOST_SEQUENCES = 32_768
"""Most sequences of one call: kernels of a GPU count them in 16 bits."""
_LAYOUTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Layouts by the tensor of bounds, which all layers of a pass share."""


@dataclass(frozen=True)
class _Layout:
    """Calls of attention and their arguments."""

    lengths: list[int]
    """Lengths of the sequences of each call."""
    places: list[torch.Tensor]
    """Tokens [n * length] of each call; none where there is one call, of all in their order."""
    back: torch.Tensor | None
    """[T] where each token is in what the calls give, one behind the other."""


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
    if cu_seq_lens_q not in _LAYOUTS:
        _LAYOUTS[cu_seq_lens_q] = _layout(cu_seq_lens_q, query.device)
    layout: _Layout = _LAYOUTS[cu_seq_lens_q]

    def attend(length: int, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """[H, n * length, D] each -> [n * length, H, D]"""
        sequences = (each.unflatten(1, (-1, length)).transpose(0, 1) for each in tensors)
        out = F.scaled_dot_product_attention(*sequences, dropout_p=dropout, scale=scaling)  # [n, H, length, D]
        return out.transpose(1, 2).flatten(0, 1)

    tensors = query[0], key[0], value[0]
    if layout.back is None:
        return attend(layout.lengths[0], tensors)[None], None
    calls = zip(layout.lengths, layout.places, strict=True)
    parts = [attend(length, [each.index_select(1, places) for each in tensors]) for length, places in calls]
    return torch.cat(parts).index_select(0, layout.back)[None], None


def _layout(bounds: torch.Tensor, device: torch.device) -> _Layout:
    sequences = sorted((end - begin, begin) for begin, end in pairwise(bounds.tolist()) if end > begin)
    lengths: list[int] = []
    places: list[torch.Tensor] = []
    for length, group in groupby(sequences, key=lambda sequence: sequence[0]):
        for begins in torch.tensor([begin for _, begin in group]).split(MOST_SEQUENCES):
            lengths.append(length)
            places.append((begins[:, None] + torch.arange(length)).flatten())
    if len(lengths) == 1:
        return _Layout(lengths, [], None)
    return _Layout(lengths, [each.to(device) for each in places], torch.cat(places).argsort().to(device))
