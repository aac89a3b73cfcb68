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
"""Sequences are attended to together if padding them to one length costs at most this factor of the shorter one's."""
SLACK = 8
"""Tokens added to a completion's length where lengths are compared: many calls cost more than short padding."""
SPLIT_GAIN = 3
"""Completions are attended to apart from each other where that leaves at most one of so many scores. Below it a whole
group in one call is as fast (benchmarks/packed_attention.py)."""
QUERY_BLOCK = 32
"""Tokens whose scores torch's CPU kernel computes together: a shorter completion costs as much."""
ALIGNMENT = 16
"""Rows of a bias begin at multiples of so many elements: CUDA's memory-efficient kernel asks for 8, else it copies."""

Group = tuple[int, Sequence[int]]
"""Prompt length, completion lengths."""


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences of similar length, attended to in one call: whole groups, or their prompts, or completions apart."""

    gather: torch.Tensor
    """[S, L] place in the packed sequence of each padded token; padding points at the sequence's first token."""
    bias: torch.Tensor
    """[S, 1, L, K] in the model's dtype, added to the scores: 0 where the row's token attends to the column's, else
    -inf. Every layer takes this one as it is, where torch would make one of a bool mask in each. K is L, or for
    completions the length of the padded prompts and L."""
    prompts: int | None = None
    """For completions: place of the batch with their prompts, whose keys come before their own."""
    prompt_row: torch.Tensor | None = None
    """[S] each completion's prompt in that batch."""


@dataclass(frozen=True)
class SharedPrefixLayout:
    """Attention pattern of a packed sequence of T tokens."""

    batches: tuple[AttentionBatch, ...]
    places: torch.Tensor
    """[T] where each packed token is found among the padded tokens of all batches, one batch after another."""


def make_layout(groups: Sequence[Group], device: torch.device, dtype: torch.dtype) -> SharedPrefixLayout:
    """Layout of packed groups for a model of `dtype`.

    On a CPU completions are attended to apart where this saves most of the scores. On a GPU each group is one sequence:
    there it has not been measured, and memory is planned for that.
    """
    lengths = [prompt + sum(completions) for prompt, completions in groups]
    maker = _LayoutMaker(sum(lengths), device, dtype)
    starts = np.cumsum([0, *lengths[:-1]])
    whole = sum(_scores(length, length) for length in lengths)
    if device.type == "cpu" and _scores_apart(groups) * SPLIT_GAIN <= whole:
        maker.add_apart(groups, starts)
    else:
        for members in _similar(lengths):
            longest = max(lengths[i] for i in members)
            bias = attention_bias([groups[i] for i in members], longest, device, dtype)
            maker.add(starts[members], [lengths[i] for i in members], bias)
    return SharedPrefixLayout(tuple(maker.batches), torch.from_numpy(maker.places).to(device))


def _scores_apart(groups: Sequence[Group]) -> int:
    """Scores of prompts with themselves, and of completions with their prompt and themselves."""
    return sum(
        _scores(prompt, prompt) + sum(_scores(each, prompt + each) for each in completions)
        for prompt, completions in groups
    )


def _scores(queries: int, keys: int) -> int:
    return -(-queries // QUERY_BLOCK) * QUERY_BLOCK * keys


class _LayoutMaker:
    """Collects the batches of a layout, and where their padded tokens are."""

    def __init__(self, tokens: int, device: torch.device, dtype: torch.dtype):
        self.batches: list[AttentionBatch] = []
        self.places = np.empty(tokens, np.int64)
        self._device, self._dtype = device, dtype
        self._padded = 0

    def add(
        self,
        starts: np.ndarray,
        lengths: Sequence[int],
        bias: torch.Tensor,
        prompts: int | None = None,
        prompt_row: torch.Tensor | None = None,
    ) -> None:
        """Add the sequences that begin at `starts` [S] in the packed one."""
        longest = max(lengths)
        gather = np.repeat(starts[:, None], longest, axis=1)
        for row, length in enumerate(lengths):
            own = np.arange(length)
            gather[row, :length] += own
            self.places[starts[row] + own] = self._padded + row * longest + own
        self._padded += gather.size
        self.batches.append(AttentionBatch(torch.from_numpy(gather).to(self._device), bias, prompts, prompt_row))

    def add_apart(self, groups: Sequence[Group], starts: np.ndarray) -> None:
        """Add prompts of similar length, and after each such batch its groups' completions."""
        for members in _similar([prompt for prompt, _ in groups], SLACK):
            prompts = [groups[i][0] for i in members]
            self.add(starts[members], prompts, attention_bias([(p, ()) for p in prompts], max(prompts), *self._kind))
            place = len(self.batches) - 1
            rows = [
                (number, start, length)
                for number, i in enumerate(members)
                for start, length in zip(_starts(groups[i], int(starts[i])), groups[i][1], strict=True)
                if length
            ]
            for similar in _similar([length for *_, length in rows], SLACK):
                number, start, length = (list(column) for column in zip(*(rows[i] for i in similar), strict=True))
                bias = self._completion_bias([prompts[i] for i in number], max(prompts), max(length))
                self.add(np.asarray(start), length, bias, place, torch.tensor(number, device=self._device))

    @property
    def _kind(self) -> tuple[torch.device, torch.dtype]:
        return self._device, self._dtype

    def _completion_bias(self, prompts: Sequence[int], longest_prompt: int, length: int) -> torch.Tensor:
        """[S, 1, L, K] of completions whose prompts are so long. A padded token attends to those before it."""
        bias = _empty_bias(len(prompts), length, longest_prompt + length, *self._kind)
        bias[..., longest_prompt:].triu_(1)
        ends = torch.tensor(prompts, device=self._device)[:, None, None, None]
        bias[..., :longest_prompt].masked_fill_(torch.arange(longest_prompt, device=self._device) < ends, 0.0)
        return bias


def _starts(group: Group, start: int) -> list[int]:
    """Places of a group's completions in the packed sequence, in which the group begins at `start`."""
    prompt, completions = group
    return [start + prompt + before for before in np.cumsum([0, *completions])[:-1].tolist()]


def _empty_bias(rows: int, length: int, width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[S, 1, L, K] of -inf, whose rows are aligned."""
    aligned = -(-width // ALIGNMENT) * ALIGNMENT
    return torch.full((rows, 1, length, aligned), -torch.inf, dtype=dtype, device=device)[..., :width]


def attention_bias(groups: Sequence[Group], length: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[G, 1, L, L], see `AttentionBatch.bias`, of groups padded to L tokens.

    It is made on the device and in place. Padding attends to what is before it, so that its softmax is defined.
    """
    bias = _empty_bias(len(groups), length, length, device, dtype).triu_(1)
    for rows, (prompt, completions) in zip(bias[:, 0], groups, strict=True):
        end = prompt
        for completion in completions:
            start, end = end, end + completion
            rows[end:, start:end].fill_(-torch.inf)  # later completions do not see this one
    return bias


def _similar(lengths: Sequence[int], slack: int = 0) -> list[list[int]]:
    """Batch sequences of similar length, by their indices, shortest first."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if parts and lengths[i] + slack <= WASTE * (lengths[parts[-1][0]] + slack):
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts


class _Pad(torch.autograd.Function):
    """Copies packed tokens [T, ...] into each batch's sequences, [S, L, ...].

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
    """Puts the tokens of all batches' sequences, [S, L, ...] each, back into their packed order, [T, ...]."""

    @staticmethod
    def forward(ctx: Any, layout: SharedPrefixLayout, *sequences: torch.Tensor) -> torch.Tensor:
        ctx.layout = layout
        return _joined(sequences).index_select(0, layout.places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = grad_outputs
        shapes = [batch.gather.shape for batch in ctx.layout.batches]
        padded = gradient.new_zeros((sum(shape.numel() for shape in shapes), *gradient.shape[1:]))
        padded.index_copy_(0, ctx.layout.places, gradient)
        parts = padded.split([shape.numel() for shape in shapes])
        return None, *(part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True))


def _joined(sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """[S, L, ...] each -> all of their tokens."""
    flat = [each.flatten(0, 1) for each in sequences]
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
    queries, keys, values = (_Pad.apply(shared_prefix, tensor) for tensor in packed)
    outputs: list[torch.Tensor] = []
    for batch, q, k, v in zip(shared_prefix.batches, queries, keys, values, strict=True):
        if batch.prompts is not None:
            k, v = (
                torch.cat([of_all[batch.prompts].index_select(0, batch.prompt_row), own], dim=1)
                for of_all, own in ((keys, k), (values, v))
            )
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
