"""Rotary positions of one prompt and of what follows it, for multimodal (3-row) and plain models alike."""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.models.processing import EncodedPrompt


def prompt_positions(model: Any, prompt: EncodedPrompt) -> tuple[torch.Tensor, int]:
    """Positions `[R, P]` of the prompt's tokens, and the position of the first completion token.

    R is 3 (temporal, height, width) for models with multimodal rotary positions, else 1. One function makes
    them for generation and for training, from final ids and grids.
    """
    length = len(prompt.token_ids)
    inner = getattr(model, "model", None)
    if inner is None or not hasattr(inner, "get_rope_index"):
        return torch.arange(length)[None], length
    ids = torch.from_numpy(prompt.token_ids).long()[None]
    grids = torch.from_numpy(prompt.image_grids).long() if len(prompt.image_grids) else None
    positions, _ = inner.get_rope_index(
        ids,
        mm_token_type_ids=torch.from_numpy(prompt.token_types).long()[None],
        image_grid_thw=grids,
        attention_mask=torch.ones_like(ids),
    )
    return positions[:, 0], int(positions.max()) + 1
