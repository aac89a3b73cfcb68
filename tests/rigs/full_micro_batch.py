"""The largest micro-batch that a configuration allows: every token of a completion trained, and prompts of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncrl.processing.encoded_prompt import EncodedPrompt
from learner.training.packing import MicroBatch, PackedTrajectory, TrainGroup, build_micro_batch

Shape = tuple[int, int, int, int]
"""Tokens of a prompt and of a completion, completions of a group, groups."""


def image_prompt(model: Any, length: int) -> EncodedPrompt:
    """All image but its first and last tokens."""
    config = model.config
    ids = np.full(length, config.image_token_id, np.int32)
    ids[0], ids[-4:] = config.vision_start_token_id, 5
    count = length - 5
    patch = 3 * 2 * config.vision_config.patch_size**2
    grid = np.array([[1, 2, 2 * count]], np.int32)
    types, pixels = (ids == ids[1]).astype(np.int32), torch.zeros(4 * count, patch)
    return EncodedPrompt("row", ids, types, grid, ("h",), pixel_values=pixels)


def full_micro_batch(model: Any, shape: Shape) -> MicroBatch:
    prompt, response, group, groups = shape
    completions = tuple(
        PackedTrajectory(i, np.full(response, 7, np.int32), np.ones(response, np.int32)) for i in range(group)
    )
    full = [TrainGroup(image_prompt(model, prompt), completions) for _ in range(groups)]
    return build_micro_batch(model, full, torch.device("cpu"))
