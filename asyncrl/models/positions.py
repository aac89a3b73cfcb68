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
    positions, _ = inner.get_rope_index(
        ids,
        mm_token_type_ids=torch.from_numpy(prompt.token_types).long()[None],
        **_grids(prompt),
        attention_mask=torch.ones_like(ids),
    )
    return positions[:, 0], int(positions.max()) + 1


def _grids(prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
    """Qwen2.5-VL spaces a video's frames by their seconds; others take no notice."""
    found: dict[str, torch.Tensor] = {}
    if len(prompt.image_grids):
        found["image_grid_thw"] = torch.from_numpy(prompt.image_grids).long()
    if len(prompt.video_grids):
        found["video_grid_thw"] = torch.from_numpy(prompt.video_grids).long()
        found["second_per_grid_ts"] = torch.tensor(prompt.seconds_per_grid)
    return found
