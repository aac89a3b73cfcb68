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
ALIGNMENT = 16
"""Rows of a bias begin at multiples of so many elements: CUDA's memory-efficient kernel asks for 8, else it copies."""


@dataclass(frozen=True)
class AttentionBatch:
    """Groups of similar length, attended to in one call."""

    gather: torch.Tensor
    """[G, L] place in the packed sequence of each padded token; padding points at the group's first token."""
    bias: torch.Tensor
    """[G, 1, L, L] in the model's dtype, added to the scores: 0 where the row's token attends to the column's, else
    -inf. Every layer takes this one as it is, where torch would make one of a bool mask in each."""


@dataclass(frozen=True)
class SharedPrefixLayout:
    """Attention pattern of a packed sequence of T tokens."""

    batches: tuple[AttentionBatch, ...]
    places: torch.Tensor
    """[T] where each packed token is found among the padded tokens of all batches, one batch after another."""


def make_layout(
    groups: Sequence[tuple[int, Sequence[int]]], device: torch.device, dtype: torch.dtype
) -> SharedPrefixLayout:
    """Layout of packed groups, each given as (prompt length, completion lengths), for a model of `dtype`."""
    lengths = [prompt + sum(completions) for prompt, completions in groups]
    starts = np.cumsum([0, *lengths[:-1]])
    places = np.empty(sum(lengths), np.int64)
    batches: list[AttentionBatch] = []
    padded = 0
    for members in _similar(lengths):
        longest = max(lengths[i] for i in members)
        gather = np.repeat(starts[members][:, None], longest, axis=1)
        for row, i in enumerate(members):
            own = np.arange(lengths[i])
            gather[row, : lengths[i]] += own
            places[starts[i] + own] = padded + row * longest + own
        padded += gather.size
        bias = attention_bias([groups[i] for i in members], longest, device, dtype)
        batches.append(AttentionBatch(torch.from_numpy(gather).to(device), bias))
    return SharedPrefixLayout(tuple(batches), torch.from_numpy(places).to(device))


def attention_bias(
    groups: Sequence[tuple[int, Sequence[int]]], length: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """[G, 1, L, L], see `AttentionBatch.bias`, of groups padded to L tokens.

    It is made on the device and in place. Padding attends to what is before it, so that its softmax is defined.
    """
    width = -(-length // ALIGNMENT) * ALIGNMENT
    bias = torch.full((len(groups), 1, length, width), -torch.inf, dtype=dtype, device=device).triu_(1)
    for rows, (prompt, completions) in zip(bias[:, 0], groups, strict=True):
        end = prompt
        for completion in completions:
            start, end = end, end + completion
            rows[end:, start:end].fill_(-torch.inf)  # later completions do not see this one
    return bias[..., :length]


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Batch groups of similar length, by their indices, shortest first."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if parts and lengths[i] <= WASTE * lengths[parts[-1][0]]:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


class _Pad(torch.autograd.Function):
    """Copies packed tokens [T, ...] into each batch's groups, [G, L, ...].

    A token is read once besides the padding, to which nothing that counts attends: its gradient is at one place. Torch
    cannot know, and would add up by sorting all indices.
    """

    @staticmethod
    def forward(ctx: Any, layout: SharedPrefixLayout, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.layout = layout
        return tuple(
            packed.index_select(0, batch.gather.flatten()).unflatten(0, batch.gather.shape) for batch in layout.batches
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _joined(grad_outputs).index_select(0, ctx.layout.places)


class _Unpad(torch.autograd.Function):
    """Puts the tokens of all batches' groups, [G, L, ...] each, back into their packed order, [T, ...]."""

    @staticmethod
    def forward(ctx: Any, layout: SharedPrefixLayout, *groups: torch.Tensor) -> torch.Tensor:
        ctx.layout = layout
        return _joined(groups).index_select(0, layout.places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = grad_outputs
        shapes = [batch.gather.shape for batch in ctx.layout.batches]
        padded = gradient.new_zeros((sum(shape.numel() for shape in shapes), *gradient.shape[1:]))
        padded.index_copy_(0, ctx.layout.places, gradient)
        parts = padded.split([shape.numel() for shape in shapes])
        return None, *(part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True))


def _joined(groups: Sequence[torch.Tensor]) -> torch.Tensor:
    """[G, L, ...] each -> all of their tokens."""
    flat = [each.flatten(0, 1) for each in groups]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


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
    # No CUDA kernel takes both a bias and shared key heads: torch would fall back to whole score matrices.
    repeats = 1 if query.device.type == "cpu" else query.shape[1] // key.shape[1]
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H, D]
    padded = zip(shared_prefix.batches, *(_Pad.apply(shared_prefix, tensor) for tensor in packed), strict=True)
    outputs: list[torch.Tensor] = []
    for batch, q, k, v in padded:
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        attended = F.scaled_dot_product_attention(
            *(tensor.transpose(1, 2) for tensor in (q, k, v)),
            attn_mask=batch.bias,
            scale=scaling,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        outputs.append(attended.transpose(1, 2))
    return _Unpad.apply(shared_prefix, *outputs)[None], None


def register() -> None:
    """Make the attention known to transformers; the mask comes with the layout, so none is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
    AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, lambda *args, **kwargs: None)
