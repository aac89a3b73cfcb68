"""Weights of 8 bits in the memory plan."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.memory_plan.plan import make_plan
from asyncrl.models.loading import load_model
from asyncrl_plugins.quantization.grid import quantizable
from tests.unit.asyncrl.test_memory_plan import MakeConfig, planned, small

__all__ = ["small"]


def test_weights_of_8_bits_are_planned_where_the_engine_holds_them(make_config: MakeConfig, small: Path) -> None:
    def weights(engine: str, quantization: str) -> int:
        rollout = {"engine": engine, "quantization": quantization, "device": "cuda:1"}
        config = planned(make_config, small, model={"dtype": "bfloat16"}, rollout=rollout)
        phase = make_plan(config).phases[-1]
        (line,) = [line for line in phase.lines if line.name == "weights"]
        assert ("linear layers in" in line.why) == (engine == "vllm" and bool(quantization))
        return line.nbytes

    model = load_model(planned(make_config, small, model={"dtype": "bfloat16"}).model, device=torch.device("cpu"))
    matrices = [model.get_parameter(name) for name in quantizable(model)]
    saved = sum(matrix.numel() - 4 * matrix.shape[0] for matrix in matrices)
    assert saved > 0
    assert weights("vllm", "") - weights("vllm", "fp8") == saved
    assert weights("hf", "") == weights("hf", "fp8")
