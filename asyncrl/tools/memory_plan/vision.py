"""The vision tower's share of a rehearsal: images in the place of so many tokens."""

from __future__ import annotations

import math
from typing import Any

import torch


def image_features(model: Any, image_tokens: int, device: torch.device) -> torch.Tensor:
    """Of at least `image_tokens` tokens together, through the model's own tower and connector."""
    vision = model.config.vision_config
    if hasattr(vision, "temporal_patch_size"):
        return _of_any_size(model.model.visual, vision, image_tokens, device)
    return _of_one_size(model, vision, image_tokens, device)


def _of_any_size(tower: Any, vision: Any, image_tokens: int, device: torch.device) -> torch.Tensor:
    """Qwen's towers take flat patches and their grid: one image that is nearly square."""
    side = vision.spatial_merge_size  # one token is side x side patches
    height = math.isqrt(image_tokens)
    grid = torch.tensor([[1, side * height, side * -(-image_tokens // height)]])
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.empty((int(grid.prod()), patch), device=device)
    windows: dict[str, torch.Tensor] = {}
    if getattr(vision, "window_size", 0):  # one window: the tensors of thousands are as large together
        windows["window_index"] = torch.arange(int(grid.prod()) // side**2, device=device)
        windows["cu_window_seqlens"] = torch.tensor([0, int(grid.prod())])
    return tower(pixels.type(tower.dtype), grid_thw=grid, **windows).pooler_output


def _of_one_size(model: Any, vision: Any, image_tokens: int, device: torch.device) -> torch.Tensor:
    """CLIP's and SigLIP's towers take whole images of the size in the configuration, each as many tokens."""
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size

    def features(images: int) -> torch.Tensor:
        pixels = torch.empty((images, vision.num_channels, height, width), device=device)
        found = model.get_image_features(pixels.type(model.dtype)).pooler_output
        return found.flatten(0, -2) if isinstance(found, torch.Tensor) else torch.cat(tuple(found))

    with torch.no_grad():
        of_each = len(features(1))
    return features(-(-image_tokens // of_each))
