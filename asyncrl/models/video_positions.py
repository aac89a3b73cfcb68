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
        types = kwargs.get("mm_token_type_ids")
        if types is not None:
            for row, kinds in enumerate(types.tolist()):
                deltas[row] += _shift_after_videos(positions[:, row], kinds)
        return positions, deltas

    inner.get_rope_index = get_rope_index


def _shift_after_videos(positions: torch.Tensor, kinds: list[int]) -> int:
    """[3, P] in place; `kinds` has 2 for the tokens of videos. Returns how far the last token has moved."""
    moved = 0
    for end, (before, after) in enumerate(pairwise(kinds), 1):
        if before == 2 and after != 2:
            late = max(0, int(positions[:, :end].max()) + 1 - int(positions[:, end].min()))
            positions[:, end:] += late
            moved += late
    return moved
