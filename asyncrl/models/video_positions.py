"""Where text stands after a video, in models with multimodal rotary positions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def place_text_after_videos(model: Any) -> None:
    """Have the model's own `get_rope_index` number what follows a video from the video's last position on.

    So Qwen2-VL (https://arxiv.org/abs/2409.12191, sec. 2.1) and Qwen2.5-VL were pretrained, and so vLLM does it;
    transformers 5.19 goes on after the larger side of a frame, inside the time of a video that lasts longer than that.
    """
    inner = getattr(model, "model", None)
    original = getattr(inner, "get_rope_index", None)
    if inner is None or original is None:
        return

    def get_rope_index(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        positions, deltas = original(*args, **kwargs)
        types, mask = kwargs.get("mm_token_type_ids"), kwargs.get("attention_mask")
        if types is not None:
            for row, kinds in enumerate(types):
                real = torch.ones_like(kinds, dtype=torch.bool) if mask is None else mask[row].bool()
                placed = positions[:, row, real]
                last = placed.max()
                _shift_after_videos(placed, kinds[real].tolist())
                deltas[row] += placed.max() - last  # the next token stands after all of them
                positions[:, row, real] = placed
        return positions, deltas

    inner.get_rope_index = get_rope_index


def _shift_after_videos(positions: torch.Tensor, kinds: list[int]) -> None:
    """[3, P] in place; `kinds` has 2 for the tokens of videos."""
    for end, (before, after) in enumerate(pairwise(kinds), 1):
        if before == 2 and after != 2:
            positions[:, end:] += max(0, int(positions[:, :end].max()) + 1 - int(positions[:, end].min()))
