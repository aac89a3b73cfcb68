"""Attention of packed groups by a mask of who sees whom, for models that are not causal alone.

A layer's window counts positions, in which each completion follows the prompt, and images may see themselves in both
directions (Gemma 3). Each group is one call with its whole score matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from asyncrl.attention.prefix_kernels import FLASH_ALIGNMENT, Group

Spans = Sequence[tuple[int, int]]
"""Parts of a prompt whose tokens see each other in both directions: first place, and the one behind the last."""


class MaskedAttention:
    """Masks of each group, for layers without and with a window."""

    def __init__(
        self, groups: Sequence[Group], device: torch.device, window: int | None, spans: Sequence[Spans] | None = None
    ):
        self.window = window
        self._lengths = [prompt + sum(completions) for prompt, completions in groups]
        self._masks: list[torch.Tensor] = []
        self._sliding: list[torch.Tensor] = []
        for group, parts in zip(groups, spans or [()] * len(groups), strict=True):
            mask, positions = _visible(group, parts, device)
            self._masks.append(mask)
            self._sliding.append(mask if window is None else mask & (positions[:, None] - positions[None] < window))

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sinks: torch.Tensor | None = None,
        *,
        sliding: bool,
    ) -> torch.Tensor:
        """[1, H, T, D] each, sinks [H] -> [T, H, D]."""
        outputs: list[torch.Tensor] = []
        masks = self._sliding if sliding else self._masks
        for mask, *parts in zip(
            masks, *(each.split(self._lengths, dim=2) for each in (query, key, value)), strict=True
        ):
            outputs.append(attend(*parts, scale=scale, sinks=sinks, mask=mask)[0].transpose(0, 1))
        return torch.cat(outputs)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch's attention of [S, H, L, D] each, causal without a mask [L, L], with sinks [H] -> [S, H, L, D].

    Its kernels know no sinks: each is the score of a first token that all others see, whose value is 0.
    """
    width, first = value.shape[-1], query.shape[-1]
    if sinks is not None:
        scale = 1 / math.sqrt(first) if scale is None else scale
        query, key, value = (F.pad(each, (0, FLASH_ALIGNMENT, 1, 0)) for each in (query, key, value))
        query[..., first] = sinks[:, None] / scale
        key[..., 0, first] = 1
        mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
    out = F.scaled_dot_product_attention(
        *(query, key, value), mask, is_causal=mask is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out if sinks is None else out[..., 1:, :width]


def _visible(group: Group, spans: Spans, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, T] bool: the row's token sees the column's, without a window; [T] positions."""
    prompt, completions = group
    parts = [np.arange(prompt), *(np.arange(prompt, prompt + each) for each in completions)]
    positions = torch.from_numpy(np.concatenate(parts)).to(device)
    mask = torch.ones((len(positions), len(positions)), dtype=torch.bool, device=device).tril_()
    end = prompt
    for completion in completions:
        start, end = end, end + completion
        mask[end:, start:end] = False
    for first, last in spans:
        mask[first:last, first:last] = True
    return mask, positions


def window_of(config: Any) -> int | None:
    """The window of a model's layers with sliding attention; None where its configuration has no such layers."""
    text = getattr(config, "text_config", None) or config
    types = getattr(text, "layer_types", None)
    if (types is not None and "sliding_attention" not in types) or not getattr(text, "use_sliding_window", True):
        return None
    return getattr(text, "sliding_window", None)
