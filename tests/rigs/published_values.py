"""The published values (vectors.json) as the tokens that the algorithms take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.algorithm import AlgorithmConfig

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
LOSS = VECTORS["loss_inputs"]
MASK = torch.tensor(LOSS["mask"]).bool()
ROW = torch.arange(2)[:, None].expand(2, 4)[MASK]
SYMMETRIC = AlgorithmConfig(clip_ratio_high=0.2, clip_ratio_c=1e9)


def flat(rows: list[list[float]]) -> torch.Tensor:
    """The unmasked tokens of a padded [2, 4]."""
    return torch.tensor(rows)[MASK]


def close(got: torch.Tensor, expected: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected), atol=tolerance, rtol=tolerance)
