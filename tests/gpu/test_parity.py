"""The learner's log-probs of what the hf engine sampled, in the dtype that GPUs train in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from benchmarks.gpu_cycle import TINY, cycle_config, make_prompts, sample, train
from learner.training.engine import TorchEngine
from rollout_server.engines import create_engine

LIMITS = {"float32": (1e-3, 1e-4), "bfloat16": (0.2, 0.03)}
"""Largest and mean difference in nats."""


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("device", "size"),
    [
        pytest.param("cpu", "tiny", id="cpu"),
        pytest.param("cuda", "tiny", id="cuda-tiny", marks=pytest.mark.gpu),
        pytest.param("cuda", "100m", id="cuda-100m", marks=pytest.mark.gpu),
    ],
)
def test_engine_and_learner_agree(
    emptied_device: None,
    random_model: Callable[[str, str, str], Path],
    tmp_path: Path,
    dtype: str,
    device: str,
    size: str,
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": dtype},
        "learner": {"device": device},
        "rollout": {"device": device},
    }
    model = random_model(size, dtype, device)
    difference = asyncio.run(differences(cycle_config(model, tmp_path, TINY, **sections)))
    largest, mean = LIMITS[dtype]
    assert difference.max() <= largest
    assert difference.mean() <= mean


async def differences(config: RunConfig) -> np.ndarray:
    processor = PromptProcessor(config.model)
    prompts = make_prompts(processor, TINY)
    engine = create_engine(config, processor)
    await engine.start()
    try:
        groups = await sample(engine, prompts, config)
    finally:
        await engine.close()
    learner = TorchEngine(config.model_settings, config.learner.optim, total_updates=1)
    learner.prepare()
    return train(learner, prompts, groups, config)
