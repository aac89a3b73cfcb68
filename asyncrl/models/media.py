"""The vision tower's share of a forward pass, on both sides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.models.processing import EncodedPrompt


def media_inputs(prompts: Sequence[EncodedPrompt], token_types: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keyword arguments of the model for the images and videos of these prompts, each once and in their order.

    `token_types` are those of the whole input. Nothing for text alone: a model without a vision part takes none of it.
    """
    images = [prompt for prompt in prompts if prompt.pixel_values is not None]
    videos = [prompt for prompt in prompts if prompt.video_pixel_values is not None]
    inputs: dict[str, torch.Tensor] = {}
    if images:
        inputs["pixel_values"] = torch.cat([p.pixel_values for p in images if p.pixel_values is not None])
        inputs["image_grid_thw"] = _joined([p.image_grids for p in images])
    if videos:
        inputs["pixel_values_videos"] = torch.cat(
            [p.video_pixel_values for p in videos if p.video_pixel_values is not None]
        )
        inputs["video_grid_thw"] = _joined([p.video_grids for p in videos])
    return {**inputs, "mm_token_type_ids": token_types} if inputs else {}


def _joined(grids: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(grids)).long()
