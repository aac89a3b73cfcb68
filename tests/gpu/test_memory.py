"""Planned bytes of an update against the device's own count."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.attention import shared_prefix
from asyncrl.config.schema import RunConfig
from asyncrl.memory_plan.live_bytes import LiveBytes
from asyncrl.memory_plan.rehearsal import rehearse, train_pass
from benchmarks.gpu_cycle import TINY, cycle_config
from learner.training.engine import TorchEngine

ABOVE = 1.4
"""Largest factor by which the plan may exceed what a fused kernel keeps."""


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("device", "size"),
    [
        pytest.param("cpu", "tiny", id="cpu"),
        pytest.param("cuda", "100m", id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_full_micro_batch_takes_what_was_planned(
    emptied_device: None,
    random_model: Callable[[str, str, str], Path],
    tmp_path: Path,
    device: str,
    size: str,
    dtype: str,
    checkpointing: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The plan is a GPU's, which shares prompts in 16 bits and separates in float32; a CPU takes what costs less.
    monkeypatch.setattr(shared_prefix, "shared_cost", lambda groups: 0 if dtype == "bfloat16" else math.inf)
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": dtype},
        "learner": {"device": device, "gradient_checkpointing": checkpointing},
        "rollout": {"device": device},
        "batch": {"tokens_per_microbatch": 256 if device == "cpu" else 4096},
        "data": {"max_prompt_length": 64 if device == "cpu" else 1024},
    }
    config = cycle_config(random_model(size, dtype, device), tmp_path, TINY, **sections)
    planned = rehearse(config).passing
    measured = passing_bytes(config)
    assert measured <= 1.05 * planned
    assert planned <= ABOVE * measured


def passing_bytes(config: RunConfig) -> int:
    """The rehearsed pass for real: what it adds at its peak to weights and gradients."""
    engine = TorchEngine(config.model_settings, config.learner.optim, 1)
    engine.prepare()
    model = engine.unwrap_model()
    train_pass(model, config, engine.device)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train_pass(model, config, engine.device)
        return torch.cuda.max_memory_allocated() - rest
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with LiveBytes("cpu", known=[*model.parameters(), *model.buffers(), *gradients]) as live:
        train_pass(model, config, engine.device)
        return live.peak
