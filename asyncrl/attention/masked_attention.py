"""Attention of packed groups by a mask of who sees whom, for models that are not causal alone.

A layer's window counts positions, in which each completion follows the prompt, and images may see themselves in both
directions (Gemma 3). Each group is one call with its whole score matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from asyncrl.attention.prefix_kernels import Group

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
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, *, sliding: bool
    ) -> torch.Tensor:
        """[1, H, T, D] each -> [T, H, D]."""
        outputs: list[torch.Tensor] = []
        masks = self._sliding if sliding else self._masks
        for mask, *parts in zip(
            masks, *(each.split(self._lengths, dim=2) for each in (query, key, value)), strict=True
        ):
            many = query.shape[1] != key.shape[1]
            attended = F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=many)
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)


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
