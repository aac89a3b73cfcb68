"""Attention for training on groups: the prompt of a group is computed once, its completions share it.

A packed sequence is `prompt, completion 1, completion 2, ...` per group, group after group. A completion token
attends to its group's prompt and to the earlier tokens of its own completion; nothing else. Each group then
costs `P + n*C` tokens instead of `n*(P + C)`, each image passes the vision tower once, and gradients are those
of the separate sequences (tested).

There is no mask and no score between completions. Attention is computed in one of two forms: shared
(prefix_kernels.py), with `P^2/2 + n*(P*C + C^2/2)` scores, or separate, each completion behind a copy of its prompt's
queries, keys and values, with `n*(P + C)^2/2`. Learned sinks (gpt-oss) are one more score of each head in all forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from asyncrl.attention.masked_attention import MaskedAttention, Spans, attend
from asyncrl.attention.prefix_kernels import CpuFlash, Group, SharedAttention, VarlenFlash, similar, spans
from asyncrl.attention.stateful_layers import RowBatches, separate_rows
from asyncrl.errors import UserError

SHARED_PREFIX_ATTENTION = "asyncrl_shared_prefix"
"""Name under which transformers finds it (`attn_implementation`)."""
CPU = torch.device("cpu")
CALL_SCORES = 16_384
"""Scores of one head that take as long as a call of a kernel on a CPU (benchmarks/packed_attention.py)."""
TOKEN_SCORES = 64
"""Scores of one head that take as long as a token's copies in the separate form, and as its merge in the shared one."""


HARMLESS = ("position_ids", "cache_position")
"""Arguments that families hand to every attention, and that packed groups have in their layout."""


class UnpackableError(UserError):
    """A model's attention has a part that packed groups have not: its rows are computed one at a time."""


@dataclass(frozen=True)
class SharedPrefixLayout:
    """Attention pattern of a packed sequence of T tokens, and the form in which it is computed."""

    num_tokens: int
    longest_row: int
    """Tokens of the longest prompt with one of its completions: no window of so many cuts anything."""
    form: SharedAttention | SeparateAttention | MaskedAttention
    groups: tuple[Group, ...] = ()
    device: torch.device = CPU

    @cached_property
    def rows(self) -> RowBatches:
        """Batches of all rows alone, for layers with a state."""
        return self.form.rows if isinstance(self.form, SeparateAttention) else RowBatches(self.groups, self.device)


class SeparateAttention:
    """Each completion behind a copy of its prompt, in causal calls of torch's own attention."""

    def __init__(self, groups: Sequence[Group], device: torch.device):
        self.rows = RowBatches(groups, device)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[1, H, T, D] each, sinks [H] -> [T, H, D]."""
        # No CUDA kernel for all dtypes takes shared key heads: torch would fall back to whole score matrices.
        repeats = 1 if query.device.type == "cpu" else query.shape[1] // key.shape[1]
        outputs: list[torch.Tensor] = []
        for q, k, v in zip(*(self.rows.apart(each[0].transpose(0, 1)) for each in (query, key, value)), strict=True):
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
            attended = attend(*(each.transpose(1, 2) for each in (q, k, v)), scale=scale, sinks=sinks)
            outputs.append(attended.transpose(1, 2))
        return self.rows.packed(outputs)


def make_layout(
    groups: Sequence[Group],
    device: torch.device,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    spans: Sequence[Spans] | None = None,
) -> SharedPrefixLayout:
    """Layout of packed groups for a model of `dtype`, in the form that costs less on a CPU.

    A model with a `window` that cuts a row, or with `spans` of prompts that see themselves in both directions, gets
    masks.

    On a GPU (meta stands for one) it is shared where flash attention takes the dtype, which is the form with the fewest
    scores; without it, in float32, separate.
    """
    num_tokens = sum(prompt + sum(completions) for prompt, completions in groups)
    longest = max((prompt + max(completions, default=0) for prompt, completions in groups), default=0)
    form: SharedAttention | SeparateAttention | MaskedAttention
    if (window is not None and window < longest) or (spans and any(spans)):
        form = MaskedAttention(groups, device, window, spans)
    elif device.type == "cpu" and shared_cost(groups) <= separate_cost(groups):
        form = SharedAttention(groups, CpuFlash(), device)
    elif device.type != "cpu" and dtype in (torch.bfloat16, torch.float16):
        form = SharedAttention(groups, VarlenFlash(), device)
    else:
        form = SeparateAttention(groups, device)
    return SharedPrefixLayout(num_tokens, longest, form, tuple(groups), device)


def shared_cost(groups: Sequence[Group]) -> int:
    """Scores of one head in the shared form, what its calls take, and its merged tokens."""
    own, behind = spans(groups)
    lengths = [length for _, length in own]
    scores = sum(length * length // 2 for length in lengths) + sum(queries * keys for _, keys, _, queries in behind)
    merged = sum(queries for *_, queries in behind)
    return scores + CALL_SCORES * (len(similar(lengths)) + len(behind)) + TOKEN_SCORES * merged


def separate_cost(groups: Sequence[Group]) -> int:
    """Scores of one head in the separate form, what its calls take, and its copies of tokens."""
    _, prompt, _, length = separate_rows(groups)
    lengths = (prompt + length).tolist()
    scores = sum(length * length // 2 for length in lengths)
    return scores + CALL_SCORES * len(similar(lengths)) + TOKEN_SCORES * sum(lengths)


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
    is_causal: bool | None = None,
    shared_prefix: SharedPrefixLayout | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D], s_aux, the sinks, [H] -> [1, T, H, D].

    Raises UnpackableError for what the layout does not say, such as caps on scores or a mask of the model's own.
    """
    if shared_prefix is None:
        raise UnpackableError(f"{type(module).__name__} does not hand on the layout of packed groups")
    if dropout:
        raise UserError(
            f"this model's attention has dropout {dropout:g}: its log-probs would differ from the engine's. "
            "Set its dropout to 0 in the model folder's config.json"
        )
    form = shared_prefix.form
    window = form.window if isinstance(form, MaskedAttention) else None
    unknown = [
        name for name, given in others.items() if name not in HARMLESS and given is not None and given is not False
    ]
    if attention_mask is not None and attention_mask.numel() > 1:  # one element hides nothing
        unknown.append("attention_mask")
    if is_causal is False:
        unknown.append("is_causal=False")
    if sliding_window not in (None, window) and sliding_window < shared_prefix.longest_row:
        unknown.append(f"sliding_window={sliding_window}")
    if unknown:
        raise UnpackableError(f"the attention of {type(module).__name__} takes {', '.join(unknown)}")
    if isinstance(form, MaskedAttention):
        sliding = sliding_window is not None and sliding_window == window
        return form(query, key, value, scaling, s_aux, sliding=sliding)[None], None
    return form(query, key, value, scaling, s_aux)[None], None


def register() -> None:
    """Make the attention known to transformers; the pattern comes with the layout, so no mask is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
    AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, lambda *args, **kwargs: None)
