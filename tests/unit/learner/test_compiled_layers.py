"""Compiled layers compute what the model's own do."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import RunConfig
from asyncrl.processing.processor import PromptProcessor
from learner.training.engine import TorchEngine
from tests.rigs.made_up_batch import made_up_batch

NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file(),
    reason="torch.compile needs a C++ compiler and Python's headers on a CPU",
)
pytestmark = [pytest.mark.usefixtures("one_thread"), NEEDS_COMPILER]


@pytest.mark.parametrize(
    ("model", "learner"), [({}, {}), ({"lora": {"rank": 2}}, {"gradient_checkpointing": True})], ids=str
)
def test_losses_and_gradients_are_those_of_the_models_own_layers(
    make_config: Callable[..., RunConfig], model: dict[str, Any], learner: dict[str, Any]
) -> None:
    found = []
    for compiled in (False, True):
        config = make_config(model=model, learner={**learner, "compile_layers": compiled})
        engine = TorchEngine(config.model_settings, config.learner.optim, 10)
        engine.prepare()
        micro_batch = engine.pack(made_up_batch(config, PromptProcessor(config.model)).train_groups)
        logprobs = engine.forward(micro_batch).logprobs
        engine.backward(logprobs.sum())
        gradients = {n: p.grad for n, p in engine.model.named_parameters() if p.grad is not None}
        found.append((logprobs.detach(), gradients))
    assert any(module._compiled_call_impl is not None for module in engine.model.modules())
    (own, own_gradients), (compiled_logprobs, compiled_gradients) = found
    torch.testing.assert_close(compiled_logprobs, own, rtol=1e-5, atol=1e-5)
    assert own_gradients.keys() == compiled_gradients.keys()
    for name, gradient in own_gradients.items():
        torch.testing.assert_close(
            compiled_gradients[name], gradient, rtol=1e-4, atol=float(gradient.abs().max()) * 1e-4
        )
