"""Prompts to key-value caches: whole ones left-padded to one length, and what comes behind a cache that is there."""

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
    inputs = pass_inputs(model, prompts, [places for places, _ in placed], device)
    # Of every token, also in layers with a window: the model's own cache would drop what completions still see.
    output = model(**inputs, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
    next_positions = [position for _, position in placed]
    return Prefilled(
        output.logits[:, -1], output.past_key_values, inputs["attention_mask"], next_positions, len(placed[0][0])
    )


def pass_inputs(
    model: Any,
    pieces: Sequence[EncodedPrompt],
    places: Sequence[torch.Tensor],
    device: torch.device,
    *,
    behind: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass over prompts, or over pieces of them with their positions [1 or 3, M].

    Prompts are padded on the left. Pieces that come `behind` a cache, of which it is the attention [N, W], are padded
    on the right: a layer with a window counts columns, and between a row's tokens there must be none.
    """
    longest = max(len(piece.token_ids) for piece in pieces)
    position_rows = len(places[0])
    ids = torch.zeros((len(pieces), longest), dtype=torch.long)
    types, attention = torch.zeros_like(ids), torch.zeros_like(ids)
    positions = torch.zeros((position_rows, len(pieces), longest), dtype=torch.long)
    for row, (piece, place) in enumerate(zip(pieces, places, strict=True)):
        start = longest - len(piece.token_ids) if behind is None else 0
        columns = slice(start, start + len(piece.token_ids))
        ids[row, columns] = torch.from_numpy(piece.token_ids)
        types[row, columns] = torch.from_numpy(piece.token_types)
        attention[row, columns] = 1
        positions[:, row, columns] = place
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": attention}
    inputs["position_ids"] = positions if position_rows == 3 else positions[0]
    inputs |= media_inputs(model, pieces, types)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    if behind is not None:
        inputs["attention_mask"] = torch.cat([behind, inputs["attention_mask"]], dim=1)
    return inputs
