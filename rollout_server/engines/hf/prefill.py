"""Prompts to key-value caches, left-padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from asyncrl.processing.model_inputs import media_inputs, prompt_positions
from asyncrl.processing.processor import EncodedPrompt


@dataclass(frozen=True)
class Prefilled:
    """`R` prompts, left-padded to the longest one's `P` tokens."""

    logits: torch.Tensor
    """[R, V] that predict the first completion token."""
    cache: Any
    """transformers' cache; each layer's keys and values are [R, H, P, D]."""
    attention: torch.Tensor
    """[R, P] int64, 0 on padding."""
    next_positions: list[int]
    """Rotary position of each prompt's first completion token."""
    position_rows: int
    """3 for multimodal rotary positions, else 1."""


def prefill(model: Any, prompts: Sequence[EncodedPrompt], device: torch.device) -> Prefilled:
    """One forward pass over the prompts, their images and their videos."""
    placed = [prompt_positions(model, prompt) for prompt in prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    position_rows = len(placed[0][0])
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    types, attention = torch.zeros_like(ids), torch.zeros_like(ids)
    positions = torch.zeros((position_rows, len(prompts), longest), dtype=torch.long)
    for row, (prompt, (places, _)) in enumerate(zip(prompts, placed, strict=True)):
        columns = slice(longest - len(prompt.token_ids), longest)
        ids[row, columns] = torch.from_numpy(prompt.token_ids)
        types[row, columns] = torch.from_numpy(prompt.token_types)
        attention[row, columns] = 1
        positions[:, row, columns] = places
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": attention}
    inputs["position_ids"] = positions if position_rows == 3 else positions[0]
    inputs |= media_inputs(model, prompts, types)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    # Of every token, also in layers with a window: the model's own cache would drop what completions still see.
    output = model(**inputs, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
    next_positions = [position for _, position in placed]
    return Prefilled(
        output.logits[:, -1], output.past_key_values, inputs["attention_mask"], next_positions, position_rows
    )
