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

from asyncrl.errors import UserError

SHARED_PREFIX_ATTENTION = "asyncrl_shared_prefix"
"""Name under which transformers finds it (`attn_implementation`)."""


WASTE = 1.3
"""Groups are attended to together if padding them to one length costs at most this factor of the shorter one's."""


@dataclass(frozen=True)
class AttentionBatch:
    """Groups of similar length, attended to in one call."""

    gather: torch.Tensor
    """[G, L] place in the packed sequence of each padded token; padding points at the group's first token."""
    scatter: torch.Tensor
    """[T] place among the G*L padded tokens of each real token, group after group."""
    mask: torch.Tensor
    """[G, 1, L, L] bool: True where the row's token attends to the column's."""


@dataclass(frozen=True)
class SharedPrefixLayout:
    """Attention pattern of a packed sequence."""

    batches: tuple[AttentionBatch, ...]
    order: torch.Tensor
    """[packed] where each packed token is found in the batches' outputs, one after another."""


def make_layout(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> SharedPrefixLayout:
    """Layout of packed groups, each given as (prompt length, completion lengths), in their packed order."""
    lengths = [prompt + sum(completions) for prompt, completions in groups]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    batches: list[AttentionBatch] = []
    packed: list[np.ndarray] = []
    for members in _similar(lengths):
        longest = max(lengths[i] for i in members)
        gather = np.repeat(starts[members][:, None], longest, axis=1)
        mask = np.zeros((len(members), longest, longest), bool)
        scatter: list[np.ndarray] = []
        for place, i in enumerate(members):
            gather[place, : lengths[i]] = np.arange(starts[i], starts[i] + lengths[i])
            mask[place, : lengths[i], : lengths[i]] = group_mask(*groups[i])
            mask[place, lengths[i] :, 0] = True  # padding sees something, or its softmax would be NaN
            scatter.append(place * longest + np.arange(lengths[i]))
            packed.append(gather[place, : lengths[i]])
        batches.append(
            AttentionBatch(
                gather=torch.from_numpy(gather).to(device),
                scatter=torch.from_numpy(np.concatenate(scatter)).to(device),
                mask=torch.from_numpy(mask[:, None]).to(device),
            )
        )
    order = np.argsort(np.concatenate(packed))
    return SharedPrefixLayout(tuple(batches), torch.from_numpy(order).to(device))


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Batch groups of similar length, by their indices, shortest first."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if parts and lengths[i] <= WASTE * lengths[parts[-1][0]]:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


def group_mask(prompt_length: int, completion_lengths: Sequence[int]) -> np.ndarray:
    """[L, L] bool with L = prompt_length + sum(completion_lengths)."""
    segment = np.repeat(np.arange(len(completion_lengths) + 1), [prompt_length, *completion_lengths])
    visible = (segment[None, :] == 0) | (segment[None, :] == segment[:, None])
    return np.tril(visible)


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    shared_prefix: SharedPrefixLayout | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
    assert shared_prefix is not None, "this model is prepared for packed groups: pass shared_prefix="
    if dropout:
        raise UserError(
            f"this model's attention has dropout {dropout:g}: its log-probs would differ from the engine's. "
            "Set its dropout to 0 in the model folder's config.json"
        )
    if sliding_window is not None or softcap is not None:
        raise UserError(
            f"this model's attention uses sliding_window={sliding_window}, softcap={softcap}, which packed training "
            "does not support: its log-probs would be wrong. Use a model with full attention"
        )
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.device.type != "cpu":
        # No CUDA kernel takes both a mask and shared key heads: torch would fall back to whole score matrices.
        repeats = query.shape[1] // key.shape[1]
        key, value, grouped = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1), False
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    outputs: list[torch.Tensor] = []
    for batch in shared_prefix.batches:
        attended = F.scaled_dot_product_attention(
            *(tensor[batch.gather].transpose(1, 2) for tensor in (q, k, v)),
            attn_mask=batch.mask,
            scale=scaling,
            enable_gqa=grouped,
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1)[batch.scatter])
    return torch.cat(outputs)[shared_prefix.order][None], None


def register() -> None:
    """Make the attention known to transformers; the mask comes with the layout, so none is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
    AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, lambda *args, **kwargs: None)
