"""What the learner says of its floating-point operations, against torch's own count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from asyncrl.config.schema import RunConfig
from asyncrl.models.processing import PromptProcessor
from learner.training.engines.torch_engine import TorchEngine
from learner.training.model_flops import ModelFlops
from learner.training.packing import build_micro_batch
from tests.rigs.made_up_batch import made_up_batch

PROJECTIONS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        ({"freeze_vision_tower": False}, 0.05),
        ({"freeze_vision_tower": True}, 0.05),
        ({"lora": {"rank": 1}}, 0.1),  # the lowest of two layers passes no gradient on
    ],
)
def test_agrees_with_torchs_count_of_matrix_products(
    make_config: Callable[..., RunConfig], model: dict[str, Any], tolerance: float
) -> None:
    config = make_config(model=model)
    engine = TorchEngine(config, config.learner.optim, 1)
    engine.prepare()
    batch = made_up_batch(config, PromptProcessor(config.model))
    micro_batch = build_micro_batch(engine.unwrap_model(), batch.train_groups, engine.device)
    counter = FlopCounterMode(display=False)
    with counter:
        engine.forward(micro_batch).logprobs.sum().backward()
    counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if op in PROJECTIONS)
    assert ModelFlops(engine.unwrap_model()).of(batch.train_groups) == pytest.approx(counted, rel=tolerance)
