"""Inputs of a model beside token ids: rotary positions, pixels and grids, for generation and training alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from asyncrl.processing.encoded_prompt import EncodedPrompt
from asyncrl.processing.image_grids import has_grid_positions, images_of

KNOWN_PROMPTS = 256
"""Prompts of each model whose positions are remembered: 48 kB each for 2,000 tokens."""
_Positions = tuple[torch.Tensor, int]
_known: WeakKeyDictionary[Any, OrderedDict[tuple[Any, ...], _Positions]] = WeakKeyDictionary()
"""Used by the one thread that works with the model."""


def prompt_positions(model: Any, prompt: EncodedPrompt) -> _Positions:
    """Positions `[R, P]` of the prompt's tokens, and the position of the first completion token.

    R is 3 (temporal, height, width) for models with multimodal rotary positions, else 1. One function makes
    them for generation and for training, from final ids and grids. Those of the last prompts are remembered: a prompt
    comes again with its parts in other micro-batches and passes, and equal grids and questions are common.
    """
    length = len(prompt.token_ids)
    if not has_grid_positions(model):
        return torch.arange(length)[None], length
    inner = model.model
    known = _known.setdefault(inner, OrderedDict())
    grids = (prompt.token_ids, prompt.token_types, prompt.image_grids, prompt.video_grids)
    key = (*(array.tobytes() for array in grids), prompt.seconds_per_grid)
    if key not in known:
        known[key] = _rope_index(inner, prompt)
        if len(known) > KNOWN_PROMPTS:
            known.popitem(last=False)
    return known[key]


def positions_behind(model: Any, prompt: EncodedPrompt, completion: EncodedPrompt) -> torch.Tensor:
    """Positions `[R, T]` of a completion's tokens where there are images among them: those of the whole row.

    A token's position follows from what is before it alone, so that the prompt's are what they are without completion.
    """
    length = len(prompt.token_ids)
    row = prompt.without_pixels().followed_by([completion.without_pixels()])
    positions, _ = prompt_positions(model, row)
    assert torch.equal(positions[:, :length], prompt_positions(model, prompt)[0]), "a prefix keeps its positions"
    return positions[:, length:]


def _rope_index(inner: Any, prompt: EncodedPrompt) -> _Positions:
    """Positions by the model's own function, which takes a millisecond."""
    ids = torch.from_numpy(prompt.token_ids).long()[None]
    positions, _ = inner.get_rope_index(
        ids,
        mm_token_type_ids=torch.from_numpy(prompt.token_types).long()[None],
        **_grids(prompt),
        attention_mask=torch.ones_like(ids),
    )
    return positions[:, 0], int(positions.max()) + 1


def _grids(prompt: EncodedPrompt) -> dict[str, torch.Tensor]:
    """Keyword arguments with the grids of images and videos, and seconds per grid, which only Qwen2.5-VL uses."""
    found: dict[str, torch.Tensor] = {}
    if len(prompt.image_grids):
        found["image_grid_thw"] = torch.from_numpy(prompt.image_grids).long()
    if len(prompt.video_grids):
        found["video_grid_thw"] = torch.from_numpy(prompt.video_grids).long()
        found["second_per_grid_ts"] = torch.tensor(prompt.seconds_per_grid)
    return found


def media_inputs(model: Any, prompts: Sequence[EncodedPrompt], token_types: torch.Tensor) -> dict[str, torch.Tensor]:
    """Keyword arguments of the model for the images and videos of these prompts, each once and in their order.

    `token_types` are those of the whole input. Nothing for text alone: a model without a vision part takes none of it.
    What a family takes beside pixels is its `ImageGrids`'.
    """
    seen = [(p, p.pixel_values) for p in prompts if p.pixel_values is not None]
    frames = [p.video_pixel_values for p in prompts if p.video_pixel_values is not None]
    inputs: dict[str, torch.Tensor] = {}
    if seen:
        pixels = torch.cat([pixels for _, pixels in seen])
        if pixels.dtype != torch.float32:  # rounded by its processor; the tower of Llama 4 casts none
            pixels = pixels.to(model.dtype)
        inputs |= images_of(model).model_inputs(pixels, [prompt for prompt, _ in seen], token_types)
    if frames:
        inputs["pixel_values_videos"] = torch.cat(frames)
        inputs["video_grid_thw"] = torch.from_numpy(np.concatenate([p.video_grids for p in prompts])).long()
    return {**inputs, "mm_token_type_ids": token_types} if inputs and has_grid_positions(model) else inputs


def place_text_after_videos(model: Any) -> None:
    """Patch the model's `get_rope_index`: text after a video starts after the video's last position.

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
