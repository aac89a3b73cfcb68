"""Attention of a decode step with grouped query heads: keys and values stay as they are in the cache.

transformers repeats both for each query head of a group where rows are padded, which copies the whole cache in every
layer, for every token. Here the query heads that share a key head become rows of one query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

GROUPED_ATTENTION = "asyncrl_grouped"
"""Name under which transformers finds it (`attn_implementation`)."""


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [N, H, M, D], key and value [N, Hkv, W, D] -> [N, M, H, D]. Of one token, M = 1, it is computed here."""
    rows, heads, tokens, _ = query.shape
    if tokens > 1 or heads == key.shape[1] or position_bias is not None:
        others |= {"scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    grouped = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    attended = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None


def for_decoding(model: Any, *, groups_queries: bool) -> Any:
    """Prepare a model, with this attention where its language part has torch's. Returns it.

    The output layer gets each prompt's last state in memory of its own: torch would copy the layer's weight for every
    row of a slice in bfloat16.
    """
    text = model.config.get_text_config(decoder=True)
    if groups_queries and text._attn_implementation == "sdpa":
        text._attn_implementation = GROUPED_ATTENTION
    model.get_output_embeddings().register_forward_pre_hook(lambda _, states: (states[0].contiguous(), *states[1:]))
    return model


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
AttentionMaskInterface.register(GROUPED_ATTENTION, sdpa_mask)
