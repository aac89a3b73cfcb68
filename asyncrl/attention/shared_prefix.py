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
from typing import Any

import numpy as np
import torch

from asyncrl.attention.masked_attention import MaskedAttention, Spans, attend
from asyncrl.attention.prefix_kernels import CpuFlash, Group, Kernel, SharedAttention, VarlenFlash, similar, spans
from asyncrl.errors import UserError

SHARED_PREFIX_ATTENTION = "asyncrl_shared_prefix"
"""Name under which transformers finds it (`attn_implementation`)."""
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


class SeparateAttention:
    """Each completion behind a copy of its prompt, in causal calls of torch's own attention.

    Sequences of similar length are padded to one at their end, where a causal token does not see the padding.
    """

    def __init__(self, groups: Sequence[Group], device: torch.device):
        first, prompt, start, length = _separate_rows(groups)
        lengths = prompt + length
        self._shapes: list[tuple[int, int]] = []
        gathers: list[np.ndarray] = []
        places = np.empty(sum(prompt + sum(completions) for prompt, completions in groups), np.int64)
        padded = 0
        for chosen in similar(lengths.tolist()):
            rows, column = np.asarray(chosen)[:, None], np.arange(lengths[chosen].max())
            behind = column - prompt[rows]
            source = np.where(behind < 0, first[rows] + column, start[rows] + behind)
            is_real = column < lengths[rows]
            gathers.append(np.where(is_real, source, first[rows]).ravel())
            places[source[is_real]] = padded + np.flatnonzero(is_real)  # a prompt's output is that of any copy
            padded += is_real.size
            self._shapes.append((len(chosen), len(column)))
        self._gather = torch.from_numpy(np.concatenate(gathers)).to(device)
        self._places = torch.from_numpy(places).to(device)

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
        padded = [tensor[0].transpose(0, 1).index_select(0, self._gather) for tensor in (query, key, value)]
        sizes = [rows * length for rows, length in self._shapes]
        outputs: list[torch.Tensor] = []
        for shape, q, k, v in zip(self._shapes, *(tensor.split(sizes) for tensor in padded), strict=True):
            if repeats > 1:
                k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            sequences = (tensor.unflatten(0, shape).transpose(1, 2) for tensor in (q, k, v))
            attended = attend(*sequences, scale=scale, sinks=sinks)
            outputs.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._places)


def _separate_rows(groups: Sequence[Group]) -> np.ndarray:
    """[4, rows]: of each completion where its prompt is in the packed sequence and how long, and where it is itself and
    how long; of length 0 for a prompt alone, where it has none."""
    rows: list[tuple[int, int, int, int]] = []
    start = 0
    for prompt, completions in groups:
        end = start + prompt
        for completion in completions:
            if completion:
                rows.append((start, prompt, end, completion))
            end += completion
        if end == start + prompt:
            rows.append((start, prompt, end, 0))
        start = end
    return np.asarray(rows, np.int64).reshape(-1, 4).T


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
    if (window is not None and window < longest) or (spans and any(spans)):
        return SharedPrefixLayout(num_tokens, longest, MaskedAttention(groups, device, window, spans))
    kernel: Kernel | None = None
    if device.type == "cpu":
        if shared_cost(groups) <= separate_cost(groups):
            kernel = CpuFlash()
    elif dtype in (torch.bfloat16, torch.float16):
        kernel = VarlenFlash()
    if kernel is None:
        return SharedPrefixLayout(num_tokens, longest, SeparateAttention(groups, device))
    return SharedPrefixLayout(num_tokens, longest, SharedAttention(groups, kernel, device))


def shared_cost(groups: Sequence[Group]) -> int:
    """Scores of one head in the shared form, what its calls take, and its merged tokens."""
    own, behind = spans(groups)
    lengths = [length for _, length in own]
    scores = sum(length * length // 2 for length in lengths) + sum(queries * keys for _, keys, _, queries in behind)
    merged = sum(queries for *_, queries in behind)
    return scores + CALL_SCORES * (len(similar(lengths)) + len(behind)) + TOKEN_SCORES * merged


def separate_cost(groups: Sequence[Group]) -> int:
    """Scores of one head in the separate form, what its calls take, and its copies of tokens."""
    _, prompt, _, length = _separate_rows(groups)
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


def hand_on_layout(model: Any) -> None:
    """Let the layout reach the attention of StableLM, whose layers (transformers 5.19) keep such arguments to
    themselves."""
    for layer in model.modules():
        if type(layer).__name__ == "StableLmDecoderLayer":
            given: dict[str, Any] = {}

            def keep(_: Any, __: Any, arguments: dict[str, Any], given: dict[str, Any] = given) -> None:
                given["shared_prefix"] = arguments.get("shared_prefix")

            def add(_: Any, values: Any, arguments: dict[str, Any], given: dict[str, Any] = given) -> Any:
                return values, {**arguments, **given}

            layer.register_forward_pre_hook(keep, with_kwargs=True)
            layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)


def register() -> None:
    """Make the attention known to transformers; the pattern comes with the layout, so no mask is built."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(SHARED_PREFIX_ATTENTION, shared_prefix_attention)
    AttentionMaskInterface.register(SHARED_PREFIX_ATTENTION, lambda *args, **kwargs: None)
