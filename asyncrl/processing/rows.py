"""Rows of several turns put together from their pieces: the prompt, what was sampled, and the bridges between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from asyncrl.processing.processor import EncodedPrompt

_NO_GRIDS = np.zeros((0, 3), np.int32)


def sampled_piece(token_ids: np.ndarray) -> EncodedPrompt:
    """Tokens of a turn as a piece of a row."""
    return EncodedPrompt("a turn", token_ids.astype(np.int32), np.zeros(len(token_ids), np.int32), _NO_GRIDS, ())


def joined_row(prompt: EncodedPrompt, pieces: Iterable[EncodedPrompt]) -> EncodedPrompt:
    """The prompt of a later turn, or a whole trajectory: tokens and images of all pieces, one after another."""
    parts = (prompt, *pieces)
    pixels = [part.pixel_values for part in parts if part.pixel_values is not None]
    unexpanded = [part.token_ids if part.unexpanded_ids is None else part.unexpanded_ids for part in parts]
    return replace(
        prompt,
        token_ids=np.concatenate([part.token_ids for part in parts]),
        token_types=np.concatenate([part.token_types for part in parts]),
        image_grids=np.concatenate([part.image_grids for part in parts]),
        image_hashes=tuple(digest for part in parts for digest in part.image_hashes),
        unexpanded_ids=np.concatenate(unexpanded),
        pixel_values=torch.cat(pixels) if pixels else None,
    )
