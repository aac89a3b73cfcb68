"""Attention for training on groups: the prompt of a group is computed once, its completions share it.

A packed sequence is `prompt, completion 1, completion 2, ...` per group, group after group. A completion token
attends to its group's prompt and to the earlier tokens of its own completion; nothing else. Each group then
costs `P + n*C` tokens instead of `n*(P + C)`, each image passes the vision tower once, and gradients are those
of the separate sequences (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

SHARED_PREFIX_ATTENTION = "asyncrl_shared_prefix"
"""Name under which transformers finds it (`attn_implementation`)."""


@dataclass(frozen=True)
class SharedPrefixLayout:
    """Where each group lies in the packed sequence, and who sees whom inside it."""

    spans: tuple[tuple[int, int], ...]
    """`[start, end)` of each group."""
    masks: tuple[torch.Tensor, ...]
    """Per group bool [L, L]: True where the row's token attends to the column's."""


def group_mask(prompt_length: int, completion_lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """[L, L] bool with L = prompt_length + sum(completion_lengths)."""
    # numpy: many small masks are made per step, and torch would wake its thread pool for each.
    segment = np.repeat(np.arange(len(completion_lengths) + 1), [prompt_length, *completion_lengths])
    visible = (segment[None, :] == 0) | (segment[None, :] == segment[:, None])
    return torch.from_numpy(np.tril(visible)).to(device)


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared_prefix: SharedPrefixLayout | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, L, D], key and value [1, Hkv, L, D] -> [1, L, H, D]."""
    assert shared_prefix is not None, "this model is prepared for packed groups: pass shared_prefix="
    assert dropout == 0.0, "dropout would make log-probs differ from the engine's"
    outputs = [
        F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for (start, end), mask in zip(shared_prefix.spans, shared_prefix.masks, strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the attention known to transformers; the mask comes with the layout, so none is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
    AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, lambda *args, **kwargs: None)
