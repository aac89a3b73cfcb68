"""Trajectories whose advantages are published, and estimates of them."""

from __future__ import annotations

import json
from typing import Any

import torch

from asyncrl.algorithms.loading import load_method
from asyncrl.algorithms.trajectories import Credit, Trajectories
from asyncrl.config.algorithm import AlgorithmConfig
from tests.rigs.tiny import ROOT

VECTORS = json.loads((ROOT / "tests" / "rigs" / "vectors.json").read_text())
SCORES = VECTORS["scores"]
LENGTHS = [int(length) for length in SCORES["lengths"]]


def trajectories(scores: list[float], group: list[int], lengths: list[int] | None = None, **more: Any) -> Trajectories:
    """Rows of these lengths, one token each by default."""
    counts = torch.tensor(lengths or [1] * len(scores))
    row = torch.arange(len(scores)).repeat_interleave(counts)
    return Trajectories(torch.tensor(scores), torch.tensor(group), row, torch.zeros(len(row)), **more)


def estimate(name: str, t: Trajectories, **settings: Any) -> Credit:
    return load_method("advantage", name, "adv_estimator")(t, AlgorithmConfig(adv_estimator=name, **settings))


def close(got: torch.Tensor | None, expected: Any, tolerance: float = 1e-6) -> None:
    assert got is not None
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float32), atol=tolerance, rtol=tolerance)


def kept(lines: list[list[float]], mask: list[list[float]]) -> torch.Tensor:
    return torch.tensor(lines)[torch.tensor(mask).bool()]
